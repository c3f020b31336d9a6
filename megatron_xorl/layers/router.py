"""GLM's mixture-of-experts router, frozen, in fp32.

``scores = sigmoid(x W^T)`` in fp32; the correction bias takes part in the *choice* only; groups (if more than one) are ranked
by the sum of their two best scores; the weights are the unbiased scores of the chosen experts, divided by ``sum + 1e-20`` when
``norm_topk_prob``, times ``routed_scaling_factor``, and stay fp32.

Megatron's ``TopKRouter`` has no ``norm_topk_prob = false`` and skips the normalisation at top-1, which GLM does not; it also
updates the bias by default. This router is a fixed function: no auxiliary loss, no bias update, no token dropping.

With ``moe_enable_routing_replay`` a router takes part in Megatron's ``RouterReplay``: choices of a forward are recorded, and
given ones are used instead of its own; the weights are always its own scores of the experts that are used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_xorl.config.model import GlmConfig

__all__ = ["GlmRouter", "choose_experts"]


class GlmRouter(Router):
    """Route tokens ``[s, b, h]`` to ``num_experts_per_tok`` experts.

    ``weight`` ``[E, h]`` keeps the file's dtype; ``expert_bias`` ``[E]`` is fp32 from file to file.
    """

    expert_bias: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        *,
        glm: GlmConfig,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.glm = glm
        self.router_replay = RouterReplay() if config.moe_enable_routing_replay else None
        self.register_buffer(
            "expert_bias",
            torch.zeros(glm.n_routed_experts, dtype=torch.float32, device=self.weight.device),
        )

    def reset_parameters(self) -> None:
        """Keep the weight in the model's dtype; its values come from the checkpoint."""
        self.weight.data = self.weight.data.to(self.config.params_dtype).zero_()
        self.weight.sequence_parallel = self.config.sequence_parallel

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(probs, routing_map)``, both ``[T, E]``, from fp32 logits ``[T, E]``."""
        weights, chosen = choose_experts(logits, self.expert_bias, self.glm, self.router_replay)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights)
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route ``[s, b, h]``; padding takes part in routing and its loss is masked."""
        del padding_mask
        logits = F.linear(input.reshape(-1, input.shape[-1]).float(), self.weight.float())
        return self.routing(logits)

    def _apply(self, fn: Any, recurse: bool = True) -> GlmRouter:
        """Let devices change, keep the correction bias fp32 (``.bfloat16()`` would merge its 256 values into a few)."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self


def choose_experts(
    logits: Tensor, bias: Tensor, glm: GlmConfig, replay: RouterReplay | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mixture weights and the chosen experts, both ``[T, k]``, from fp32 logits ``[T, E]``.

    ``replay`` records the choice or replaces it, if its action says so.
    """
    scores = logits.sigmoid()
    choice = (scores + bias).detach()
    natural = partial(_best, glm=glm)
    if replay is None:
        _, chosen = natural(choice, glm.num_experts_per_tok)
    else:
        _, chosen = replay.get_replay_topk(
            choice, glm.num_experts_per_tok, default_compute_topk=natural
        )
    weights = scores.gather(1, chosen)
    if glm.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * glm.routed_scaling_factor, chosen


def _best(
    choice: Tensor, topk: int, *_: Any, glm: GlmConfig, **_megatron: Any
) -> tuple[Tensor, Tensor]:
    """The highest biased scores and whose they are, both ``[T, k]``, among the best groups where there are several."""
    if glm.n_group > 1:
        groups = choice.view(-1, glm.n_group, glm.n_routed_experts // glm.n_group)
        best = (
            groups.topk(2, dim=-1).values.sum(-1).topk(glm.topk_group, dim=-1, sorted=False).indices
        )
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        choice = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    values, chosen = choice.topk(topk, dim=-1, sorted=False)
    return values, chosen
