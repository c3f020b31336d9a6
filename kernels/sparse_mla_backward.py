"""Backward of :mod:`megatron_xorl.kernels.sparse_mla`, in three kernels; one that does it all does not fit Hopper's registers.

    P[h, j]  = exp(scale * q[s, h] . kv[idx[s, j]] - lse[s, h])         delta[h] = sum_d o[s, h, d] dO[s, h, d]
    dS[h, j] = scale * P[h, j] * ( dO[s, h] . kv[idx[s, j], :D] - delta[h] )
    dq[s, h] = sum_j dS[h, j] kv[idx[s, j]]
    dkv[t]   = sum over (s, j) with idx[s, j] = t of  sum_h dS[h, j] q[s, h]  (+ P[h, j] dO[s, h] in the value columns)

1. ``_slopes``: P and dS of one query and 64 selected keys, rounded to bf16, to scratch.
2. ``_query_gradient``: dq of one query, fp32 over the selection in order, rounded once.
3. ``_key_gradient``: dkv, fp32. Queries share keys, so parts are added by fp32 atomics, whose order, and last bits, vary; with
   ``deterministic=True`` they go to scratch and :mod:`megatron_xorl.kernels.segment_sum` adds them in order of query and place.

Queries are taken a chunk at a time, so scratch is bounded; neither gradient depends on the chunks (dkv: if deterministic).
Masked places read 0 and have P = dS = 0; masked heads read 0 and are not stored. A query without a selected key (lse = +inf) has
dq = 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import cdiv, check_bf16, launch, require, row_stride
from megatron_xorl.kernels.segment_sum import segment_sum
from megatron_xorl.kernels.sparse_mla import check_attention, gather
from megatron_xorl.kernels.sparse_mla import reference as attention

__all__ = ["SCRATCH_BYTES", "reference", "sparse_mla_backward"]

SLOPES = {"BH": 64, "BI": 64, "num_warps": 8, "num_stages": 1}
QUERY = {"BH": 64, "BI": 64, "num_warps": 8, "num_stages": 2}
KEY = {"BH": 64, "BI": 64, "num_warps": 4, "num_stages": 1}
KEY_COLUMNS = 128

SCRATCH_BYTES = 512 << 20
"""What P, dS and the parts of dkv of one chunk of queries may take."""


@triton.jit
def _slopes(
    q, kv, index, grad, lse, delta, probs, slopes, keys, scale, heads, q_query, q_head, kv_stride,
    TOPK: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, BH: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    place = tl.program_id(1) * BI + tl.arange(0, BI)
    head = tl.program_id(2) * BH + tl.arange(0, BH)
    head_ok = head < heads
    d, r = tl.arange(0, D), tl.arange(0, DR)
    at, _, used = gather(kv, index, query, place, keys, kv_stride, TOPK)
    main = tl.load(at + d[None, :], mask=used[:, None], other=0.0)
    rope = tl.load(at + D + r[None, :], mask=used[:, None], other=0.0)
    q_at = q + query.to(tl.int64) * q_query + head[:, None].to(tl.int64) * q_head
    flat = query.to(tl.int64) * heads + head
    q_main = tl.load(q_at + d[None, :], mask=head_ok[:, None], other=0.0)
    score = tl.dot(q_main, tl.trans(main))
    q_rope = tl.load(q_at + D + r[None, :], mask=head_ok[:, None], other=0.0)
    score = tl.dot(q_rope, tl.trans(rope), score)
    high = tl.load(lse + flat, mask=head_ok, other=float("inf"))
    prob = tl.where(used[None, :], tl.exp(score * scale - high[:, None]), 0.0)
    g = tl.load(grad + flat[:, None] * D + d[None, :], mask=head_ok[:, None], other=0.0)
    mean = tl.load(delta + flat, mask=head_ok, other=0.0)
    slope = prob * (tl.dot(g, tl.trans(main)) - mean[:, None]) * scale
    out = flat[:, None] * TOPK + place[None, :]
    ok = head_ok[:, None] & (place < TOPK)[None, :]
    tl.store(probs + out, prob.to(tl.bfloat16), mask=ok)
    tl.store(slopes + out, slope.to(tl.bfloat16), mask=ok)


@triton.jit
def _query_gradient(
    kv, index, slopes, out, keys, heads, kv_stride,
    TOPK: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, BH: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    head_ok = head < heads
    d, r = tl.arange(0, D), tl.arange(0, DR)
    flat = query.to(tl.int64) * heads + head
    acc = tl.zeros((BH, D), tl.float32)
    acc_rope = tl.zeros((BH, DR), tl.float32)
    for first in range(0, TOPK, BI):
        place = first + tl.arange(0, BI)
        at, _, used = gather(kv, index, query, place, keys, kv_stride, TOPK)
        ok = head_ok[:, None] & (place < TOPK)[None, :]
        slope = tl.load(slopes + flat[:, None] * TOPK + place[None, :], mask=ok, other=0.0)
        acc = tl.dot(slope, tl.load(at + d[None, :], mask=used[:, None], other=0.0), acc)
        rope = tl.load(at + D + r[None, :], mask=used[:, None], other=0.0)
        acc_rope = tl.dot(slope, rope, acc_rope)
    out_at = out + flat[:, None] * (D + DR)
    tl.store(out_at + d[None, :], acc.to(out.dtype.element_ty), mask=head_ok[:, None])
    tl.store(out_at + D + r[None, :], acc_rope.to(out.dtype.element_ty), mask=head_ok[:, None])


@triton.jit
def _key_gradient(
    q, grad, index, probs, slopes, out, keys, heads, q_query, q_head,
    ATOMIC: tl.constexpr, TOPK: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, DC: tl.constexpr,
    BH: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    place = tl.program_id(1) * BI + tl.arange(0, BI)
    c, r = tl.program_id(2) * DC + tl.arange(0, DC), tl.arange(0, DR)
    _, slot, used = gather(out, index, query, place, keys, D + DR, TOPK)
    row = slot
    if not ATOMIC:
        row = query.to(tl.int64) * TOPK + place
    acc = tl.zeros((BI, DC), tl.float32)
    acc_rope = tl.zeros((BI, DR), tl.float32)
    for first in range(0, heads, BH):
        head = first + tl.arange(0, BH)
        flat = query.to(tl.int64) * heads + head
        ok = (place < TOPK)[:, None] & (head < heads)[None, :]
        slope = tl.load(slopes + flat[None, :] * TOPK + place[:, None], mask=ok, other=0.0)
        prob = tl.load(probs + flat[None, :] * TOPK + place[:, None], mask=ok, other=0.0)
        q_at = q + query.to(tl.int64) * q_query + head[:, None].to(tl.int64) * q_head
        q_main = tl.load(q_at + c[None, :], mask=(head < heads)[:, None], other=0.0)
        g = tl.load(grad + flat[:, None] * D + c[None, :], mask=(head < heads)[:, None], other=0.0)
        acc = tl.dot(prob, g, tl.dot(slope, q_main, acc))
        if tl.program_id(2) == 0:
            q_rope = tl.load(q_at + D + r[None, :], mask=(head < heads)[:, None], other=0.0)
            acc_rope = tl.dot(slope, q_rope, acc_rope)
    at = out + row[:, None] * (D + DR)
    if ATOMIC:
        tl.atomic_add(at + c[None, :], acc, mask=used[:, None], sem="relaxed")
    else:
        tl.store(at + c[None, :], acc, mask=used[:, None])
    if tl.program_id(2) == 0:
        if ATOMIC:
            tl.atomic_add(at + D + r[None, :], acc_rope, mask=used[:, None], sem="relaxed")
        else:
            tl.store(at + D + r[None, :], acc_rope, mask=used[:, None])


def sparse_mla_backward(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    deterministic: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scratch_bytes: int = SCRATCH_BYTES,
) -> tuple[Tensor, Tensor]:
    """Gradients of the queries and of the latents.

    Args:
        grad: bf16 ``[S, H, D]``, dense, gradient of the output.
        q: bf16 ``[S, H, D + DR]``, as given to the forward, like ``kv``, ``index`` and ``scale``.
        kv: bf16 ``[T, D + DR]``.
        index: int32 ``[S, topk]``.
        out: the forward's output ``[S, H, D]``.
        lse: float32 ``[S, H]``, the forward's.
        scale: softmax scale.
        deterministic: sum dkv in a fixed order instead of by atomics.
        dtype: of the query's gradient, bf16 or fp32.
        scratch_bytes: bound of the scratch, at least one query's.

    Returns:
        ``[S, H, D + DR]`` and float32 ``[T, D + DR]``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    dim = out.shape[2]
    check_attention(q, kv, index, dim)
    check_bf16(grad=grad)
    fits = grad.shape == out.shape and lse.shape == out.shape[:2] and grad.is_contiguous()
    require(
        fits and out.shape[:2] == q.shape[:2],
        f"grad {tuple(grad.shape)}, out {tuple(out.shape)}, lse {tuple(lse.shape)} do not fit q {tuple(q.shape)}",
    )
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    each = index.shape[1] * (2 * 2 * q.shape[1] + (4 * kv.shape[1] if deterministic else 0))
    step = max(1, scratch_bytes // max(1, each))
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        _chunk(
            grad[rows], q[rows], kv, index[rows], out[rows], lse[rows], scale, dq[rows], dkv, deterministic
        )  # fmt: skip
    return dq, dkv


def _chunk(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dq: Tensor,
    dkv: Tensor,
    deterministic: bool,
) -> None:
    queries, heads, width = q.shape
    (keys, topk), dim = (kv.shape[0], index.shape[1]), out.shape[2]
    shape = {"TOPK": topk, "D": dim, "DR": width - dim}
    delta = (out.float() * grad.float()).sum(-1)
    probs = torch.empty(queries, heads, topk, dtype=torch.bfloat16, device=q.device)
    slopes = torch.empty_like(probs)
    q_strides, kv_stride = (q.stride(0), row_stride(q, "q")), row_stride(kv, "kv")
    launch(
        _slopes, (queries, cdiv(topk, SLOPES["BI"]), cdiv(heads, SLOPES["BH"])), q, kv, index, grad, lse,
        delta, probs, slopes, keys, float(scale), heads, *q_strides, kv_stride, **shape, **SLOPES,
    )  # fmt: skip
    launch(
        _query_gradient, (queries, cdiv(heads, QUERY["BH"])), kv, index, slopes, dq, keys, heads,
        kv_stride, **shape, **QUERY,
    )  # fmt: skip
    columns = min(KEY_COLUMNS, dim)
    target = dkv
    if deterministic:
        target = torch.empty(queries * topk, width, dtype=torch.float32, device=q.device)
    launch(
        _key_gradient, (queries, cdiv(topk, KEY["BI"]), dim // columns), q, grad, index, probs, slopes,
        target, keys, heads, *q_strides, ATOMIC=not deterministic, **shape, DC=columns, **KEY,
    )  # fmt: skip
    if deterministic:
        segment_sum(dkv, target, index.reshape(-1))


def reference(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    index: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Both gradients by autograd through the forward's reference."""
    q, kv = (x.detach().to(dtype).requires_grad_() for x in (q, kv))
    out, _, _ = attention(q, kv, index, scale, grad.shape[2], dtype)
    dq, dkv = torch.autograd.grad(out, (q, kv), grad.to(dtype))
    return dq, dkv
