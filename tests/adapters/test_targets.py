"""Targets: every entry says exactly what it says, or is refused with what was meant."""

from __future__ import annotations

import fnmatch
import time

import pytest

from megatron_xorl.adapters.projections import projections
from megatron_xorl.adapters.targets import match_targets, select_targets
from megatron_xorl.config.adapter import TargetEntry
from megatron_xorl.config.model import PRESETS, load_glm_config
from megatron_xorl.errors import TargetError

GLM = projections(load_glm_config("glm-5.2"))
TINY = projections(load_glm_config("tiny"))


def refused(entries: list[str | TargetEntry]) -> str:
    with pytest.raises(TargetError) as caught:
        select_targets(GLM, entries)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("entry", "count"),
    [
        ("*", 850),
        ("gate_proj", 153),
        ("q_a_proj", 78),
        ("lm_head", 1),
        ("*.mlp.experts.*.gate_proj", 75),
        ("*.mlp.experts.*_proj", 225),
        ("*.mlp.experts.gate_proj", 75),
        ("*.shared_experts.*_proj", 225),
        ("*.mlp.gate_proj", 3),
        ("*gate_proj", 153),
        ("*.self_attn.*", 390),
        ("model.layers.7.*", 11),
        ("model.layers.?.self_attn.o_proj", 10),
        ("model.layers.[12].*", 16),
        ("model.layers.7.mlp.experts.*", 3),
        ("*.experts.[0-9]*.down_proj", 75),
        ("model.layers.7.mlp.experts.down_proj", 1),
    ],
)
def test_an_entry_takes_what_it_says(entry: str, count: int) -> None:
    assert len(select_targets(GLM, [entry])) == count


@pytest.mark.parametrize(
    "entry",
    [
        "*",
        "*.experts.*",
        "*_proj",
        "model.layers.1.*",
        "*.[gu]*_proj",
        "*.layers.1.*",
        "*s.?.mlp*",
        "lm*",
        "*.experts.*up_proj",
    ],
)
def test_matching_is_fnmatch_over_every_name_written_out(entry: str) -> None:
    expected = []
    for item in TINY:
        names = item.expert_names() or (item.name,)
        hits = [fnmatch.fnmatchcase(name, entry) for name in names]
        whole = fnmatch.fnmatchcase(item.name, entry)
        assert whole or all(hits) or not any(hits)
        if whole or all(hits):
            expected.append(item)
    assert list(select_targets(TINY, [entry])) == expected


def test_no_entry_at_all_means_everything_in_every_family() -> None:
    for name in PRESETS:
        listed = projections(load_glm_config(name))
        assert select_targets(listed, None) == listed
        leaves = sorted({item.leaf for item in listed})
        assert select_targets(listed, leaves) == listed


def test_gate_and_up_are_chosen_independently_and_the_order_is_the_models() -> None:
    taken = select_targets(GLM, ["*.shared_experts.up_proj", "*.mlp.experts.*.gate_proj"])
    assert {item.leaf for item in taken if item.region == "routed_experts"} == {"gate_proj"}
    assert {item.leaf for item in taken if item.region == "shared_experts"} == {"up_proj"}
    assert taken == tuple(item for item in GLM if item in taken)


@pytest.mark.parametrize(
    ("entry", "suggests"),
    [
        ("*.shared_expert.*_proj", "'*.shared_experts.*_proj'"),
        ("*.self_attn.Q_A_PROJ", "'*.self_attn.q_a_proj'"),
        ("Gate_Proj", "'gate_proj'"),
        ("o_prj", "'o_proj'"),
        ("model.layers.3.self_atn.q_a_proj", "'model.layers.3.self_attn.q_a_proj'"),
        ("layers.3.self_attn.q_a_proj", "model.layers.3.self_attn.q_a_proj"),
        ("*.self_attn", "'*.self_attn.*'"),
        ("*.mlp.experts", "'*.mlp.experts.*'"),
        ("model.layers.78.self_attn.q_a_proj", "0 to 77"),
        ("gate_up_proj", "gate_proj and up_proj"),
        ("*.linear_fc2", "down_proj"),
        ("gate", "the router never trains"),
        ("*.indexer.wq_b", "the indexer is not adapted"),
        ("model.embed_tokens", "the embedding is not adapted"),
        ("xyzzy", "projections are q_a_proj"),
    ],
)
def test_an_entry_that_matches_nothing_is_refused_with_what_was_meant(
    entry: str, suggests: str
) -> None:
    message = refused([entry])
    assert message.startswith(f"target {entry!r} matches nothing")
    assert suggests in message


def test_a_good_entry_does_not_excuse_a_bad_one() -> None:
    assert "'nope_proj' matches nothing" in refused(["o_proj", "nope_proj"])


@pytest.mark.parametrize(
    ("entry", "hits"),
    [
        ("*.experts.12.gate_proj", 1),
        ("*.experts.1?.up_proj", 10),
        ("*.12.*", 1),
        ("*.experts.[0-8]*", 0),
    ],
)
def test_a_part_of_a_bank_is_refused_with_the_reason(entry: str, hits: int) -> None:
    message = refused([entry])
    assert "of the 256 experts" in message
    assert "share the factor on the hidden side" in message
    if hits:
        assert f"takes {hits} of" in message


def test_an_empty_list_and_a_duplicate_are_refused() -> None:
    assert "empty" in refused([])
    assert "listed 2 times" in refused(["o_proj", "q_a_proj", "o_proj"])


def test_an_entry_with_promises_must_keep_them() -> None:
    taken = match_targets(GLM, ["o_proj", TargetEntry(pattern="*.mlp.gate_proj", count=3, rank=4)])
    assert taken.ranks == {f"model.layers.{layer}.mlp.gate_proj": 4 for layer in range(3)}
    assert taken.matched_by["model.layers.5.self_attn.o_proj"] == "o_proj"
    assert "matches 3 targets, but its count says 4" in refused(
        [TargetEntry(pattern="*.mlp.gate_proj", count=4)]
    )
    two_ranks: list[str | TargetEntry] = [
        TargetEntry(pattern="lm_head", rank=4),
        TargetEntry(pattern="lm_*", rank=8),
    ]
    assert "give each target one rank" in refused(two_ranks)


def test_overlapping_entries_are_both_credited() -> None:
    assert len(select_targets(GLM, ["*.self_attn.*", "model.layers.1*.self_attn.o_proj"])) == 390


def test_twenty_entries_over_57600_expert_names_take_under_a_second() -> None:
    entries = [f"*.layers.{layer}.mlp.experts.*" for layer in range(10, 30)]
    start = time.perf_counter()
    assert len(select_targets(GLM, entries)) == 60
    assert time.perf_counter() - start < 1.0
