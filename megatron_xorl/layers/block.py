"""The transformer layer that hands the indexer's selection to the next layer.

Megatron's block passes ``context`` from layer to layer: out of one layer's return value, into the next one's argument, and
through activation checkpointing as an explicit tensor. GLM has no cross-attention, so that seam carries the selection: an
explicit value within one forward, with nothing stored between microbatches.
"""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_xorl.layers.cache import LatentCache
from megatron_xorl.layers.recompute import output_discarding_checkpoint

__all__ = ["GlmTransformerLayer"]


class GlmTransformerLayer(TransformerLayer):
    """Pre-norm layer: ``x + attention(norm(x))`` then ``x + mlp(norm(x))``; ``context`` is the selection ``[s, b, topk]``."""

    def _forward_attention(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: LatentCache | None = None,
        **_megatron: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attention half of the layer; the causal mask is the attention's own, ``attention_mask`` is not read."""
        del attention_mask
        recomputed = None
        if self.recompute_input_layernorm:
            recomputed = output_discarding_checkpoint()
            normed = recomputed.checkpoint(self.input_layernorm, hidden_states)
        else:
            normed = self.input_layernorm(hidden_states)
        output, selected = self.self_attention(
            normed,
            selected=context,
            packed_seq_params=packed_seq_params,
            cache=inference_context,
        )
        if recomputed is not None:
            recomputed.discard_output_and_register_recompute(output[0])
        residual = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
        return residual(output, hidden_states, self.hidden_dropout), selected

    def _forward_pre_mlp_layernorm(self, hidden_states: Tensor) -> Tensor:
        """Megatron's own, but for the checkpoint's constructor."""
        if not self.recompute_pre_mlp_layernorm:
            normed: Tensor = super()._forward_pre_mlp_layernorm(hidden_states)
            return normed
        self.mlp_norm_manager = self.off_interface(self.offload_mlp_norm, hidden_states, "mlp_norm")
        self.pre_mlp_norm_checkpoint = output_discarding_checkpoint()
        with self.mlp_norm_manager as hidden:
            return self.pre_mlp_norm_checkpoint.checkpoint(self.pre_mlp_layernorm, hidden)
