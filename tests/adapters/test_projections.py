"""Projections: the checkpoint's own names and shapes."""

from __future__ import annotations

from megatron_xorl.adapters.projections import projections
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.weights.names import hf_tensors

# Read off a public GLM-5.2 checkpoint: [out, in] of each weight of layer 0 (dense) and of layer 3 (experts).
PUBLIC_SHAPES = {
    "model.layers.0.self_attn.q_a_proj": (2048, 6144),
    "model.layers.0.self_attn.q_b_proj": (16384, 2048),
    "model.layers.0.self_attn.kv_a_proj_with_mqa": (576, 6144),
    "model.layers.0.self_attn.kv_b_proj": (28672, 512),
    "model.layers.0.self_attn.o_proj": (6144, 16384),
    "model.layers.0.mlp.gate_proj": (12288, 6144),
    "model.layers.0.mlp.up_proj": (12288, 6144),
    "model.layers.0.mlp.down_proj": (6144, 12288),
    "model.layers.3.mlp.experts.gate_proj": (2048, 6144),
    "model.layers.3.mlp.experts.down_proj": (6144, 2048),
    "model.layers.3.mlp.shared_experts.up_proj": (2048, 6144),
    "model.layers.3.mlp.shared_experts.down_proj": (6144, 2048),
    "lm_head": (154880, 6144),
}


def test_shapes_are_those_of_the_public_checkpoint() -> None:
    found = {
        item.name: (item.out_features, item.in_features)
        for item in projections(load_glm_config("glm-5.2"))
    }
    assert {name: found[name] for name in PUBLIC_SHAPES} == PUBLIC_SHAPES


def test_there_are_850_and_none_is_named_twice() -> None:
    names = [item.name for item in projections(load_glm_config("glm-5.2"))]
    assert len(names) == len(set(names)) == 850


def test_every_projection_is_a_weight_of_the_file_and_no_other_matrix_of_the_decoder_is_left_out() -> (
    None
):
    glm = load_glm_config("tiny")
    listed: dict[str, tuple[int, ...]] = {}
    for item in projections(glm):
        for name in item.expert_names() or (item.name,):
            listed[f"{name}.weight"] = (item.out_features, item.in_features)
    never = ("embed_tokens", ".indexer.", ".mlp.gate.", f"model.layers.{glm.num_hidden_layers}.")
    in_file = {
        row.hf: row.shape
        for row in hf_tensors(glm)
        if len(row.shape) == 2 and not any(part in row.hf for part in never)
    }
    assert listed == in_file


def test_banks_are_named_once_and_know_their_experts() -> None:
    banks = [item for item in projections(load_glm_config("tiny")) if item.num_experts]
    assert [bank.name for bank in banks[:3]] == [
        f"model.layers.1.mlp.experts.{leaf}_proj" for leaf in ("gate", "up", "down")
    ]
    assert (
        banks[0].expert_names()[7]
        == banks[0].expert_name(7)
        == "model.layers.1.mlp.experts.7.gate_proj"
    )
    assert len(banks) == 9
