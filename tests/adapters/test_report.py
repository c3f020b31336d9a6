"""What ``targets`` says of each target, of the entries, of a rank, and of what is not trained."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.adapters.report import target_report
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.layout import ParallelLayout
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import LayoutError

GLM = load_glm_config("glm-5.2")
MIXED: dict[str, Any] = {
    "rank": {"routed_experts": 8, "default": 16},
    "alpha": 32,
    "scope": "moe",
    "targets": [
        {"pattern": "*.mlp.experts.*", "count": 225},
        {"pattern": "lm_head", "rank": 4},
        "model.layers.7.self_attn.*",
        "o_proj",
    ],
}


def report(layout: ParallelLayout | None = None, **keys: Any) -> dict[str, Any]:
    adapter = AdapterConfig(**keys)
    return target_report(GLM, adapter, build_inventory(GLM, adapter), layout)


def test_a_target_has_its_entry_rank_and_scale() -> None:
    rows = {row["name"]: row for row in report(**MIXED)["targets"]}
    assert len(rows) == 225 + 1 + 4 + 78
    keys = ("entry", "rank", "rank_from", "scale", "trainable")
    for name, values in {
        "model.layers.7.mlp.experts.up_proj": ("*.mlp.experts.*", 8, "region", 4.0, True),
        "model.layers.7.self_attn.o_proj": ("model.layers.7.self_attn.*", 16, "region", 2.0, False),
        "model.layers.8.self_attn.o_proj": ("o_proj", 16, "region", 2.0, False),
        "lm_head": ("lm_head", 4, "entry", 8.0, False),
    }.items():
        assert tuple(rows[name][key] for key in keys) == values
    assert rows["lm_head"]["layer"] is None


def test_the_entries_say_what_each_takes_though_an_earlier_one_took_it_too() -> None:
    taken = [(item["entry"], item["targets"]) for item in report(**MIXED)["entries"]]
    assert taken == [
        ("*.mlp.experts.*", 225),
        ("lm_head", 1),
        ("model.layers.7.self_attn.*", 5),
        ("o_proj", 78),
    ]
    assert report(rank=1, alpha=1)["entries"] == []


def test_a_layout_cuts_the_shapes_and_places_the_stages() -> None:
    layout = ParallelLayout(tp=2, pp=4, ep=8, world=32)
    said = report(layout, rank=16, alpha=16)
    rows = {row["name"]: row for row in said["targets"]}
    bank, head = rows["model.layers.20.mlp.experts.down_proj"], rows["lm_head"]
    assert bank["shapes"] == {"A": [256, 16, 2048], "B": [1, 6144, 16]}
    assert bank["per_rank_shapes"] == {"A": [32, 16, 2048], "B": [1, 6144, 16]}
    assert (bank["stage"], head["stage"]) == (1, 3)
    assert head["per_rank_shapes"]["B"] == [154880 // 2, 16]
    for held in said["per_rank"]:
        mine = [row for row in said["targets"] if row["stage"] == held["stage"]]
        shapes = [shape for row in mine for shape in row["per_rank_shapes"].values()]
        assert (held["factors"], held["ranks_alike"]) == (len(shapes), 8)
        assert held["parameters"] == sum(map(math.prod, shapes))
        assert held["bytes"] == 2 * held["parameters"]
    assert sum(held["factors"] for held in said["per_rank"]) == 1700


def test_one_process_holds_the_whole_of_everything() -> None:
    said = report(rank=64, alpha=64)
    assert all(row["shapes"] == row["per_rank_shapes"] for row in said["targets"])
    (held,) = said["per_rank"]
    assert (
        held["parameters"]
        == build_inventory(GLM, AdapterConfig(rank=64, alpha=64)).totals()["parameters"]
    )


def test_what_is_not_adapted_and_what_does_not_train_are_counted_with_the_reason() -> None:
    said = report(**MIXED)
    left, outside = said["left_out"], said["out_of_scope"]
    assert left["targets"] == len(left["names"]) == 850 - len(said["targets"])
    assert left["by_region"] == {
        "attention": 308,
        "dense_mlp": 9,
        "shared_experts": 225,
        "routed_experts": 0,
        "lm_head": 0,
    }
    assert left["why"] == "no entry of lora_target_modules takes them"
    assert outside["targets"] == 83
    assert "scope moe trains shared_experts, routed_experts alone" in outside["why"]
    assert "builds them with B zero" in outside["why"]
    assert set(said["never_adapted"]) == {"router", "indexer", "embedding", "norms", "mtp"}
    dropped = report(**MIXED | {"frozen_factors": "drop"})
    assert "does not build them" in dropped["out_of_scope"]["why"]
    assert {row["region"] for row in dropped["targets"]} == {"routed_experts"}
    everything = report(rank=1, alpha=1)
    assert everything["left_out"]["why"] is everything["out_of_scope"]["why"] is None


def test_an_illegal_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="ep 3"):
        report(ParallelLayout(ep=3, world=3), rank=1, alpha=1)
