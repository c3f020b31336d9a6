"""Parallel layouts: legal, or refused with the reason and the nearest legal values."""

from __future__ import annotations

import dataclasses
import time

import pytest

from megatron_xorl.config.layout import (
    ParallelLayout,
    check_layout,
    layout_problems,
    rank_coordinates,
    sequence_problem,
    smallest_world,
)
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import LayoutError

TINY = load_glm_config("tiny")
GLM = load_glm_config("glm-5.2")


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(),
        ParallelLayout(ep=2, world=2),
        ParallelLayout(tp=4, world=4),
        ParallelLayout(etp=2, world=2),
        ParallelLayout(tp=2, ep=4, world=8),
        ParallelLayout(pp=2, world=2),
        ParallelLayout(cp=2, ep=2, world=2),
        ParallelLayout(tp=2, cp=3, ep=2, world=6),
    ],
)
def test_layouts_of_the_tiny_model_that_are_legal(layout: ParallelLayout) -> None:
    check_layout(TINY, layout)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (ParallelLayout(tp=8, world=8), ["3.5 FP8 blocks of 32", "nearest legal: 1, 2, 4"]),
        (ParallelLayout(tp=3, world=3), ["8 attention heads", "nearest legal: 1, 2, 4"]),
        (ParallelLayout(etp=8, world=8), ["mlp.experts", "nearest legal: 1, 2, 4"]),
        (
            ParallelLayout(ep=3, world=3),
            ["does not divide the 8 experts", "nearest legal: 1, 2, 4"],
        ),
        (ParallelLayout(ep=2, world=3), ["world size 3", "etp × ep × pp = 2"]),
        (ParallelLayout(tp=2, world=3), ["world size 3", "tp × pp × cp = 2"]),
        (ParallelLayout(pp=3, world=3), ["2 such layers", "nearest legal: 1, 2"]),
        (ParallelLayout(cp=2, world=3), ["world size 3", "tp × pp × cp = 2"]),
        (ParallelLayout(tp=0), ["tp is 0"]),
        (ParallelLayout(ep=True), ["ep is True"]),
        (ParallelLayout(world=2**20 + 1), ["world is 1048577, expected at most 1048576"]),
        (ParallelLayout(ep=2, world=10**20), ["world is a number of 67 bits, expected at most"]),
        (ParallelLayout(tp=10**20, world=10**20), ["tp is a number of 67 bits", "world is a"]),
    ],
)
def test_layouts_of_the_tiny_model_that_are_not(layout: ParallelLayout, says: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        check_layout(TINY, layout)
    for words in says:
        assert words in str(caught.value)


@pytest.mark.parametrize("size", [3, 5, 7, 48, 96, 1000])
@pytest.mark.parametrize("kind", ["tp", "ep", "etp"])
def test_the_nearest_legal_sizes_are_those_that_trying_all_sizes_finds(
    kind: str, size: int
) -> None:
    legal = [n for n in range(1, 2049) if not layout_problems(GLM, alone(kind, n))]
    nearest = sorted(sorted(legal, key=lambda n: (abs(n - size), n))[:3])
    (problem,) = layout_problems(GLM, alone(kind, size))
    assert problem.endswith(f"nearest legal: {', '.join(map(str, nearest))}")


def alone(kind: str, size: int) -> ParallelLayout:
    return ParallelLayout(**{kind: size, "world": size})


def test_the_largest_sizes_of_a_config_are_searched_at_once() -> None:
    huge = dataclasses.replace(
        GLM,
        num_attention_heads=2**24,
        vocab_size=2**24,
        moe_intermediate_size=2**24,
        intermediate_size=2**24,
    )
    start = time.process_time()
    for kind in ("tp", "etp"):
        assert "nearest legal: 1, 2, 4" in layout_problems(huge, alone(kind, 3))[0]
    # Measured 2 ms; trying all sizes in turn took 8 s and 11 s.
    assert time.process_time() - start < 1


def test_every_reason_is_given_at_once() -> None:
    problems = layout_problems(GLM, ParallelLayout(tp=3, ep=5, pp=22, world=7))
    assert [problem.split()[0] for problem in problems] == ["world", "world", "ep", "tp", "pp"]


def test_a_tensor_cut_is_legal_exactly_when_every_cut_weight_lies_on_the_block_grid() -> None:
    # Rows (or columns) that tensor parallelism cuts in GLM-5.2: q_b, kv_b, o, dense, shared expert.
    widths = (64 * 256, 64 * 448, 64 * 256, 12288, 2048)
    for tp in (1, 2, 4, 8, 16, 32, 64):
        on_grid = tp == 1 or all(width % tp == 0 and (width // tp) % 128 == 0 for width in widths)
        assert on_grid == (layout_problems(GLM, ParallelLayout(tp=tp, world=tp)) == ())


def test_groups_of_a_legal_layout() -> None:
    layout = ParallelLayout(tp=4, pp=2, ep=8, world=16)
    assert (layout.dp, layout.edp) == (2, 1)


def test_the_ranks_of_two_stages_in_words() -> None:
    # Sixteen processes, TP 2, PP 2, EP 4: tp fastest, pp slowest; for the experts, whose etp is 1, ep fastest.
    layout = ParallelLayout(tp=2, pp=2, ep=4, world=16)
    found = [rank_coordinates(layout, rank) for rank in range(16)]
    assert [at.tp for at in found] == [0, 1] * 8
    assert [at.dp for at in found] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [at.pp for at in found] == [0] * 8 + [1] * 8
    assert [at.ep for at in found] == [0, 1, 2, 3] * 4
    assert [at.edp for at in found] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


def test_a_rank_that_does_not_exist_is_refused() -> None:
    for rank in (-1, 16):
        with pytest.raises(LayoutError, match=r"rank -?\d+ does not exist; expected 0 to 15"):
            rank_coordinates(ParallelLayout(ep=16, world=16), rank)


def test_the_smallest_world_is_one_that_both_products_divide() -> None:
    assert smallest_world(tp=4, etp=2) == 4
    assert smallest_world(tp=2, pp=2, ep=8) == 16
    assert smallest_world(tp=3, ep=2) == 6


@pytest.mark.parametrize(
    ("length", "tp", "cp", "says"),
    [
        (7, 1, 1, None),
        (6, 2, 1, None),
        (12, 2, 3, None),
        (16, 4, 4, None),
        (7, 2, 1, "a multiple of 2; nearest legal: 6, 8"),
        (6, 1, 2, "a multiple of 4; nearest legal: 4, 8"),
        (3, 1, 2, "a multiple of 4; nearest legal: 4"),
        (24, 4, 4, "a multiple of 16; nearest legal: 16, 32"),
        (15, 3, 5, "a multiple of 30; nearest legal: 30"),
    ],
)
def test_sequences_that_context_and_tensor_ranks_can_share(
    length: int, tp: int, cp: int, says: str | None
) -> None:
    found = sequence_problem(length, tp=tp, cp=cp)
    if says is None:
        assert found is None
    else:
        assert found is not None and f"over cp {cp} and tp {tp}" in found and found.endswith(says)
