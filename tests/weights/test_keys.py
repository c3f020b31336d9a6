"""The key table: every tensor of the full-size model has one place in a Megatron checkpoint, and every place one tensor."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import pytest

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.weights.keys import canonical_key, hf_names_by_chunk, key_table
from megatron_xorl.weights.names import hf_tensors

FULL = load_glm_config("glm-5.2")


@pytest.fixture(params=["bf16", "fp8"])
def config(request: pytest.FixtureRequest):
    block = None if request.param == "bf16" else (128, 128)
    return dataclasses.replace(FULL, weight_block_size=block)


def test_names_and_chunks_are_a_bijection_at_full_size(config) -> None:
    table = key_table(config)
    rows = hf_tensors(config)
    scales = sum(row.quantized for row in rows)
    assert len(rows) == 59_585
    assert len(table) == 59_585 + scales
    assert (scales > 58_000) == config.quantized
    back = hf_names_by_chunk(config)
    assert len(back) == len(table)
    assert all(back[chunk.key, chunk.offset] == name for name, chunk in table.items())


def test_the_chunks_of_a_key_tile_its_shape(config) -> None:
    by_key = defaultdict(list)
    for chunk in key_table(config).values():
        by_key[chunk.key].append(chunk)
    for key, chunks in by_key.items():
        shape = chunks[0].shape
        assert {chunk.shape for chunk in chunks} == {shape}, key
        assert sum(math.prod(chunk.size) for chunk in chunks) == math.prod(shape), key
        if len(chunks) > 1:
            assert [chunk.offset[0] for chunk in chunks] == list(range(config.n_routed_experts))
            assert {chunk.size for chunk in chunks} == {(1, *shape[1:])}
    # 75 banks of three projections, each with scales where the checkpoint is FP8.
    assert sum(len(chunks) > 1 for chunks in by_key.values()) == 225 * (
        2 if config.quantized else 1
    )


def test_keys_say_where_megatron_has_the_parameter() -> None:
    table = key_table(FULL)
    assert table["model.layers.7.self_attn.q_b_proj.weight"].key == (
        "decoder.layers.7.self_attention.linear_q_up_proj.weight"
    )
    gate = table["model.layers.0.mlp.gate_proj.weight"]
    assert gate.key == "decoder.layers.0.mlp.linear_fc1.weight.gate"
    expert = table["model.layers.9.mlp.experts.3.up_proj.weight"]
    assert expert.key == "decoder.layers.9.mlp.experts.linear_fc1.weight.up"
    assert (expert.offset, expert.shape[0]) == ((3, 0, 0), 256)
    mtp = "model.layers.78.mlp.experts.3.up_proj.weight"
    assert table[mtp].key == f"hf.{mtp}"


def test_fused_norm_spellings_are_aliases_of_the_norm_by_itself() -> None:
    keys = {chunk.key for chunk in key_table(FULL).values()}
    for fused, alone in {
        "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }.items():
        found = canonical_key(f"decoder.layers.2.{fused}")
        assert found == f"decoder.layers.2.{alone}"
        assert found in keys
    assert all(canonical_key(key) == key for key in keys)
    assert canonical_key("other.mlp.linear_fc1.layer_norm_weight").startswith("other.")
