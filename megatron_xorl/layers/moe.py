"""Megatron's mixture-of-experts layer whose rows carry the bank's rank-r products.

One idea: the two places where a token is one row, just before the dispatch and just after the combine, are Megatron's
``preprocess`` and ``postprocess``. There the shared factors act (``layers.shared_outer``); routing, dispatch, combine, recompute
and the shared experts stay Megatron's. Without adapters on the bank this is Megatron's layer, step by step.

A dropout's token keys go with the rows (``layers.token_keys``), and the two checkpoints of this layer, ``moe`` and
``shared_experts``, are wrapped here and not by Megatron, so that what is computed again has its keys.

Refused: dropout on a bank whose dispatch cannot carry the keys.
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_xorl.errors import LayoutError
from megatron_xorl.layers.token_keys import bound

__all__ = ["GlmMoELayer", "rows_can_carry_columns"]


class GlmMoELayer(MoELayer):
    """``MoELayer`` over an :class:`~megatron_xorl.layers.experts.ExpertBank`."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.experts.once_per_token = rows_can_carry_columns(self.config)
        self.recomputes, self.moe_layer_recompute = self.moe_layer_recompute, False
        self.recomputes_shared, self.shared_experts_recompute = self.shared_experts_recompute, False

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Megatron's own, computed again in backward if asked for."""
        function = super().forward
        result: tuple[Tensor, Tensor | None]
        if not (self.recomputes and self.training):
            result = function(hidden_states, intermediate_tensors, padding_mask)
            return result
        result = tensor_parallel.checkpoint(
            bound(function), False, hidden_states, intermediate_tensors, padding_mask
        )
        return result

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """Megatron's own, computed again in backward if asked for."""
        result: Tensor | None
        overlapped = not self.use_shared_expert or self.shared_expert_overlap
        if overlapped or not (self.recomputes_shared and self.training):
            result = super().shared_experts_compute(hidden_states)
            return result
        result = tensor_parallel.checkpoint(bound(self.shared_experts), False, hidden_states)
        return result

    def preprocess(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens ``[s, b, H]`` to rows ready for the dispatch, their products beside them."""
        if (outer := self.experts.outer) is not None:
            if outer.keyed and not rows_can_carry_columns(self.config):
                raise LayoutError(
                    f"routed experts have dropout, whose token keys travel with the rows, and the dispatch of this run "
                    f"({self.config.moe_token_dispatcher_type}) cannot carry them; use --moe-token-dispatcher-type alltoall "
                    "without shared-expert overlap, latent projection and CUDA graphs, or set dropout: 0"
                )
            hidden_states = outer.widen(hidden_states)
        result: tuple[Tensor, Tensor] = super().preprocess(hidden_states, probs, routing_map)
        return result

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Combined rows to ``[s, b, H]``, the shared experts' output added last."""
        result: Tensor
        if (outer := self.experts.outer) is None:
            result = super().postprocess(output, shared_expert_output)
            return result
        result = outer.narrow(super().postprocess(output, None))
        return result if shared_expert_output is None else result + shared_expert_output


def rows_can_carry_columns(config: TransformerConfig) -> bool:
    """Whether the dispatch of this config moves rows of any width, and only tokens go through it.

    Taken for true of Megatron's ``alltoall`` alone. Not so: shared experts that the dispatcher runs itself on the rows it is
    given (``moe_shared_expert_overlap``), a latent projection around the dispatch, and CUDA graphs that hold parts of the layer.
    """
    return (
        config.moe_token_dispatcher_type == "alltoall"
        and not config.moe_shared_expert_overlap
        and not config.moe_latent_size
        and config.cuda_graph_impl == "none"
    )
