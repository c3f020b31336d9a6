"""The inventory: published counts, shapes, sharding and trainability."""

from __future__ import annotations

import time

import pytest

from megatron_xorl.adapters.inventory import Factor, build_inventory
from megatron_xorl.adapters.scopes import REGIONS, SCOPES, scope_regions
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import ConfigError, TargetError

GLM = load_glm_config("glm-5.2")
TINY = load_glm_config("tiny")
FULL = build_inventory(GLM, AdapterConfig(rank=64, alpha=64))


def test_the_full_inventory_has_the_published_counts() -> None:
    totals = FULL.totals()
    assert totals["factors"] == 1700
    assert totals["targets"] == len(FULL.targets) == 850
    counts = {region: found["factors"] for region, found in totals["by_region"].items()}
    assert counts == {
        "attention": 780,
        "dense_mlp": 18,
        "shared_experts": 450,
        "routed_experts": 450,
        "lm_head": 2,
    }


def test_rank_64_has_the_published_parameters() -> None:
    totals = FULL.totals()
    assert round(totals["parameters"] / 1e6, 1) == 8201.7
    share = {
        region: found["parameters"] / totals["parameters"]
        for region, found in totals["by_region"].items()
    }
    assert {region: round(100 * part, 1) for region, part in share.items()} == {
        "attention": 5.2,
        "dense_mlp": 0.1,
        "shared_experts": 1.4,
        "routed_experts": 93.1,
        "lm_head": 0.1,
    }


@pytest.mark.parametrize(
    ("scope", "count"),
    [("all", 1700), ("moe", 900), ("shared_experts", 450), ("routed_experts", 450)],
)
def test_a_scope_trains_the_published_number_of_factors_and_builds_all_of_them(
    scope: str, count: int
) -> None:
    inventory = build_inventory(GLM, AdapterConfig(rank=1, alpha=1, glm52_lora_scope=scope))
    assert len(inventory.trainable) == count
    assert len(inventory.factors) == 1700


def test_scopes_are_sets_of_regions_and_an_unknown_one_is_refused() -> None:
    assert scope_regions("all") == REGIONS
    assert set(SCOPES["moe"]) == set(SCOPES["shared_experts"]) | set(SCOPES["routed_experts"])
    with pytest.raises(ConfigError, match="did you mean 'moe'"):
        scope_regions("mo")


def test_dropping_frozen_factors_builds_only_what_trains() -> None:
    kept = build_inventory(TINY, AdapterConfig(rank=4, alpha=4, glm52_lora_scope="moe"))
    dropped = build_inventory(
        TINY, AdapterConfig(rank=4, alpha=4, glm52_lora_scope="moe", frozen_factors="drop")
    )
    assert dropped.factors == kept.trainable
    assert dropped.totals()["by_region"]["attention"]["factors"] == 0


# (side, shape at rank 4, shared, tensor axis, expert axis) by target, for the tiny model, worked out by hand.
EXPECTED = {
    "model.layers.0.self_attn.q_a_proj": [("A", (4, 128), None), ("B", (128, 4), None)],
    "model.layers.0.self_attn.kv_a_proj_with_mqa": [("A", (4, 128), None), ("B", (144, 4), None)],
    "model.layers.0.self_attn.q_b_proj": [("A", (4, 128), None), ("B", (512, 4), 0)],
    "model.layers.0.self_attn.kv_b_proj": [("A", (4, 128), None), ("B", (896, 4), 0)],
    "model.layers.0.self_attn.o_proj": [("A", (4, 512), 1), ("B", (128, 4), None)],
    "model.layers.0.mlp.up_proj": [("A", (4, 128), None), ("B", (256, 4), 0)],
    "model.layers.0.mlp.down_proj": [("A", (4, 256), 1), ("B", (128, 4), None)],
    "model.layers.1.mlp.shared_experts.gate_proj": [("A", (4, 128), None), ("B", (128, 4), 0)],
    "lm_head": [("A", (4, 128), None), ("B", (320, 4), 0)],
}
EXPECTED_BANKS = {
    "model.layers.1.mlp.experts.gate_proj": [
        ("A", (1, 4, 128), True, None, None),
        ("B", (8, 128, 4), False, 1, 0),
    ],
    "model.layers.1.mlp.experts.down_proj": [
        ("A", (8, 4, 128), False, 2, 0),
        ("B", (1, 128, 4), True, None, None),
    ],
}


def test_shapes_and_cuts_of_every_kind_of_projection() -> None:
    found: dict[str, list[Factor]] = {}
    for factor in build_inventory(TINY, AdapterConfig(rank=4, alpha=4)).factors:
        found.setdefault(factor.target, []).append(factor)
    for target, pair in EXPECTED.items():
        assert [(item.side, item.shape, item.tp_axis) for item in found[target]] == pair
        assert not any(item.shared or item.ep_axis is not None for item in found[target])
    for target, bank in EXPECTED_BANKS.items():
        assert [
            (item.side, item.shape, item.shared, item.tp_axis, item.ep_axis)
            for item in found[target]
        ] == bank
    for target, both in found.items():
        assert [item.name for item in both] == [f"{target}.lora_A", f"{target}.lora_B"]
        assert both[0].trainable == both[1].trainable


def test_router_indexer_embedding_and_mtp_layer_are_never_in_it() -> None:
    names = " ".join(factor.name for factor in FULL.factors)
    for never in ("mlp.gate.", "indexer", "embed_tokens", "layers.78."):
        assert never not in names


def test_ranks_by_region_and_by_entry_reach_the_shapes() -> None:
    ranks = AdapterConfig(
        rank={"routed_experts": 2, "default": 8},
        alpha=8,
        targets=["*.mlp.experts.*", {"pattern": "lm_head", "rank": 3}, "o_proj"],
    )
    inventory = build_inventory(TINY, ranks)
    assert {(factor.region, factor.rank) for factor in inventory.factors} == {
        ("routed_experts", 2),
        ("lm_head", 3),
        ("attention", 8),
    }
    assert inventory.by_name["lm_head.lora_B"].shape == (320, 3)


def test_the_dtype_is_the_models_unless_given() -> None:
    adapter = AdapterConfig(rank=4, alpha=4)
    assert {factor.dtype for factor in build_inventory(TINY, adapter).factors} == {"bfloat16"}
    wide = build_inventory(TINY, adapter, dtype="float32")
    assert wide.totals()["bytes"] == 2 * build_inventory(TINY, adapter).totals()["bytes"]
    with pytest.raises(TargetError, match="dtype is 'int8'"):
        build_inventory(TINY, adapter, dtype="int8")


def test_targets_outside_the_scope_alone_are_refused() -> None:
    with pytest.raises(TargetError, match="nothing would train"):
        build_inventory(TINY, AdapterConfig(rank=4, alpha=4, targets=["o_proj"], scope="moe"))


def test_the_inventory_of_78_layers_takes_under_a_second() -> None:
    start = time.perf_counter()
    build_inventory(GLM, AdapterConfig(rank=64, alpha=64))
    assert time.perf_counter() - start < 1.0
