"""The specs: every Megatron field is the base's, a stage holds its own layers, and illegal pipeline cuts are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import LayoutError
from tests.training.harness import use_one_process
from tests.worlds import run_world

# What transformers calls them, and what Megatron 0.19.2's MLATransformerConfig calls them.
SAME_VALUE = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "n_routed_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "rms_norm_eps": "layernorm_epsilon",
    "rope_theta": "rotary_base",
}


@pytest.mark.parametrize("preset", ["glm-5.2", "glm-5.1", "glm-5", "tiny"])
def test_every_field_that_has_a_megatron_name_has_the_config_s_value(preset: str) -> None:
    use_one_process()
    from megatron_xorl.specs import transformer_config

    glm = load_glm_config(preset)
    config = transformer_config(glm, dtype=torch.bfloat16)
    for hf, megatron in SAME_VALUE.items():
        assert getattr(config, megatron) == getattr(glm, hf), megatron
    dense = glm.first_k_dense_replace
    assert config.moe_layer_freq == [0] * dense + [1] * (glm.num_hidden_layers - dense)
    assert config.moe_shared_expert_intermediate_size == glm.moe_intermediate_size
    assert config.calculate_per_token_loss and config.params_dtype == torch.bfloat16
    assert not (config.hidden_dropout or config.attention_dropout or config.add_bias_linear)


def test_no_two_of_those_fields_could_be_swapped_unseen() -> None:
    glm = load_glm_config("tiny")
    odd = dataclasses.replace(
        glm, q_lora_rank=96, kv_lora_rank=160, intermediate_size=320, moe_intermediate_size=64
    )
    use_one_process()
    from megatron_xorl.specs import transformer_config

    config = transformer_config(odd, dtype=torch.float32)
    assert (config.q_lora_rank, config.kv_lora_rank) == (96, 160)
    assert (config.ffn_hidden_size, config.moe_ffn_hidden_size) == (320, 64)


def test_a_dense_layer_is_as_wide_as_the_config_says_and_sparse_layers_have_router_bank_and_shared_expert(
    tiny_dir: Path,
) -> None:
    use_one_process()
    from megatron_xorl.training.model import load_model

    layers = load_model(tiny_dir).decoder.layers
    assert layers[0].mlp.linear_fc1.base.shape == (2 * 256, 128)
    assert not hasattr(layers[0].mlp, "router")
    for layer in layers[1:]:
        assert layer.mlp.experts.linear_fc1.base.shape == (8, 2 * 128, 128)
        assert layer.mlp.shared_experts.linear_fc1.base.shape == (2 * 128, 128)
        assert layer.mlp.router.weight.shape == (8, 128)
    owners = [layer.self_attention.core_attention.indexer is not None for layer in layers]
    assert owners == [True, True, False, False]


def _stage(indexer_types: list[str], virtual: int | None = None) -> list[bool] | str:
    """Whether each layer of this pipeline rank's spec is dense, or the refusal."""
    from megatron.core import parallel_state

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(pp=2)
    from megatron_xorl.specs import block_spec, transformer_config

    tiny = load_glm_config("tiny")
    glm = dataclasses.replace(
        tiny, indexer_types=tuple(indexer_types), num_hidden_layers=len(indexer_types)
    )
    stages = {"virtual_pipeline_model_parallel_size": virtual} if virtual else {}
    config = transformer_config(glm, dtype=torch.float32, **stages)
    try:
        specs = block_spec(glm, config, vp_stage=None if virtual is None else virtual - 1)
    except LayoutError as refused:
        return str(refused)
    assert parallel_state.get_pipeline_model_parallel_world_size() == 2
    return [_is_dense(spec) for spec in specs.layer_specs]


def _is_dense(spec: Any) -> bool:
    return "ffn_hidden_size" in spec.submodules.mlp.keywords


@pytest.mark.dist
def test_each_pipeline_stage_gets_the_specs_of_its_own_layers() -> None:
    assert run_world(_stage, 2, ["full", "full", "full", "shared"]) == [
        [True, False],
        [False, False],
    ]


@pytest.mark.dist
def test_a_pipeline_cut_between_a_full_layer_and_its_sharers_is_refused_with_the_layers_named() -> (
    None
):
    first, second = run_world(_stage, 2, ["full", "full", "shared", "shared"])
    assert first == [True, False]
    assert isinstance(second, str)
    for part in ("begins at layer 2", "selection of layer 1", "between layers 1 and 2", "0, 1"):
        assert part in second, second


@pytest.mark.dist
def test_a_virtual_stage_is_judged_by_its_own_first_layer() -> None:
    # Two ranks with two virtual stages of one layer: virtual stage 1 of rank 0 begins at layer 2, of rank 1 at layer 3.
    first, second = run_world(_stage, 2, ["full", "full", "full", "shared"], 2)
    assert first == [False]
    assert isinstance(second, str) and "begins at layer 3" in second


def test_the_provider_refuses_a_separate_core_attention() -> None:
    from megatron_xorl.layers.provider import FrozenSpecProvider

    with pytest.raises(LayoutError, match=r"build the layer with megatron_xorl\.specs"):
        FrozenSpecProvider(load_glm_config("tiny")).core_attention()
