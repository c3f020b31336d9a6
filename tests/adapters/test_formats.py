"""The spelling of adapter files, against keys written out by hand from the published interchange form."""

from __future__ import annotations

import pytest

from megatron_xorl.adapters.formats import adapter_document, file_key, inventory_hash
from megatron_xorl.adapters.inventory import Inventory, build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import AdapterError
from megatron_xorl.fp8.linear import FORWARD


def inventory(model: str = "tiny", **adapter: object) -> Inventory:
    return build_inventory(
        load_glm_config(model), AdapterConfig(**({"rank": 4, "alpha": 8} | adapter))
    )


WRITTEN = [
    ("lm_head.lora_A", "base_model.model.lm_head.lora_A.weight"),
    (
        "model.layers.0.self_attn.kv_a_proj_with_mqa.lora_B",
        "base_model.model.model.layers.0.self_attn.kv_a_proj_with_mqa.lora_B.weight",
    ),
    ("model.layers.0.mlp.gate_proj.lora_A", "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight"),
    (
        "model.layers.1.mlp.shared_experts.up_proj.lora_B",
        "base_model.model.model.layers.1.mlp.shared_experts.up_proj.lora_B.weight",
    ),
    ("model.layers.1.mlp.experts.gate_proj.lora_A", "base_model.model.model.layers.1.mlp.experts.w1.lora_A.weight"),
    ("model.layers.1.mlp.experts.down_proj.lora_B", "base_model.model.model.layers.1.mlp.experts.w2.lora_B.weight"),
    ("model.layers.1.mlp.experts.up_proj.lora_A", "base_model.model.model.layers.1.mlp.experts.w3.lora_A.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key"), WRITTEN)
def test_a_factor_is_spelled_as_servers_read_it(name: str, key: str) -> None:
    assert file_key(inventory().by_name[name]) == key


@pytest.mark.parametrize("model", ["tiny", "glm-5.2"])
def test_no_two_factors_share_a_key(model: str) -> None:
    factors = inventory(model).factors
    assert len({file_key(factor) for factor in factors}) == len(factors)


def test_sharing_shows_in_the_leading_axis_alone() -> None:
    leading = {
        file_key(factor).split("experts.")[1]: factor.shape[0]
        for factor in inventory("glm-5.2").factors
        if ".layers.7.mlp.experts." in factor.name
    }
    assert leading == {
        "w1.lora_A.weight": 1,
        "w1.lora_B.weight": 256,
        "w3.lora_A.weight": 1,
        "w3.lora_B.weight": 256,
        "w2.lora_A.weight": 256,
        "w2.lora_B.weight": 1,
    }


def document(**adapter: object) -> dict[str, object]:
    config = AdapterConfig(**({"rank": 4, "alpha": 8} | adapter))
    factors = build_inventory(load_glm_config("tiny"), config).trainable
    return adapter_document(
        config, factors, base_model="base", base_fingerprint="f" * 64, forward=FORWARD
    )


def test_the_config_beside_the_weights_says_what_a_server_needs() -> None:
    found = document()
    assert {
        key: found[key] for key in ("peft_type", "r", "lora_alpha", "bias", "rank_pattern")
    } == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "rank_pattern": {},
    }
    assert (found["_sglang_lora_format"], found["moe_hybrid_shared_lora"]) == ("shared_outer", True)
    assert found["target_modules"] == [
        *("down_proj", "gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", "lm_head", "o_proj"),
        *("q_a_proj", "q_b_proj", "up_proj"),
    ]


def test_ranks_that_differ_by_region_are_listed_by_target() -> None:
    found = document(rank={"routed_experts": 2, "default": 4})
    assert found["r"] == 4
    assert found["rank_pattern"] == {
        f"model.layers.{layer}.mlp.experts.{leaf}_proj": 2
        for layer in (1, 2, 3)
        for leaf in ("gate", "up", "down")
    }


def test_the_hash_of_an_inventory_sees_names_shapes_and_order() -> None:
    factors = inventory().factors
    hashes = {
        inventory_hash(factors),
        inventory_hash(inventory(rank=8).factors),
        inventory_hash(factors[::-1]),
        inventory_hash(factors[:-1]),
    }
    assert len(hashes) == 4
    assert inventory_hash(factors) == inventory_hash(inventory(alpha=16).factors)


def test_nothing_trained_is_nothing_to_write() -> None:
    with pytest.raises(AdapterError, match="no factor trained"):
        adapter_document(
            AdapterConfig(rank=4, alpha=8), (), base_model="base", base_fingerprint="f", forward={}
        )
