"""Bytes of an adapter in training, region by region, before any parallel cut.

The one idea: a factor costs its own bytes; one that trains costs a float32 master (none where the
factor is float32 already: Megatron's optimizer then updates it in place) and two float32 Adam
moments on top. Frozen factors have neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_xorl.adapters.inventory import Factor, Inventory
from megatron_xorl.adapters.scopes import REGIONS

__all__ = ["AdapterBytes", "adapter_bytes", "resume_bytes"]


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """Bytes of the factors, their float32 masters and their Adam moments."""

    factors: int = 0
    masters: int = 0
    moments: int = 0

    @property
    def total(self) -> int:
        """All three together."""
        return self.factors + self.masters + self.moments

    def __add__(self, other: AdapterBytes) -> AdapterBytes:
        return AdapterBytes(
            self.factors + other.factors, self.masters + other.masters, self.moments + other.moments
        )


def adapter_bytes(inventory: Inventory) -> dict[str, AdapterBytes]:
    """Return bytes by region, and under ``"total"`` for all of them."""
    result = {region: AdapterBytes() for region in REGIONS}
    for factor in inventory.factors:
        result[factor.region] += _of(factor)
    result["total"] = sum(result.values(), AdapterBytes())
    return result


def resume_bytes(inventory: Inventory) -> dict[str, AdapterBytes]:
    """Return bytes of the tensors of a training checkpoint by region, and under ``"total"``: nothing of the base, nothing frozen.

    Masters are written for float32 factors too, so that a checkpoint has the same tensors whatever the optimizer.
    """
    result = {region: AdapterBytes() for region in REGIONS}
    for factor in inventory.trainable:
        result[factor.region] += AdapterBytes(factor.nbytes, 4 * factor.numel, 8 * factor.numel)
    result["total"] = sum(result.values(), AdapterBytes())
    return result


def _of(factor: Factor) -> AdapterBytes:
    if not factor.trainable:
        return AdapterBytes(factor.nbytes)
    masters = 0 if factor.dtype == "float32" else 4 * factor.numel
    return AdapterBytes(factor.nbytes, masters, 8 * factor.numel)
