"""The IndexShare schedule, against transformers' own derivation."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_xorl.config.indexer import indexer_schedule
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import ConfigError


def reference(layers: int, **keys: Any) -> tuple[str, ...]:
    from transformers import GlmMoeDsaConfig

    return tuple(GlmMoeDsaConfig(num_hidden_layers=layers, **keys).indexer_types)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_freq": 1, "index_skip_topk_offset": 5},
        {"index_topk_freq": 7, "index_skip_topk_offset": 2},
        {"index_topk_pattern": "FSSF" * 19 + "FS"},
    ],
)
def test_a_derived_schedule_is_the_one_transformers_derives(keys: dict[str, Any]) -> None:
    assert indexer_schedule(keys, 78, "config") == reference(78, **keys)


def test_the_written_list_of_glm_5_2_is_its_own_period() -> None:
    keys = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert load_glm_config("glm-5.2").indexer_types == indexer_schedule(keys, 78, "config")
    assert (
        indexer_schedule({"index_topk_freq": 4}, 78, "config")
        != load_glm_config("glm-5.2").indexer_types
    )


def test_a_written_list_wins_over_a_period_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    raw = {"indexer_types": ["full", "full", "shared"], "index_topk_freq": 1}
    assert indexer_schedule(raw, 3, "config") == ("full", "full", "shared")
    assert "indexer_types is used" in caplog.text
    caplog.clear()
    indexer_schedule({"indexer_types": ["full", "full", "shared"]}, 3, "config")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"indexer_types": ["full", "shared"]}, "has 2 entries"),
        ({"indexer_types": ["full", "half", "full"]}, "'half' for layer 1"),
        ({"indexer_types": ["shared", "full", "full"]}, "layer 0 shared"),
        ({"indexer_types": "full"}, "expected a list"),
        ({"index_topk_pattern": "FSX"}, "'X' for layer 2"),
        ({"index_topk_pattern": "FS"}, "has 2 entries"),
        ({"index_topk_pattern": "SFF"}, "layer 0 shared"),
        ({"index_topk_pattern": 4}, "letters F or S"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "layer 0 shared"),
        ({"index_topk_freq": 0}, "at least 1"),
        ({"index_topk_freq": True}, "at least 1"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": -1}, "at least 0"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        indexer_schedule(raw, 3, "config")
    assert says in str(caught.value)
