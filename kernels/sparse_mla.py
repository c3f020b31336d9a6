"""Attention of absorbed MLA queries over their selected latents, forward.

    p[h, j] = scale * q[s, h] . kv[idx[s, j]]             over all of D + DR columns
    o[s, h] = sum_j softmax_j(p)[h, j] * kv[idx[s, j], :D]
    lse[s, h] = log sum_j exp(p[h, j])

One program takes one query and up to 64 of its heads, which share the gathered latents. Softmax is online, base 2, in fp32; P is
rounded to bf16 for its product with the values, which is summed in fp32; the output is divided by the fp32 sum and rounded once.
Selected places of -1 (and outside the latents) are masked: they read 0 and their probability is 0. A query without a selected key
has o = 0 and lse = +inf, which makes every probability of its backward 0. Masked heads read 0 and are not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import cdiv, check_bf16, launch, require, row_stride

__all__ = ["check_attention", "gather", "reference", "sparse_mla"]

CONFIG = {"BH": 64, "BI": 32, "num_warps": 8, "num_stages": 2}


@triton.jit
def gather(kv, index, query, place, keys, kv_stride, TOPK: tl.constexpr):
    """Pointers to the latents at ``place`` of a query's selection, int64 ``[BI]`` key slots, and which places are used."""
    at = index + query.to(tl.int64) * TOPK + place
    slot = tl.load(at, mask=place < TOPK, other=-1)
    used = (slot >= 0) & (slot < keys)
    slot = tl.where(used, slot, 0).to(tl.int64)
    return kv + slot[:, None] * kv_stride, slot, used


@triton.jit
def _kernel(
    q, kv, index, out, lse, keys, scale, heads, q_query, q_head, kv_stride,
    TOPK: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, BH: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    head_ok = head < heads
    d, r = tl.arange(0, D), tl.arange(0, DR)
    q_at = q + query.to(tl.int64) * q_query + head[:, None].to(tl.int64) * q_head
    q_main = tl.load(q_at + d[None, :], mask=head_ok[:, None], other=0.0)
    q_rope = tl.load(q_at + D + r[None, :], mask=head_ok[:, None], other=0.0)
    largest = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, D), tl.float32)
    base2 = scale * 1.4426950408889634
    for first in range(0, TOPK, BI):
        at, _, used = gather(kv, index, query, first + tl.arange(0, BI), keys, kv_stride, TOPK)
        main = tl.load(at + d[None, :], mask=used[:, None], other=0.0)
        rope = tl.load(at + D + r[None, :], mask=used[:, None], other=0.0)
        score = tl.dot(q_rope, tl.trans(rope), tl.dot(q_main, tl.trans(main)))
        score = tl.where(used[None, :], score * base2, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(largest - shift)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(tl.bfloat16), main, acc * shrink[:, None])
        largest = new
    some = tl.where(total == 0.0, 1.0, total)
    out_at = out + (query.to(tl.int64) * heads + head[:, None]) * D + d[None, :]
    tl.store(out_at, (acc / some[:, None]).to(out.dtype.element_ty), mask=head_ok[:, None])
    value = (largest + tl.log2(some)) * 0.6931471805599453
    value = tl.where(total == 0.0, float("inf"), value)
    tl.store(lse + query.to(tl.int64) * heads + head, value, mask=head_ok)


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    scale: float,
    value_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over its selected keys.

    Args:
        q: bf16 ``[S, H, D + DR]``; its last axis is dense.
        kv: bf16 ``[T, D + DR]``, one latent for all heads, its first D columns the value; rows may be strided.
        index: int32 ``[S, topk]``, dense, distinct key slots, -1 for an unused place.
        scale: softmax scale.
        value_dim: D, a power of two, as is DR, both >= 16.
        dtype: of the output, bf16 or fp32.

    Returns:
        ``[S, H, D]``, and float32 ``[S, H]`` log-sum-exp.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_attention(q, kv, index, value_dim)
    queries, heads, _ = q.shape
    out = torch.empty(queries, heads, value_dim, dtype=dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    launch(
        _kernel, (queries, cdiv(heads, CONFIG["BH"])), q, kv, index, out, lse, kv.shape[0],
        float(scale), heads, q.stride(0), row_stride(q, "q"), row_stride(kv, "kv"),
        TOPK=index.shape[1], D=value_dim, DR=q.shape[2] - value_dim, **CONFIG,
    )  # fmt: skip
    return out, lse


def check_attention(q: Tensor, kv: Tensor, index: Tensor, value_dim: int) -> None:
    """Shapes and dtypes of attention over selected keys.

    Raises:
        ValueError: something does not fit.
    """
    check_bf16(q=q, kv=kv)
    width, rope = q.shape[-1], q.shape[-1] - value_dim
    powers = (
        value_dim & (value_dim - 1) == 0 and rope & (rope - 1) == 0 and min(value_dim, rope) >= 16
    )
    require(
        powers and q.dim() == 3,
        f"q is {tuple(q.shape)} with value width {value_dim}; the widths must be powers of two >= 16",
    )
    fits = kv.dim() == 2 and kv.shape[1] == width and index.shape[0] == q.shape[0]
    require(
        fits and index.dim() == 2 and index.dtype == torch.int32 and index.is_contiguous(),
        f"kv {tuple(kv.shape)} and index {index.dtype} {tuple(index.shape)} do not fit q {tuple(q.shape)}",
    )


def reference(
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    scale: float,
    value_dim: int,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and probabilities ``[S, H, topk]`` in ``dtype``; differentiable in ``q`` and ``kv``."""
    used = (index >= 0)[:, None]
    latent = kv.to(dtype)[index.clamp(min=0).long()]
    score = scale * torch.einsum("shd,sjd->shj", q.to(dtype), latent)
    score = score.masked_fill(~used, float("-inf"))
    lse = torch.logsumexp(score, -1)
    empty = ~used.any(-1).expand_as(lse)
    lse = lse.masked_fill(empty, float("inf"))
    shifted = torch.where(used, score, 0.0) - lse.masked_fill(empty, 0.0)[..., None]
    prob = torch.where(used, shifted.exp(), 0.0)
    out = torch.einsum("shj,sjd->shd", prob, latent[..., :value_dim])
    return out, lse, prob
