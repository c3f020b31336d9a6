"""Attention over selected keys, at the cost of the selection.

One idea: queries are taken a few at a time, and for each few only their selected keys are looked at, so time and memory grow
with ``queries x topk``, never with ``queries x keys``. Forward keeps its inputs alone; backward computes the probabilities
again, chunk by chunk. Where the keys in reach of a chunk are hardly more than the selection (short sequences, the beginning of
long ones), the chunk multiplies with that one range under a mask, which is the same sum without a copy of every key.

:func:`attend_masked` is the dense form, one ``[b, heads, queries, keys]`` product: the oracle of the tests.

    python -m tests.bench.sparse_attention
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.layers import sparse_kernels

__all__ = ["WORKSPACE_BYTES", "attend_masked", "attend_selected"]

WORKSPACE_BYTES = 8 << 20
"""What one chunk's copies of keys, and its scores, may take: small enough to stay in cache and in the allocator's free lists."""

MOST_QUERIES = 64
"""Queries of one chunk: a longer one would waste the causal half of what it looks at."""

COPY_HEADS = 8
"""Copying a key out costs about as much as multiplying it with this many heads (fp32, two AVX2 cores): what makes a range of
``topk * (1 + COPY_HEADS / heads)`` keys as cheap as a selection of ``topk``."""


def attend_selected(
    query: Tensor, key: Tensor, selected: Tensor, scale: float, value_dim: int
) -> Tensor:
    """Softmax attention of every query over its selected keys.

    Args:
        query: ``[s, b, heads, d]``.
        key: ``[keys, b, d]``, one for all heads; its first ``value_dim`` entries are the value.
        selected: int32 or int64 ``[s, b, topk]``, distinct key slots, -1 for an unused place.
        scale: softmax scale; the softmax runs in fp32 (fp64 for fp64 inputs).
        value_dim: width of the value.

    Returns:
        ``[s, b, heads, value_dim]``; zeros for a query without a selected key.
    """
    by_kernels = sparse_kernels.attend(query, key, selected, scale, value_dim)
    if by_kernels is not None:
        return by_kernels
    output: Tensor = _SelectedAttention.apply(query, key, selected, scale, value_dim)
    return output


@dataclass
class _Chunk:
    """The keys that a few queries of one batch row look at: ``[c, topk, d]`` of their own, or ``[n, d]`` in common."""

    keys: Tensor
    used: Tensor
    """bool ``[c, topk]`` or ``[c, n]``: which of ``keys`` each query attends to."""
    slots: Tensor | slice
    """Where ``keys`` stand among all keys: indices ``[c * topk]``, or a range."""

    def times_keys(self, x: Tensor, width: int) -> Tensor:
        """``[c, h, width] x keys[..., :width]^T -> [c, h, n]``."""
        keys = self.keys[..., :width]
        if keys.dim() == 3:
            return x @ keys.transpose(1, 2)
        return (x.reshape(-1, width) @ keys.t()).view(*x.shape[:2], -1)

    def weighted(self, weights: Tensor, width: int) -> Tensor:
        """``[c, h, n] x keys[..., :width] -> [c, h, width]``."""
        keys = self.keys[..., :width]
        if keys.dim() == 3:
            return weights @ keys
        return (weights.flatten(0, 1) @ keys).view(*weights.shape[:2], width)

    def add_key_gradient(
        self, total: Tensor, slope: Tensor, query: Tensor, probs: Tensor, grad: Tensor
    ) -> None:
        """Add ``slope^T query``, and ``probs^T grad`` in the value part, to the keys' places in ``total`` ``[keys, d]``."""
        pairs = [(slope, query), (probs, grad)]
        if isinstance(self.slots, slice):
            for weights, x in pairs:
                part = total[self.slots, : x.shape[-1]]
                part += weights.flatten(0, 1).t() @ x.reshape(-1, x.shape[-1])
        else:
            as_key, as_value = (weights.transpose(1, 2) @ x for weights, x in pairs)
            as_key[..., : grad.shape[-1]] += as_value
            total.index_add_(0, self.slots, as_key.flatten(0, 1).to(total.dtype))

    def probabilities(self, query: Tensor, scale: float) -> Tensor:
        """Softmax over the used keys, ``[c, h, n]`` in at least fp32; nothing for a query that uses none."""
        scores = self.times_keys(query, query.shape[-1])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
        probs = scores.masked_fill(~self.used.unsqueeze(1), float("-inf")).softmax(-1)
        blind = ~self.used.any(-1)
        return probs.masked_fill(blind[:, None, None], 0.0) if blind.any() else probs


