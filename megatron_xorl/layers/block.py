"""The transformer layer that hands the indexer's selection to the next layer.

Megatron's block passes ``context`` from layer to layer: out of one layer's return value, into the next one's argument, and
through activation checkpointing as an explicit tensor. GLM has no cross-attention, so that seam carries the selection: an
explicit value within one forward, with nothing stored between microbatches.

``attention_mask`` carries the token keys of a dropout, if any (``layers.token_keys``): they are current for the linears of this
layer, and every region that is computed again takes them along. Megatron's ``mlp`` checkpoint could not: the layer has its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_xorl.layers.cache import LatentCache
from megatron_xorl.layers.recompute import freed
from megatron_xorl.layers.token_keys import bound, tokens_of, using

__all__ = ["GlmTransformerLayer"]


class GlmTransformerLayer(TransformerLayer):
    """Pre-norm layer: ``x + attention(norm(x))`` then ``x + mlp(norm(x))``; ``context`` is the selection ``[s, b, topk]``."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # Freed here and not by Megatron's own way, see layers.recompute.
        self.frees_norms = self.recompute_input_layernorm
        self.recompute_input_layernorm = self.recompute_pre_mlp_layernorm = False
        self.recomputes_mlp, self.recompute_mlp = self.recompute_mlp, False

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Megatron's own, for the tokens whose keys came as ``attention_mask``: uint64 ``[b, s]``, or none."""
        split = self.config.sequence_parallel
        with using(tokens_of(attention_mask, self.pg_collection.tp, split=split)):
            result: tuple[Tensor, Tensor] = super().forward(hidden_states, None, **named)
        return result

    def _forward_attention(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: LatentCache | None = None,
        **_megatron: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attention half of the layer; the causal mask is the attention's own."""
        del attention_mask

        def attend(normed: Tensor) -> tuple[tuple[Tensor, None], Tensor]:
            result: tuple[tuple[Tensor, None], Tensor] = self.self_attention(
                normed,
                selected=context,
                packed_seq_params=packed_seq_params,
                cache=inference_context,
            )
            return result

        if self.frees_norms and self.training:
            with freed(self.input_layernorm, hidden_states) as normed:
                output, selected = attend(normed)
        else:
            output, selected = attend(self.input_layernorm(hidden_states))
        residual = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
        return residual(output, hidden_states, self.hidden_dropout), selected

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **named: Any) -> Tensor:
        """Megatron's own, but for the norm whose output is freed, and the dense mlp that is computed again."""
        if not (self.training and (self.frees_norms or self.recomputes_mlp)):
            result: Tensor = super()._forward_mlp(hidden_states, *args, **named)
            return result
        mlp = self.mlp
        if self.recomputes_mlp:
            mlp = partial(tensor_parallel.checkpoint, bound(self.mlp), False)
        if self.frees_norms:
            with freed(self.pre_mlp_layernorm, hidden_states) as normed:
                output = mlp(normed)
        else:
            output = mlp(self.pre_mlp_layernorm(hidden_states))
        result = self._forward_post_mlp(output, hidden_states)
        return result
