"""What a rank holds of a factor is what it holds of the base weight under it, which another rule decides."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron_xorl.adapters.cuts import factor_ranges, owned_ranges, range_lengths
from megatron_xorl.adapters.inventory import Factor, build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.layout import ParallelLayout, check_layout, rank_coordinates
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import LayoutError
from megatron_xorl.weights.placement import owned_experts, owned_tensors

TINY = load_glm_config("tiny")
FACTORS = build_inventory(TINY, AdapterConfig(rank=4, alpha=4)).factors
LAYOUTS = [
    ParallelLayout(tp=2, pp=2, ep=4, world=8),
    ParallelLayout(tp=1, ep=2, etp=2, world=4),
    ParallelLayout(tp=2, ep=2, etp=1, world=4),
]


def expected(factor: Factor, layout: ParallelLayout, rank: int) -> tuple[slice, ...] | None:
    """The factor's ranges worked out from the weight that the rank loads: B has its rows, A its columns, a bank its experts."""
    bank = len(factor.shape) == 3
    parent, _, leaf = factor.target.rpartition(".")
    experts = owned_experts(TINY, layout, rank_coordinates(layout, rank))
    name = f"{parent}.{experts.start}.{leaf}" if bank else factor.target
    found = [item for item in owned_tensors(TINY, layout, rank) if item.row.hf == f"{name}.weight"]
    if not found:
        return None
    rows, columns = found[0].ranges
    inner = (slice(0, 4), columns) if factor.side == "A" else (rows, slice(0, 4))
    if not bank:
        return inner
    lead = slice(0, 1) if factor.shape[0] == 1 else slice(experts.start, experts.stop)
    return (lead, *inner)


def disagreements(factors: tuple[Factor, ...], layout: ParallelLayout, rank: int) -> list[str]:
    where = rank_coordinates(layout, rank)
    return [
        factor.name
        for factor in factors
        if (wanted := expected(factor, layout, rank)) is not None
        and tuple(slice(*pair) for pair in owned_ranges(factor, layout, where)) != wanted
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_factor_is_cut_where_the_weight_under_it_is_cut(layout: ParallelLayout) -> None:
    check_layout(TINY, layout)
    for rank in range(layout.world):
        assert disagreements(FACTORS, layout, rank) == []


def test_a_factor_that_is_cut_over_another_axis_is_seen() -> None:
    wrong = tuple(
        dataclasses.replace(factor, tp_axis=None) if factor.tp_axis is not None else factor
        for factor in FACTORS
    )
    assert disagreements(wrong, LAYOUTS[0], 0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_of_a_stage_hold_every_element(layout: ParallelLayout) -> None:
    for factor in FACTORS:
        pieces = {
            owned_ranges(factor, layout, rank_coordinates(layout, rank))
            for rank in range(layout.world)
        }
        assert sum(math.prod(range_lengths(piece)) for piece in pieces) == factor.numel


def test_a_group_that_does_not_divide_its_axis_is_refused() -> None:
    factor = next(factor for factor in FACTORS if factor.tp_axis is not None)
    with pytest.raises(LayoutError, match="cannot be cut 3 ways"):
        factor_ranges(factor, (0, 3), (0, 1))