def _chunks(key: Tensor, selected: Tensor, heads: int) -> list[tuple[slice, slice]]:
    """Query ranges of one batch row, and the range of key slots that each one's selection lies in."""
    length, topk = selected.shape
    row_bytes = topk * (key.shape[-1] * key.element_size() + 2 * heads * 4)
    step = max(1, min(MOST_QUERIES, WORKSPACE_BYTES // max(1, row_bytes)))
    lowest = selected.masked_fill(selected < 0, key.shape[0]).amin(-1)
    highest = selected.amax(-1)
    result = []
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        end = int(highest[rows].max()) + 1
        result.append((rows, slice(min(int(lowest[rows].min()), end), end)))
    return result


def _chunk(key: Tensor, chosen: Tensor, reach: slice, heads: int) -> _Chunk:
    """The chunk of queries that chose ``chosen`` ``[c, topk]``: copies of their keys, or the range these lie in."""
    width = reach.stop - reach.start
    if width > chosen.shape[-1] * (1 + COPY_HEADS / heads):
        slots = chosen.clamp(min=0).flatten()
        keys = key.index_select(0, slots).view(*chosen.shape, -1)
        return _Chunk(keys, chosen >= 0, slots)
    # One column more than there are keys takes the unused places and is cut off again.
    places = torch.where(chosen < 0, width, chosen - reach.start).long()
    used = places.new_zeros(chosen.shape[0], width + 1, dtype=torch.bool).scatter(-1, places, True)
    return _Chunk(key[reach], used[:, :-1], reach)


class _SelectedAttention(torch.autograd.Function):
    """Forward and backward over the same chunks; the only tensors kept are the inputs."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, selected: Tensor, scale: float, value_dim: int
    ) -> Tensor:
        ctx.save_for_backward(query, key, selected)
        ctx.scale, ctx.value_dim = scale, value_dim
        output = query.new_empty(*query.shape[:3], value_dim)
        for row, keys in enumerate(key.transpose(0, 1).contiguous()):
            for rows, reach in _chunks(keys, selected[:, row], query.shape[2]):
                chunk = _chunk(keys, selected[rows, row], reach, query.shape[2])
                probs = chunk.probabilities(query[rows, row], scale).to(query.dtype)
                output[rows, row] = chunk.weighted(probs, value_dim)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        query, key, selected = ctx.saved_tensors
        scale, value_dim = ctx.scale, ctx.value_dim
        grad_query = torch.empty_like(query)
        per_row = key.transpose(0, 1).contiguous()
        wide = torch.promote_types(key.dtype, torch.float32)
        grad_key = torch.zeros_like(per_row, dtype=wide)
        for row, keys in enumerate(per_row):
            for rows, reach in _chunks(keys, selected[:, row], query.shape[2]):
                chunk = _chunk(keys, selected[rows, row], reach, query.shape[2])
                q, g = query[rows, row], grad[rows, row]
                probs = chunk.probabilities(q, scale)
                slope = chunk.times_keys(g, value_dim).to(wide)
                slope = probs * (slope - (probs * slope).sum(-1, keepdim=True)) * scale
                slope, probs = slope.to(query.dtype), probs.to(query.dtype)
                grad_query[rows, row] = chunk.weighted(slope, key.shape[-1])
                chunk.add_key_gradient(grad_key[row], slope, q, probs, g)
        return grad_query, grad_key.transpose(0, 1).to(key.dtype), None, None, None


def attend_masked(
    query: Tensor, key: Tensor, selected: Tensor, scale: float, value_dim: int
) -> Tensor:
    """:func:`attend_selected` by one dense product and plain autograd; every query must have a selected key."""
    length, batch, heads, _ = query.shape
    keys = key.shape[0]
    chosen = selected.transpose(0, 1).long()
    # One column more than there are keys takes the unused places and is cut off again.
    allowed = chosen.new_zeros(batch, length, keys + 1, dtype=torch.bool)
    allowed = allowed.scatter(-1, chosen.masked_fill(chosen < 0, keys), True)[..., :-1]
    # All heads share the keys, so heads and queries are rows of one product.
    q, k = query.permute(1, 2, 0, 3).flatten(1, 2), key.transpose(0, 1)
    scores = (q @ k.transpose(1, 2)).view(batch, heads, length, keys)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    probs = scores.masked_fill(~allowed.unsqueeze(1), float("-inf")).softmax(-1)
    out = probs.to(query.dtype).flatten(1, 2) @ k[..., :value_dim]
    return out.view(batch, heads, length, value_dim).permute(2, 0, 1, 3)
