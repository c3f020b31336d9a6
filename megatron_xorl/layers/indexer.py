"""The DSA indexer: which keys each query may attend to.

``I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s] / sqrt(d))`` over the legal keys ``s`` of query ``t``, and the ``index_topk``
largest are selected. Scores, head weights and their sum are fp32; ReLU is on; the rotary slice is the *first*
``qk_rope_head_dim`` of each index head, interleaved as the config key says (GLM: yes).

The selection is discrete, so no gradient of the language-model loss reaches the indexer: it runs without autograd, and with
the frozen policy its parameters never change.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_xorl.layers.provider import FrozenSpecProvider
from megatron_xorl.layers.rope import rotate

__all__ = ["Indexer", "select_topk"]


class Indexer(nn.Module):
    """Index queries from the normalised q latent, one index key a token, head weights from the hidden state."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        provider: FrozenSpecProvider,
        tp_group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        glm = provider.glm
        self.glm, self.tp_group = glm, tp_group
        heads, dim = glm.index_n_heads, glm.index_head_dim
        linear, norm = provider.linear(), provider.layer_norm()
        common = {"config": config, "tp_group": tp_group}
        self.linear_wq_b = linear(glm.q_lora_rank, heads * dim, **common)
        self.linear_wk = linear(glm.hidden_size, dim, **common)
        self.k_norm = norm(config=config, hidden_size=dim, eps=glm.indexer_norm_eps)
        self.linear_weights_proj = linear(glm.hidden_size, heads, block=None, **common)

    @torch.no_grad()
    def forward(
        self, hidden: Tensor, q_latent: Tensor, rope: tuple[Tensor, Tensor], legal: Tensor
    ) -> Tensor:
        """Select keys for every query.

        Args:
            hidden: ``[s/tp, b, h]``, after the input norm.
            q_latent: ``[s/tp, b, q_lora_rank]``, after its norm.
            rope: cosines and sines ``[s, 1, rope/2]`` of the whole sequence.
            legal: bool ``[s, s]``, True where query (row) may see key (column).

        Returns:
            int64 ``[s, b, min(index_topk, s)]``, -1 where fewer keys are legal.
        """
        glm = self.glm
        q = self._whole(self.linear_wq_b(q_latent)[0])
        k = self._whole(self.k_norm(self.linear_wk(hidden)[0]))
        weights = self._whole(self.linear_weights_proj(hidden)[0]).float() * glm.index_n_heads**-0.5
        q = q.view(*q.shape[:2], glm.index_n_heads, glm.index_head_dim)
        q = self._rotated(q, rope[0].unsqueeze(2), rope[1].unsqueeze(2))
        k = self._rotated(k, *rope)
        # All index heads share the keys, so queries and heads are rows of one product.
        q, k = q.transpose(0, 1).float().flatten(1, 2), k.permute(1, 2, 0).float()
        scores = torch.relu((q @ k) * glm.index_head_dim**-0.5)
        scores = scores.unflatten(1, (-1, glm.index_n_heads))
        index_scores = (weights.transpose(0, 1).unsqueeze(2) @ scores).squeeze(2)
        return select_topk(index_scores, legal, glm.index_topk).transpose(0, 1)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = self.glm.qk_rope_head_dim
        turned = rotate(x[..., :width], cos, sin, interleaved=self.glm.indexer_rope_interleave)
        return torch.cat([turned, x[..., width:]], dim=-1)

    def _whole(self, x: Tensor) -> Tensor:
        """Whole sequence from a rank's part (sequence parallelism)."""
        return (
            x
            if self.tp_group.size() == 1
            else gather_from_sequence_parallel_region(x, group=self.tp_group)
        )


def select_topk(scores: Tensor, legal: Tensor, topk: int) -> Tensor:
    """Largest legal scores of each row: scores ``[b, q, k]`` -> int64 ``[b, q, min(topk, k)]``, -1 where illegal."""
    scores = scores.masked_fill(~legal, float("-inf"))
    best = scores.topk(min(topk, scores.shape[-1]), dim=-1)
    return best.indices.masked_fill(best.values == float("-inf"), -1)
