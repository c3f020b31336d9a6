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

__all__ = ["GlmTransformerLayer"]


class GlmTransformerLayer(TransformerLayer):
    """Pre-norm layer: ``x + attention(norm(x))`` then ``x + mlp(norm(x))``; ``context`` is the selection ``[s, b, topk]``."""

    def _forward_attention(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_megatron: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attention half of the layer; the causal mask is the attention's own, ``attention_mask`` is not read."""
        del attention_mask
        output, selected = self.self_attention(
            self.input_layernorm(hidden_states),
            selected=context,
            packed_seq_params=packed_seq_params,
        )
        residual = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
        return residual(output, hidden_states, self.hidden_dropout), selected
