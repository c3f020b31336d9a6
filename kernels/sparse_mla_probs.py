"""Attention probabilities of the selected keys, summed over heads: the target of the indexer's training.

    p[s, j] = sum_h exp( scale * q[s, h] . kv[idx[s, j]] - lse[s, h] )

Recomputed from the forward's inputs and its lse. The score is fp32, the exponential is fp32, the heads are summed in fp32 (64
at a time, in order); nothing else is rounded. Unused places have p = 0, and so has a query without a selected key (lse = +inf).
Masked heads have lse = +inf, so they add 0. Under tensor parallelism the sum is over this rank's heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import cdiv, launch, row_stride
from megatron_xorl.kernels.sparse_mla import check_attention, gather
from megatron_xorl.kernels.sparse_mla import reference as attention

__all__ = ["reference", "sparse_mla_probs"]

CONFIG = {"BH": 64, "BI": 64, "num_warps": 8, "num_stages": 1}


@triton.jit
def _kernel(
    q, kv, index, lse, out, keys, scale, heads, q_query, q_head, kv_stride,
    TOPK: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, BH: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    place = tl.program_id(1) * BI + tl.arange(0, BI)
    d, r = tl.arange(0, D), tl.arange(0, DR)
    at, _, used = gather(kv, index, query, place, keys, kv_stride, TOPK)
    main = tl.load(at + d[None, :], mask=used[:, None], other=0.0)
    rope = tl.load(at + D + r[None, :], mask=used[:, None], other=0.0)
    total = tl.zeros((BI,), tl.float32)
    for first in range(0, heads, BH):
        head = first + tl.arange(0, BH)
        head_ok = head < heads
        q_at = q + query.to(tl.int64) * q_query + head[:, None].to(tl.int64) * q_head
        q_main = tl.load(q_at + d[None, :], mask=head_ok[:, None], other=0.0)
        score = tl.dot(q_main, tl.trans(main))
        q_rope = tl.load(q_at + D + r[None, :], mask=head_ok[:, None], other=0.0)
        score = tl.dot(q_rope, tl.trans(rope), score)
        high = tl.load(lse + query.to(tl.int64) * heads + head, mask=head_ok, other=float("inf"))
        total += tl.sum(tl.exp(score * scale - high[:, None]), 0)
    out_at = out + query.to(tl.int64) * TOPK + place
    tl.store(out_at, tl.where(used, total, 0.0), mask=place < TOPK)


def sparse_mla_probs(
    q: Tensor, kv: Tensor, index: Tensor, lse: Tensor, scale: float, value_dim: int
) -> Tensor:
    """Head-summed probabilities.

    Args:
        q: bf16 ``[S, H, D + DR]``, as given to the forward, like ``kv``, ``index``, ``scale`` and ``value_dim``.
        kv: bf16 ``[T, D + DR]``.
        index: int32 ``[S, topk]``.
        lse: float32 ``[S, H]``, dense, the forward's.
        scale: softmax scale.
        value_dim: D.

    Returns:
        float32 ``[S, topk]``, its rows sum to H (or 0).

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_attention(q, kv, index, value_dim)
    (queries, heads, width), topk = q.shape, index.shape[1]
    out = torch.empty(queries, topk, dtype=torch.float32, device=q.device)
    launch(
        _kernel, (queries, cdiv(topk, CONFIG["BI"])), q, kv, index, lse, out, kv.shape[0], float(scale),
        heads, q.stride(0), row_stride(q, "q"), row_stride(kv, "kv"),
        TOPK=topk, D=value_dim, DR=width - value_dim, **CONFIG,
    )  # fmt: skip
    return out


def reference(
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """:func:`sparse_mla_probs` from the forward's reference."""
    return attention(q, kv, index, scale, value_dim, dtype)[2].sum(1)
