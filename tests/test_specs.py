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


def _stages(cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """For each case of (letters F and S, config fields): whether each layer of this rank's spec is dense, or the refusal."""
    from megatron.core import parallel_state

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(pp=2)
    from megatron_xorl.specs import block_spec, transformer_config

    told: list[Any] = []
    for letters, fields in cases:
        types = tuple({"F": "full", "S": "shared"}[letter] for letter in letters)
        glm = dataclasses.replace(
            load_glm_config("tiny"), indexer_types=types, num_hidden_layers=len(types)
        )
        virtual = fields.get("virtual_pipeline_model_parallel_size")
        parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
        try:
            config = transformer_config(glm, dtype=torch.float32, **fields)
            specs = block_spec(glm, config, vp_stage=None if virtual is None else virtual - 1)
        except LayoutError as refused:
            told.append(str(refused))
        else:
            told.append([_is_dense(spec) for spec in specs.layer_specs])
    return told


def _is_dense(spec: Any) -> bool:
    return "ffn_hidden_size" in spec.submodules.mlp.keywords


EVEN = {"pipeline_model_parallel_layout": "Et*2|t*2L"}
REFUSED = (
    "the pipeline is cut between layers 1 and 2: layer 2 uses the selection of layer 1",
    "nearest legal cuts: between 0 and 1",
    "a legal layout of 2 stages: Et|t*3L",
)
# (schedule, config fields, layers of each stage or what both ranks say)
CUTS: list[tuple[str, dict[str, Any], Any]] = [
    ("FFFS", {}, ([True, False], [False, False])),
    # Nothing said: Megatron's even cut would be illegal, so another one is made.
    ("FFSS", {}, ([True], [False] * 3)),
    ("FFSSFSS", {}, ([True, False, False, False], [False] * 3)),
    ("FFSS", EVEN, REFUSED),
    ("FFFF", EVEN, ([True, False], [False, False])),
    ("FFFF", {"pipeline_model_parallel_layout": "Et*3|tL"}, ([True, False, False], [False])),
    ("FFSS", {"pipeline_model_parallel_layout": [["embedding", *["decoder"] * 2], ["decoder", "decoder", "loss"]]}, REFUSED),
    ("FFSS", {"num_layers_in_first_pipeline_stage": 2}, REFUSED),
    ("FFSS", {"num_layers_in_first_pipeline_stage": 1}, ([True], [False] * 3)),
    # Two ranks with two virtual stages each; the specs are those of the last virtual stage.
    ("FFFFS", {"virtual_pipeline_model_parallel_size": 2}, ([False], [False, False])),
    ("FFFS", {"virtual_pipeline_model_parallel_size": 2}, ("pp 2 with 2 virtual stages each", "3 such layers")),
    (
        "FFFFS",
        {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t*2|tL"},
        ("between layers 3 and 4: layer 4 uses the selection of layer 3", "of 4 stages: Et|t|t|t*2L"),
    ),
]  # fmt: skip


@pytest.mark.dist
def test_each_stage_gets_its_own_layers_and_an_illegal_cut_is_refused_by_every_rank() -> None:
    ranks = run_world(_stages, 2, [(letters, fields) for letters, fields, _ in CUTS])
    for (letters, fields, expected), *found in zip(CUTS, *ranks, strict=True):
        if isinstance(expected[0], list):
            assert found == list(expected), (letters, fields)
            continue
        for said in found:
            for words in expected:
                assert words in said, (letters, fields, said)


@pytest.mark.parametrize(("pp", "vpp"), [*((pp, 1) for pp in range(2, 22)), (2, 2), (3, 4), (7, 3)])
def test_megatrons_parser_reads_the_proposed_layout_of_78_layers_as_it_was_meant(
    pp: int, vpp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_one_process()
    from megatron.core import parallel_state
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from megatron_xorl.config.stages import megatron_layout, pipeline_stages

    virtual = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
    monkeypatch.setattr(parallel_state, virtual, vpp if vpp > 1 else None)
    stages = pipeline_stages(load_glm_config("glm-5.2"), pp, vpp)
    parsed = PipelineParallelLayerLayout(megatron_layout(stages), pp)
    # No MTP layer is in it, and none is asked for.
    parsed.validate_layer_layout(num_layers=78, mtp_num_layers=None)
    for index, stage in enumerate(stages):
        where = {"vp_stage": index // pp, "pp_rank": index % pp}
        assert parsed.get_layer_id_list(**where) == list(stage)
        assert parsed.get_layer_offset(**where) == stage.start
        assert parsed.get_num_layers_to_build(**where) == len(stage)


def test_a_layout_that_is_not_megatrons_or_another_models_is_refused_with_the_one_to_use() -> None:
    use_one_process()
    from megatron_xorl.parallel.pipeline import check_pipeline_layout

    tiny = load_glm_config("tiny")
    check_pipeline_layout(tiny, "Et|t*3L", 2)
    check_pipeline_layout(tiny, "Et|(t)*3L", 2)
    for layout in ("Et*2|tL", "Et|t*3mL", "t|t*3", "E|x", "Et|t|t|tL|", "Et*4L"):
        with pytest.raises(LayoutError, match=r"cannot be used for 4 layers on pp 2: .*Et\|t\*3L"):
            check_pipeline_layout(tiny, layout, 2)


def test_the_provider_refuses_a_separate_core_attention() -> None:
    from megatron_xorl.layers.provider import FrozenSpecProvider

    with pytest.raises(LayoutError, match=r"build the layer with megatron_xorl\.specs"):
        FrozenSpecProvider(load_glm_config("tiny")).core_attention()
