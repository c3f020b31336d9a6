"""The DSA indexer: which keys each query may attend to.

``I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s] / sqrt(d))`` over the legal keys ``s`` of query ``t``, and the ``index_topk``
largest are selected. Scores, head weights and their sum are fp32; ReLU is on; the rotary slice is the *first*
``qk_rope_head_dim`` of each index head, interleaved as the config key says (GLM: yes).

Scores are quadratic in the sequence, memory is not: a few queries at a time are scored against the keys that they may see.

The selection is discrete, so no gradient of the language-model loss reaches the indexer: it runs without autograd, and with
the frozen policy its parameters never change.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_xorl.layers import sparse_kernels
from megatron_xorl.layers.cache import LatentCache
from megatron_xorl.layers.context import Placement
from megatron_xorl.layers.provider import FrozenSpecProvider
from megatron_xorl.layers.rope import rotate
from megatron_xorl.layers.visible import VisibleKeys

__all__ = ["SCORE_BYTES", "Indexer", "select_topk"]

SCORE_BYTES = 32 << 20
"""What the per-head fp32 scores of one chunk of queries may take; one query's scores are the least there is."""


class Indexer(nn.Module):
    """Index queries from the normalised q latent, one index key a token, head weights from the hidden state."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        provider: FrozenSpecProvider,
        tp_group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        glm = provider.glm
        self.glm, self.layer_number, self.tp_group = glm, layer_number, tp_group
        heads, dim = glm.index_n_heads, glm.index_head_dim
        linear, norm = provider.linear(), provider.layer_norm()
        common = {"config": config, "tp_group": tp_group}
        self.linear_wq_b = linear(glm.q_lora_rank, heads * dim, **common)
        self.linear_wk = linear(glm.hidden_size, dim, **common)
        self.k_norm = norm(config=config, hidden_size=dim, eps=glm.indexer_norm_eps)
        self.linear_weights_proj = linear(glm.hidden_size, heads, block=None, **common)

    @torch.no_grad()
    def forward(
        self,
        hidden: Tensor,
        q_latent: Tensor,
        rope: tuple[Tensor, Tensor],
        visible: VisibleKeys,
        cache: LatentCache | None = None,
        place: Placement | None = None,
    ) -> Tensor:
        """Select keys for every query.

        Args:
            hidden: ``[s/tp, b, h]``, after the input norm.
            q_latent: ``[s/tp, b, q_lora_rank]``, after its norm.
            rope: cosines and sines ``[s, b or 1, rope/2]`` of this context rank's tokens.
            visible: the keys each query may see, in slots of the whole row.
            cache: holds the index keys of earlier tokens, and takes those of these.
            place: where this context rank's tokens stand in the row; None: they are the row.

        Returns:
            int32 ``[s, b, min(index_topk, keys)]``, -1 where fewer keys are legal.
        """
        glm = self.glm
        q = self._whole(self.linear_wq_b(q_latent)[0])
        k = self._whole(self.k_norm(self.linear_wk(hidden)[0]))
        weights = self._whole(self.linear_weights_proj(hidden)[0]).float() * glm.index_n_heads**-0.5
        q = q.view(*q.shape[:2], glm.index_n_heads, glm.index_head_dim)
        q = self._rotated(q, rope[0].unsqueeze(2), rope[1].unsqueeze(2))
        k = self._rotated(k, *rope)
        if place is not None:
            k = place.whole(k)
        if cache is not None:
            k = cache.store(self.layer_number, "index_key", k)
        return select_topk(q, k, weights, visible, glm.index_topk)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = self.glm.qk_rope_head_dim
        turned = rotate(x[..., :width], cos, sin, interleaved=self.glm.indexer_rope_interleave)
        return torch.cat([turned, x[..., width:]], dim=-1)

    def _whole(self, x: Tensor) -> Tensor:
        """All tokens of this context rank from a tensor rank's part (sequence parallelism)."""
        return (
            x
            if self.tp_group.size() == 1
            else gather_from_sequence_parallel_region(x, group=self.tp_group)
        )


def select_topk(
    query: Tensor, key: Tensor, weights: Tensor, visible: VisibleKeys, topk: int
) -> Tensor:
    """Best keys of every query.

    Args:
        query: ``[s, b, heads, d]``, rotated.
        key: ``[keys, b, d]``, rotated.
        weights: fp32 ``[s, b, heads]``, scaled by ``heads**-0.5``.
        visible: the keys each query may see.
        topk: how many to select; queries that see fewer take them all.

    Returns:
        int32 ``[s, b, min(topk, keys)]``, -1 for an unused place.
    """
    by_kernels = sparse_kernels.select(query, key, weights, visible, topk, _scores)
    if by_kernels is not None:
        return by_kernels
    length, batch, heads, _ = query.shape
    keys = key.shape[0]
    selected = query.new_full((length, batch, min(topk, keys)), -1, dtype=torch.int32)
    step = max(1, SCORE_BYTES // (4 * heads * keys))
    for row in range(batch):
        for start in range(0, length, step):
            rows = slice(start, min(start + step, length))
            begin, end = visible.span(rows, row)
            legal = visible.legal(rows, row, begin, end)
            if end - begin <= topk:
                best = torch.arange(begin, end, device=key.device).masked_fill(~legal, -1)
            else:
                scores = _scores(query[rows, row], key[begin:end, row], weights[rows, row])
                best = _best(scores.masked_fill_(~legal, float("-inf")), topk, begin)
            selected[rows, row, : best.shape[-1]] = best.int()
    return selected


def _best(scores: Tensor, topk: int, begin: int) -> Tensor:
    """Slots of the ``topk`` largest of each row, counted from ``begin``, -1 where only -inf is left.

    ReLU makes scores that are exactly zero, and equal. Of equal scores the earliest key is taken, so that the selection is a
    function of the scores, not of how many keys are looked at together.
    """
    values, best = scores.topk(topk)
    least = values[:, -1:]
    tied = ((scores >= least).sum(-1) > topk) & (least.squeeze(1) > float("-inf"))
    if tied.any():
        rows, least = scores[tied], least[tied]
        above, equal = rows > least, rows == least
        equal &= equal.cumsum(-1) <= topk - above.sum(-1, keepdim=True)
        best[tied] = (above | equal).nonzero()[:, 1].view(-1, topk)
    return (best + begin).masked_fill(values == float("-inf"), -1)


def _scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """``I[t, s]``, fp32 ``[q, k]``, of ``[q, heads, d]``, ``[k, d]`` and ``[q, heads]``."""
    # All index heads share the keys, so queries and heads are rows of one product; what follows works in its place.
    scores = query.float().flatten(0, 1) @ key.float().t()
    scores = torch.relu_(scores.mul_(query.shape[-1] ** -0.5)).view(*query.shape[:2], -1)
    return (weights.unsqueeze(1) @ scores).squeeze(1)
