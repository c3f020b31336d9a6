"""Pipeline cuts: legal, as even as can be, in Megatron's words; illegal ones are refused with both layers and a way out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.config.stages import (
    check_stage_starts,
    megatron_layout,
    pipeline_stages,
)
from megatron_xorl.errors import LayoutError

TINY = load_glm_config("tiny")
GLM = load_glm_config("glm-5.2")


def sizes(config: GlmConfig, pp: int, vpp: int = 1) -> list[int]:
    return [len(stage) for stage in pipeline_stages(config, pp, vpp)]


def every_cut(config: GlmConfig, stages: int) -> Iterator[list[int]]:
    """Stage sizes of every legal cut, by trying all choices of full-indexer layers."""
    for chosen in itertools.combinations(config.full_indexer_layers[1:], stages - 1):
        bounds = (0, *chosen, config.num_hidden_layers)
        yield [last - first for first, last in itertools.pairwise(bounds)]


def unevenness(found: list[int]) -> tuple[int, int, list[int]]:
    """The rule, as it is stated: largest stage, then sum of squares, then smaller stages first."""
    return max(found), sum(size * size for size in found), found


@pytest.mark.parametrize("pp", range(1, 22))
def test_stages_cover_the_layers_in_order_and_begin_on_full_indexer_layers(pp: int) -> None:
    stages = pipeline_stages(GLM, pp)
    assert list(itertools.chain(*stages)) == list(range(78))
    assert len(stages) == pp
    assert all(GLM.indexer_types[stage.start] == "full" for stage in stages)
    check_stage_starts(GLM, [stage.start for stage in stages])


def test_there_are_no_more_stages_than_full_indexer_layers() -> None:
    for pp, vpp, says in ((22, 1, "21 such layers"), (11, 2, "nearest legal pp with 2 virtual")):
        with pytest.raises(LayoutError, match=says):
            pipeline_stages(GLM, pp, vpp)


# Few or nearly all of the 21: what can be tried out in full at 78 layers.
@pytest.mark.parametrize("pp", [2, 3, 4, 5, 18, 19, 20, 21])
def test_no_legal_cut_of_glm_52_is_more_even(pp: int) -> None:
    assert sizes(GLM, pp) == min(every_cut(GLM, pp), key=unevenness)


def test_no_legal_cut_of_any_schedule_of_nine_layers_is_more_even() -> None:
    for rest in itertools.product(("full", "shared"), repeat=8):
        config = dataclasses.replace(TINY, num_hidden_layers=9, indexer_types=("full", *rest))
        for pp in range(2, 1 + len(config.full_indexer_layers)):
            assert sizes(config, pp) == min(every_cut(config, pp), key=unevenness), (rest, pp)


def test_cuts_of_glm_52_that_people_use() -> None:
    assert sizes(GLM, 2) == [38, 40]
    assert sizes(GLM, 4) == [18, 20, 20, 20]
    assert sizes(GLM, 8) == [10, 8, 8, 8, 8, 12, 12, 12]
    assert sizes(GLM, 16) == [6, *[4] * 12, 8, 8, 8]
    assert sizes(load_glm_config("glm-5.1"), 4) == [19, 19, 20, 20]
    assert sizes(TINY, 2) == [1, 3]


def test_virtual_stages_are_the_chunks_of_one_cut() -> None:
    assert pipeline_stages(GLM, 2, 3) == pipeline_stages(GLM, 6) == pipeline_stages(GLM, 3, 2)


def test_a_cut_between_a_full_layer_and_its_followers_names_both_and_the_way_out() -> None:
    check_stage_starts(GLM, [0, 6])
    with pytest.raises(LayoutError) as refused:
        check_stage_starts(GLM, [0, 7])
    for words in (
        "between layers 6 and 7: layer 7 uses the selection of layer 6",
        "nearest legal cuts: between 5 and 6 or between 9 and 10",
        "a legal layout of 2 stages: Et*38|t*40L",
    ):
        assert words in str(refused.value)
    with pytest.raises(
        LayoutError, match=r"between layers 8 and 9: layer 9 uses the selection of layer 6"
    ):
        check_stage_starts(GLM, [0, 6, 9])


@pytest.mark.parametrize("start", sorted(set(range(1, 78)) - set(GLM.full_indexer_layers)))
def test_every_other_cut_of_glm_52_is_refused(start: int) -> None:
    source = GLM.indexer_source(start)
    says = f"between layers {start - 1} and {start}: layer {start} uses the selection of layer {source},"
    with pytest.raises(LayoutError, match=says):
        check_stage_starts(GLM, [0, start])


def test_where_no_layout_helps_the_refusal_says_so() -> None:
    with pytest.raises(LayoutError, match=r"no layout of 3 stages is legal: pp 3.*2 such layers"):
        check_stage_starts(TINY, [0, 2, 3])
    alone = dataclasses.replace(TINY, indexer_types=("full", "shared", "shared", "shared"))
    with pytest.raises(LayoutError, match="no legal cut; use one pipeline stage"):
        check_stage_starts(alone, [0, 2])


def test_stages_that_do_not_begin_with_layer_0_or_do_not_rise_are_refused() -> None:
    for starts in ([6, 10], [], [0, 0, 6], [0, 10, 6]):
        with pytest.raises(LayoutError, match="expected 0 first"):
            check_stage_starts(GLM, starts)


def test_a_stage_without_layers_counts_in_the_proposal() -> None:
    with pytest.raises(LayoutError, match=r"of 3 stages: Et\*26\|t\*24\|t\*28L"):
        check_stage_starts(GLM, [0, 7], stages=3)


def test_a_layout_is_written_in_megatrons_words() -> None:
    stages = (range(0, 1), range(1, 3), range(3, 4))
    assert megatron_layout(stages) == "Et|t*2|tL"
    assert megatron_layout((range(0, 4),)) == "Et*4L"
