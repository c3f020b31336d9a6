"""The inventory: every LoRA factor that exists under a model and an adapter configuration, in model order.

The one idea: names, shapes, sharding and trainability are decided here, once, from the two
configurations alone; the model, the optimizer, the checkpoint and the adapter file all read this
list. y = base(x) + (alpha / rank) · B(A x). A bank has a leading expert axis, of size 1 where one
factor serves all experts (the hidden side: A of gate and up, B of down).

    megatron-xorl targets glm-5.2
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_xorl.adapters.projections import Projection, projections
from megatron_xorl.adapters.scopes import REGIONS, scope_regions
from megatron_xorl.adapters.targets import match_targets
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import TargetError

__all__ = ["DTYPE_BYTES", "Factor", "Inventory", "build_inventory", "projection_factors"]

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Factor:
    """One LoRA factor in its full logical shape.

    ``target`` is the projection it stands on, ``side`` A or B. Shapes: A [r, in], B [out, r]; in a
    bank gate/up A [1, r, in] and B [experts, out, r], down A [experts, r, in] and B [1, out, r].
    ``shared``: the expert axis has size 1. ``tp_axis``: the axis cut over tensor ranks (expert
    tensor ranks for a bank), ``ep_axis``: the one cut over expert ranks; None where uncut.
    """

    name: str
    target: str
    region: str
    side: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    shared: bool
    tp_axis: int | None
    ep_axis: int | None
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes at the model's dtype."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Inventory:
    """The factors of a model under an adapter configuration, A before B, targets in model order."""

    factors: tuple[Factor, ...]

    @cached_property
    def trainable(self) -> tuple[Factor, ...]:
        """The factors that train under the scope."""
        return tuple(factor for factor in self.factors if factor.trainable)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Names of the adapted projections, in model order."""
        return tuple(dict.fromkeys(factor.target for factor in self.factors))

    @cached_property
    def by_name(self) -> dict[str, Factor]:
        """The factors by name."""
        return {factor.name: factor for factor in self.factors}

    def totals(self) -> dict[str, Any]:
        """Return counts, parameters and bytes, in total and by region (regions without a factor included, at zero)."""
        total = _count(self.factors)
        total["by_region"] = {
            region: _count(item for item in self.factors if item.region == region)
            for region in REGIONS
        }
        return total


def _count(factors: Iterable[Factor]) -> dict[str, Any]:
    listed = list(factors)
    training = [factor for factor in listed if factor.trainable]
    return {
        "factors": len(listed),
        "targets": len({factor.target for factor in listed}),
        "trainable_factors": len(training),
        "parameters": sum(factor.numel for factor in listed),
        "trainable_parameters": sum(factor.numel for factor in training),
        "bytes": sum(factor.nbytes for factor in listed),
    }


def build_inventory(
    config: GlmConfig, adapter: AdapterConfig, dtype: str | None = None
) -> Inventory:
    """Return the inventory of ``config`` under ``adapter``.

    Factors outside the scope are listed as not trainable, or left out with ``frozen_factors:
    drop``. ``dtype`` of the factors is the model's own unless given (``bfloat16``, ``float16``,
    ``float32``).

    Raises:
        TargetError: a target entry is wrong, or no target is left that the scope trains.
    """
    dtype = dtype or config.dtype
    if dtype not in DTYPE_BYTES:
        raise TargetError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    chosen = match_targets(projections(config), adapter.lora_target_modules)
    training = scope_regions(adapter.glm52_lora_scope)
    factors: list[Factor] = []
    for target in chosen.targets:
        trains = target.region in training
        if trains or adapter.frozen_factors == "keep":
            rank = chosen.ranks.get(target.name) or adapter.rank_for(target.region)
            factors += projection_factors(target, rank, dtype, trains)
    if not any(factor.trainable for factor in factors):
        raise TargetError(
            f"nothing would train: scope {adapter.glm52_lora_scope!r} trains {', '.join(training)}, but the targets are in "
            f"{', '.join(dict.fromkeys(target.region for target in chosen.targets))}; widen the scope or add targets"
        )
    return Inventory(tuple(factors))


def projection_factors(
    target: Projection, rank: int, dtype: str, trains: bool
) -> tuple[Factor, Factor]:
    """Return lora_A and lora_B of ``target`` at ``rank``: shapes, sharing and cuts follow from how its base is cut."""
    experts, cut = target.num_experts, target.parallel
    lead = 1 if experts else 0  # a bank's expert axis comes first and moves the others
    a_cut = lead + 1 if cut == "row" else None
    b_cut = lead if cut in ("column", "vocab") else None
    a_per_expert, b_per_expert = experts > 0 and cut == "row", experts > 0 and cut == "column"
    a_lead = ((experts if a_per_expert else 1),) if experts else ()
    b_lead = ((experts if b_per_expert else 1),) if experts else ()

    def factor(side: str, shape: tuple[int, ...], tp_axis: int | None, per_expert: bool) -> Factor:
        return Factor(
            name=f"{target.name}.lora_{side}",
            target=target.name,
            region=target.region,
            side=side,
            shape=shape,
            dtype=dtype,
            trainable=trains,
            shared=experts > 0 and not per_expert,
            tp_axis=tp_axis,
            ep_axis=0 if per_expert else None,
            rank=rank,
        )

    return (
        factor("A", (*a_lead, rank, target.in_features), a_cut, a_per_expert),
        factor("B", (*b_lead, target.out_features, rank), b_cut, b_per_expert),
    )
