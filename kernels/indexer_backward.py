"""Gradients of the indexer's queries, keys and head weights from those of its selected scores.

    sel[s, j] = scale * sum_h w[s, h] relu( z[h, j] ),  z[h, j] = q[s, h] . k[idx[s, j]]
    g[j]      = scale * dsel[s, j]
    dw[s, h]  = sum_j g[j] relu(z[h, j])
    dz[h, j]  = g[j] w[s, h]  where z[h, j] > 0, else 0
    dq[s, h]  = sum_j dz[h, j] k[idx[s, j]]              dk[t] = sum over (s, j) with idx[s, j] = t of sum_h dz[h, j] q[s, h]

One program a query. ``z`` is recomputed from bf16 q and k in fp32, and the ReLU's mask is that of this z. dz is rounded to bf16
for its two products, which are summed in fp32; dw is fp32 throughout, dq is rounded once. dk is fp32: by atomics, in any order,
or with ``deterministic=True`` through scratch and :mod:`megatron_xorl.kernels.segment_sum`, a chunk of queries at a time. Masked
places have g = 0 and read 0; masked heads read 0 and are not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import check_bf16, launch, padded, require, row_stride
from megatron_xorl.kernels.segment_sum import segment_sum
from megatron_xorl.kernels.sparse_mla import gather

__all__ = ["SCRATCH_BYTES", "indexer_backward", "reference"]

CONFIG = {"BI": 64, "num_warps": 8, "num_stages": 2}

SCRATCH_BYTES = 512 << 20
"""What the parts of dk of one chunk of queries may take in the deterministic form."""


@triton.jit
def _kernel(
    q, k, w, index, dsel, dq, dw, dk, keys, scale, heads, k_stride,
    ATOMIC: tl.constexpr, TOPK: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    head, d = tl.arange(0, BH), tl.arange(0, D)
    head_ok = head < heads
    flat = query.to(tl.int64) * heads + head
    at = flat[:, None] * D + d[None, :]
    q_all = tl.load(q + at, mask=head_ok[:, None], other=0.0)
    weight = tl.load(w + flat, mask=head_ok, other=0.0)
    acc = tl.zeros((BH, D), tl.float32)
    acc_w = tl.zeros((BH,), tl.float32)
    for first in range(0, TOPK, BI):
        place = first + tl.arange(0, BI)
        key_at, slot, used = gather(k, index, query, place, keys, k_stride, TOPK)
        row = query.to(tl.int64) * TOPK + place
        g = tl.load(dsel + row, mask=used, other=0.0) * scale
        key = tl.load(key_at + d[None, :], mask=used[:, None], other=0.0)
        z = tl.dot(key, tl.trans(q_all))
        acc_w += tl.sum(g[:, None] * tl.maximum(z, 0.0), 0)
        dz = tl.where(z > 0.0, g[:, None] * weight[None, :], 0.0).to(tl.bfloat16)
        acc = tl.dot(tl.trans(dz), key, acc)
        part = tl.dot(dz, q_all)
        if ATOMIC:
            out_at = dk + slot[:, None] * D + d[None, :]
            tl.atomic_add(out_at, part, mask=used[:, None], sem="relaxed")
        else:
            tl.store(dk + row[:, None] * D + d[None, :], part, mask=used[:, None])
    tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=head_ok[:, None])
    tl.store(dw + flat, acc_w, mask=head_ok)


def indexer_backward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    index: Tensor,
    dsel: Tensor,
    scale: float,
    *,
    deterministic: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scratch_bytes: int = SCRATCH_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and head weights.

    Args:
        q: bf16 ``[S, H, D]``, dense, D a power of two >= 16.
        k: bf16 ``[T, D]``; rows may be strided.
        w: float32 ``[S, H]``, dense.
        index: int32 ``[S, topk]``, dense, -1 for an unused place.
        dsel: float32 ``[S, topk]``, dense.
        scale: factor of the scores.
        deterministic: sum dk in a fixed order instead of by atomics.
        dtype: of the query's gradient, bf16 or fp32.
        scratch_bytes: bound of the deterministic form's scratch, at least one query's.

    Returns:
        ``[S, H, D]``, float32 ``[T, D]``, float32 ``[S, H]``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_bf16(q=q, k=k)
    queries, heads, dim = q.shape
    fits = k.shape[1] == dim and w.shape == (queries, heads) and dsel.shape == index.shape
    dense = all(x.is_contiguous() for x in (q, w, index, dsel)) and index.shape[0] == queries
    require(
        fits and dense and w.dtype == dsel.dtype == torch.float32 and index.dtype == torch.int32,
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, w {w.dtype} {tuple(w.shape)}, index {index.dtype} {tuple(index.shape)} and "
        f"dsel {dsel.dtype} {tuple(dsel.shape)} do not belong together, or are not dense",
    )
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dw = torch.empty_like(w)
    topk = index.shape[1]
    step = max(1, scratch_bytes // max(1, 4 * topk * dim)) if deterministic else max(1, queries)
    for start in range(0, queries, step):
        rows = slice(start, start + step)
        chosen = index[rows]
        target = dk
        if deterministic:
            target = torch.empty(chosen.numel(), dim, dtype=torch.float32, device=q.device)
        launch(
            _kernel, (chosen.shape[0],), q[rows], k, w[rows], chosen, dsel[rows], dq[rows], dw[rows],
            target, k.shape[0], float(scale), heads, row_stride(k, "k"),
            ATOMIC=not deterministic, TOPK=topk, BH=padded(heads), D=dim, **CONFIG,
        )  # fmt: skip
        if deterministic:
            segment_sum(dk, target, chosen.reshape(-1))
    return dq, dk, dw


def reference(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    index: Tensor,
    dsel: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three gradients by autograd through the selected scores."""
    q, k, w = (x.detach().to(dtype).requires_grad_() for x in (q, k, w))
    key = k[index.clamp(min=0).long()]
    z = torch.einsum("shd,sjd->shj", q, key).relu()
    sel = scale * (z * w[..., None]).sum(1)
    grad = torch.where(index >= 0, dsel.to(dtype), 0.0)
    dq, dk, dw = torch.autograd.grad(sel, (q, k, w), grad)
    return dq, dk, dw
