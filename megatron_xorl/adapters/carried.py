"""Factors that contribute and do not train: what is left of a scope that was narrowed while its B was not zero.

The one idea: a model and its adapter file compute the same, so whatever contributes is in the file, whether it trains or not; and
nothing contributes unseen. A frozen factor with a non-zero B therefore needs ``allow_nonzero_frozen: true`` in the adapter
configuration, is written beside what trains, and is listed under ``frozen`` in ``adapter_config.json``.

Refused: a frozen factor that is not zero without that permission, and one that the model does not build.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_xorl.adapters.inventory import Factor, Inventory
from megatron_xorl.errors import AdapterError

__all__ = ["carried_targets", "check_carried", "stored_factors"]


def stored_factors(inventory: Inventory, carried: Collection[str]) -> tuple[Factor, ...]:
    """Return what a file of ``inventory`` holds, in its order: the factors that train, and those of the ``carried`` targets."""
    return tuple(
        factor for factor in inventory.factors if factor.trainable or factor.target in carried
    )


def carried_targets(factors: Sequence[Factor]) -> tuple[str, ...]:
    """Return the targets among the factors of a file that do not train, in its order."""
    return tuple(dict.fromkeys(factor.target for factor in factors if not factor.trainable))


def check_carried(source: str, contributing: Collection[str], *, allowed: bool) -> None:
    """Return if nothing frozen contributes, or it may.

    Args:
        source: what has the factors, for the message: a file or a model.
        contributing: targets that are frozen and whose B is not zero.
        allowed: ``allow_nonzero_frozen`` of the adapter configuration.

    Raises:
        AdapterError: names how many there are, the first, and both remedies.
    """
    if contributing and not allowed:
        raise AdapterError(
            f"{source} has {len(contributing)} targets that are frozen here and not zero, first {min(contributing)}; set "
            "allow_nonzero_frozen: true in the adapter config to keep them contributing, or widen glm52_lora_scope to train them"
        )
