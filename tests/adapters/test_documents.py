"""``adapter_config.json``: resolved values, and the configuration that PEFT applies exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_xorl.adapters.documents import adapter_document
from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.adapters.patterns import pattern_value
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import AdapterError


def document(format: str = "sglang_shared_outer", **adapter: object) -> dict[str, Any]:
    config = AdapterConfig(**({"rank": 4, "alpha": 8} | adapter))
    factors = build_inventory(load_glm_config("tiny"), config).trainable
    return adapter_document(
        config,
        factors,
        base_model="base",
        base_fingerprint="f" * 64,
        forward={"mode": "w8a16"},
        format=format,
    )


def test_the_config_beside_the_weights_says_what_a_server_needs() -> None:
    found = document()
    assert {
        key: found[key] for key in ("peft_type", "r", "lora_alpha", "bias", "rank_pattern")
    } == {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "rank_pattern": {}}
    assert (found["_sglang_lora_format"], found["moe_hybrid_shared_lora"]) == ("shared_outer", True)
    assert found["target_modules"] == [
        *("down_proj", "gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", "lm_head", "o_proj"),
        *("q_a_proj", "q_b_proj", "up_proj"),
    ]
    own = found["megatron_xorl"]
    assert own["adapter"]["glm52_lora_scope"] == "all"
    assert own["base_fingerprint"] == "f" * 64
    assert len(own["inventory_hash"]) == 64


def test_ranks_that_differ_by_region_are_listed_by_target() -> None:
    found = document(rank={"routed_experts": 2, "default": 4})
    assert found["r"] == 4
    assert found["rank_pattern"] == {
        f"model.layers.{layer}.mlp.experts.{leaf}_proj": 2
        for layer in (1, 2, 3)
        for leaf in ("gate", "up", "down")
    }


@pytest.mark.parametrize("format", ["hf_peft", "hf_peft_fused"])
def test_peft_is_told_modules_only_where_it_leaves_them_alone(format: str) -> None:
    found = document(format)
    leaves = {name.rpartition(".")[2] for name in found["target_modules"]}
    assert not leaves & {"gate_proj", "up_proj", "down_proj"}
    parameters = set(found["target_parameters"])
    assert "model.layers.0.mlp.gate_proj.weight" in parameters
    assert "model.layers.1.mlp.shared_experts.down_proj.weight" in parameters
    assert "model.layers.1.mlp.experts.gate_up_proj" in parameters
    assert "model.layers.1.mlp.experts.down_proj" in parameters
    assert "_sglang_lora_format" not in found
    assert ("peft_min_version" in found["megatron_xorl"]) == (format == "hf_peft_fused")


@pytest.mark.parametrize("rslora", [False, True])
def test_every_pattern_gives_peft_the_scale_that_trained(rslora: bool) -> None:
    """PEFT scales by alpha / r, or alpha / sqrt(r): the same for the parameter of gate and up, which has twice the rank."""
    found = document("hf_peft", rank={"routed_experts": 2, "default": 4}, rslora=rslora)
    assert found.get("use_rslora", False) == rslora
    for name, rank, logical in (
        ("model.layers.1.mlp.experts.gate_up_proj", 4, 2),
        ("model.layers.1.mlp.experts.down_proj", 2, 2),
        ("model.layers.0.self_attn.q_a_proj", 4, 4),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", 4, 4),
    ):
        r = pattern_value(found["rank_pattern"], name, found["r"])
        alpha = pattern_value(found["alpha_pattern"], name, found["lora_alpha"])
        assert r == rank
        root = math.sqrt if rslora else float
        assert alpha / root(r) == pytest.approx(8 / root(logical), rel=1e-12)


def test_a_narrow_scope_names_no_other_target() -> None:
    found = document("hf_peft", glm52_lora_scope="routed_experts")
    assert found["target_modules"] == []
    assert {name.rpartition(".")[2] for name in found["target_parameters"]} == {
        "gate_up_proj",
        "down_proj",
    }


def test_nothing_trained_is_nothing_to_write() -> None:
    with pytest.raises(AdapterError, match="no factor trained"):
        adapter_document(
            AdapterConfig(rank=4, alpha=8), (), base_model="base", base_fingerprint="f", forward={}
        )


def test_a_pattern_matches_the_end_of_a_name_and_the_first_wins() -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert pattern_value({"gate_up_proj": 2, r".*\.gate_up_proj": 3}, name, 1) == 2
    assert pattern_value({"up_proj": 2}, name, 1) == 1
    assert pattern_value({"model.layers.11.mlp.experts.gate_up_proj": 2}, name, 1) == 1
    assert pattern_value(None, name, 1) == 1
    with pytest.raises(AdapterError, match="no regular expression"):
        pattern_value({"(": 2}, name, 1)
    with pytest.raises(AdapterError, match="expected an object"):
        pattern_value([1], name, 1)
