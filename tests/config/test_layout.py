"""Parallel layouts: legal, or refused with the reason and the nearest legal values."""

from __future__ import annotations

import itertools

import pytest

from megatron_xorl.config.layout import (
    ParallelLayout,
    check_layout,
    check_stage_starts,
    layout_problems,
    pipeline_stages,
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
        (ParallelLayout(tp=0), ["tp is 0"]),
        (ParallelLayout(ep=True), ["ep is True"]),
    ],
)
def test_layouts_of_the_tiny_model_that_are_not(layout: ParallelLayout, says: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        check_layout(TINY, layout)
    for words in says:
        assert words in str(caught.value)


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


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8, 16, 21])
def test_stages_cover_the_layers_and_begin_on_full_indexer_layers(pp: int) -> None:
    stages = pipeline_stages(GLM, pp)
    assert list(itertools.chain(*stages)) == list(range(78))
    assert len(stages) == pp
    for stage in stages:
        assert GLM.indexer_types[stage.start] == "full"
    check_stage_starts(GLM, [stage.start for stage in stages])


def test_two_and_four_stages_are_even_to_within_a_sharing_group() -> None:
    assert [len(stage) for stage in pipeline_stages(GLM, 2)] == [38, 40]
    assert [len(stage) for stage in pipeline_stages(GLM, 4)] == [18, 20, 20, 20]


def test_a_stage_may_not_part_a_layer_from_its_indices() -> None:
    check_stage_starts(GLM, [0, 6])
    with pytest.raises(
        LayoutError, match=r"layer 7: it attends by the indices of layer 6.*2, 6, 10"
    ):
        check_stage_starts(GLM, [0, 7])
    with pytest.raises(LayoutError, match="0 first"):
        check_stage_starts(GLM, [6, 10])
    with pytest.raises(LayoutError, match="21 such layers"):
        pipeline_stages(GLM, 22)
