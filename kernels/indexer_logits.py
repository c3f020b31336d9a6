"""DSA indexer scores of every query over the keys it may see, from fp8 index queries and keys.

    o[s, t] = ks[t] * sum_h w[s, h] * relu( q[s, h] . k[t] )        lo[s] <= t < hi[s], else -inf

``q`` and ``k`` are e4m3 codes; ``ks`` is the key's fp32 scale, and the query's scale, the softmax scale and ``heads ** -0.5`` are
folded into ``w``. Keys stand on the long side of the matrix instruction and four queries' heads on the other: with 32 heads a
query alone would be too short for Hopper's wgmma.

Accumulation: one dot over the whole head dimension, fp32; the weighted heads are summed in fp32 in one fixed order, so that equal
inputs give equal scores wherever they stand. Rounding: none but fp32's. Masked lanes (queries or keys beyond the end) read 0, and
places outside ``lo .. hi`` are written -inf; a tile that no query of it can see skips the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import cdiv, e4m3, launch, require, row_stride

__all__ = ["indexer_logits", "reference"]

CONFIG = {"BT": 128, "num_warps": 8, "num_stages": 2}
LANES = 128
"""Queries times heads of one tile."""


@triton.jit
def _kernel(
    q, k, ks, w, lo, hi, out, queries, keys, k_stride, out_stride,
    H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BQ + tl.arange(0, BQ)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    head = tl.program_id(0) * BQ * H + tl.arange(0, BQ * H)
    d = tl.arange(0, D)
    low = tl.load(lo + s, mask=s < queries, other=0)
    high = tl.load(hi + s, mask=s < queries, other=0)
    seen = (t[:, None] >= low[None, :]) & (t[:, None] < high[None, :])
    score = tl.full((BT, BQ), float("-inf"), tl.float32)
    if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
        key_at = k + t[:, None].to(tl.int64) * k_stride + d[None, :]
        query_at = q + head[None, :].to(tl.int64) * D + d[:, None]
        key = tl.load(key_at, mask=t[:, None] < keys, other=0.0)
        query = tl.load(query_at, mask=head[None, :] < queries * H, other=0.0)
        weight = tl.load(w + head, mask=head < queries * H, other=0.0)
        product = tl.maximum(tl.dot(key, query), 0.0) * weight[None, :]
        total = tl.sum(tl.reshape(product, (BT, BQ, H)), 2)
        total = total * tl.load(ks + t, mask=t < keys, other=0.0)[:, None]
        score = tl.where(seen, total, float("-inf"))
    out_at = out + s[None, :].to(tl.int64) * out_stride + t[:, None]
    tl.store(out_at, score, mask=(s[None, :] < queries) & (t[:, None] < keys))


def indexer_logits(
    q: Tensor, k: Tensor, k_scales: Tensor, w: Tensor, lo: Tensor, hi: Tensor
) -> Tensor:
    """Scores of all pairs, -inf outside each query's range.

    Args:
        q: e4m3 ``[S, H, D]``, dense; H and D powers of two, H <= 128, D >= 32.
        k: e4m3 ``[T, D]``.
        k_scales: float32 ``[T]``.
        w: float32 ``[S, H]``, dense, the query's scale in it.
        lo: int32 ``[S]``, first key of each query.
        hi: int32 ``[S]``, one past its last, at most T.

    Returns:
        float32 ``[S, T]``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    (queries, heads, dim), keys = q.shape, k.shape[0]
    powers = heads & (heads - 1) == 0 and dim & (dim - 1) == 0 and heads <= LANES and dim >= 32
    require(
        powers,
        f"q is {tuple(q.shape)}; heads and head size must be powers of two, <= 128 and >= 32",
    )
    fits = k.shape[1] == dim and k_scales.shape == (keys,) and w.shape == (queries, heads)
    require(
        fits and lo.shape == hi.shape == (queries,),
        f"q {tuple(q.shape)}, k {tuple(k.shape)}, k_scales {tuple(k_scales.shape)}, w {tuple(w.shape)} and the ranges "
        f"{tuple(lo.shape)}, {tuple(hi.shape)} do not belong together",
    )
    require(q.is_contiguous() and w.is_contiguous(), "q and w must be dense")
    out = torch.empty(queries, keys, dtype=torch.float32, device=q.device)
    each = LANES // heads
    launch(
        _kernel, (cdiv(queries, each), cdiv(keys, CONFIG["BT"])), e4m3(q, "q"), e4m3(k, "k"),
        k_scales, w, lo, hi, out, queries, keys, row_stride(k, "k"), row_stride(out, "out"),
        H=heads, D=dim, BQ=each, **CONFIG,
    )  # fmt: skip
    return out


def reference(
    q: Tensor,
    k: Tensor,
    k_scales: Tensor,
    w: Tensor,
    lo: Tensor,
    hi: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """:func:`indexer_logits` in ``dtype``."""
    product = torch.einsum("shd,td->sht", e4m3(q, "q").to(dtype), e4m3(k, "k").to(dtype)).relu()
    score = (product * w.to(dtype)[:, :, None]).sum(1) * k_scales.to(dtype)
    place = torch.arange(k.shape[0], device=k.device)
    seen = (place >= lo[:, None]) & (place < hi[:, None])
    return score.masked_fill(~seen, float("-inf"))
