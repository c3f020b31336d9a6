"""GLM-5.2 as Megatron-core layer specs.

Two doors:

* ``--spec megatron_xorl.specs glm52_layer_spec`` in a ``pretrain_gpt.py``-style script:
  :func:`glm52_layer_spec` receives Megatron's model config, checks it against the Hugging Face
  config, returns the block spec, and appends to ``config.pre_wrap_hooks`` what loads the base,
  attaches the adapters and freezes everything else;
* :func:`block_spec` for library users who build a model themselves.

Nothing is imported at top level that can be missing: Megatron 0.19.2's spec import swallows
``ImportError`` and then trains its default GPT spec, silently. Failures are raised when a function
is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron_xorl.config.model import GlmConfig

__all__ = ["block_spec", "glm52_layer_spec", "model_fields", "transformer_config"]


def model_fields(glm: GlmConfig) -> dict[str, Any]:
    """``MLATransformerConfig`` fields that the GLM config decides, by Megatron's names.

    The one place where GLM is spelled in Megatron's vocabulary: the library path builds its config
    from it, the launch path turns it into arguments, and the spec function checks a foreign launch
    script's config against it.
    """
    moe_width = glm.moe_intermediate_size
    return {
        "num_layers": glm.num_hidden_layers,
        "hidden_size": glm.hidden_size,
        "ffn_hidden_size": glm.intermediate_size,
        "num_attention_heads": glm.num_attention_heads,
        "multi_latent_attention": True,
        "q_lora_rank": glm.q_lora_rank,
        "kv_lora_rank": glm.kv_lora_rank,
        "qk_head_dim": glm.qk_nope_head_dim,
        "qk_pos_emb_head_dim": glm.qk_rope_head_dim,
        "v_head_dim": glm.v_head_dim,
        "rope_type": "rope",
        "rotary_base": glm.rope_theta,
        "normalization": "RMSNorm",
        "layernorm_epsilon": glm.rms_norm_eps,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": glm.n_routed_experts,
        "moe_router_topk": glm.num_experts_per_tok,
        "moe_ffn_hidden_size": moe_width,
        "moe_shared_expert_intermediate_size": moe_width * glm.n_shared_experts,
        "moe_layer_freq": [
            0 if glm.is_dense(layer) else 1 for layer in range(glm.num_hidden_layers)
        ],
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


def transformer_config(
    glm: GlmConfig, *, dtype: torch.dtype, **overrides: Any
) -> MLATransformerConfig:
    """Megatron's transformer config for ``glm`` under the process groups that are initialised.

    With more than one pipeline stage the layers are cut as ``config.stages`` proposes, unless ``overrides`` decide it. Where
    meta is torch's default device (``with torch.device("meta")``) the model is built on it.

    Args:
        glm: the model.
        dtype: ``torch.float32`` or ``torch.bfloat16``.
        overrides: further ``MLATransformerConfig`` fields.

    Raises:
        LayoutError: there are more pipeline stages than layers that one can begin on.
    """
    import torch
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron_xorl.parallel.pipeline import proposed_layout

    tp = parallel_state.get_tensor_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    fields = model_fields(glm) | {
        "activation_func": F.silu,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": virtual,
        # Chunks send to each other out of step: several messages between two ranks cannot share one batch.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "use_cpu_initialization": not torch.cuda.is_available(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    if torch.get_default_device().type == "meta":
        # "CPU initialization" is Megatron's way of allocating without naming a device, so on the default one.
        fields |= {"init_model_with_meta_device": True, "use_cpu_initialization": True}
        fields["perform_initialization"] = False
    fields |= overrides
    if (layout := proposed_layout(glm, fields)) is not None:
        fields["pipeline_model_parallel_layout"] = layout
    return MLATransformerConfig(**fields)


def block_spec(
    glm: GlmConfig, config: MLATransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Layer specs of the layers that this pipeline stage owns, and the final norm.

    Args:
        glm: the model.
        config: Megatron's transformer config, which decides the pipeline cut.
        vp_stage: virtual pipeline stage.

    Raises:
        LayoutError: the pipeline is cut, here or between other stages, between a full-indexer layer and the layers that share
            its selection; every rank says so, since a rank that went on would wait for those that did not.
    """
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megatron_xorl.layers.norms import RMSNorm
    from megatron_xorl.layers.provider import FrozenSpecProvider
    from megatron_xorl.parallel.pipeline import check_pipeline_cut

    provider = FrozenSpecProvider(glm)
    check_pipeline_cut(glm, config)
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(provider, dense=glm.is_dense(layer)) for layer in layers],
        layer_norm=RMSNorm,
    )


def _layer_spec(provider: Any, *, dense: bool) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    from megatron_xorl.layers.attention import SparseLatentAttention
    from megatron_xorl.layers.block import GlmTransformerLayer

    norm = provider.layer_norm(rms_norm=True)
    return ModuleSpec(
        module=GlmTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(module=SparseLatentAttention, params={"provider": provider}),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_mlp_spec(provider, dense=dense),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp_spec(provider: Any, *, dense: bool) -> Any:
    from functools import partial

    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    from megatron_xorl.layers.moe import GlmMoELayer
    from megatron_xorl.layers.router import GlmRouter

    linears = MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear()
    )
    if dense:
        width = provider.glm.intermediate_size
        return partial(MLP.as_mlp_submodule, submodules=linears, ffn_hidden_size=width)
    return partial(
        GlmMoELayer,
        submodules=MoESubmodules(
            experts=provider.grouped_mlp_modules(True),
            shared_experts=partial(SharedExpertMLP, submodules=linears),
            router=partial(GlmRouter, glm=provider.glm),
        ),
    )


def glm52_layer_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The function behind ``--spec megatron_xorl.specs glm52_layer_spec``.

    Megatron's model builder calls it with the model config. It reads which base and adapters to use
    from the arguments of ``megatron_xorl.pretrain`` or, in a foreign launch script, from the
    environment (``MEGATRON_XORL_MODEL``, ``MEGATRON_XORL_ADAPTER_CONFIG``), checks the launch, and
    installs the adapter checkpoint behind ``--save`` and ``--load``.

    Args:
        config: Megatron's ``GPTModelConfig``; its ``transformer`` must agree with the base's ``config.json``.
        vp_stage: virtual pipeline stage.

    Raises:
        ConfigError, WeightsError, LayoutError, AdapterError: before anything is built.
    """
    # The launch door hands over to the training room, the only import against the direction of the layers: a launch script names
    # this module and nothing else.
    from megatron_xorl.training.launch import launch_for

    launch = launch_for(config)
    return block_spec(launch.glm, config.transformer, vp_stage)
