"""LoRA's first half: the rank-r product of the unquantised activations.

    t[m, r] = scale * sum_k x[m, k] A[r, k]         forward, A [R, K]
    u[m, r] = scale * sum_n dY[m, n] B[n, r]        backward, the same product with B^T [R, N], a transposed view

Accumulation: fp32 over steps of 128, in order; K is never split and tiles do not depend on M, so a row's result does not
depend on the rows beside it. Rounding: the scaled fp32 sum, once. Masked lanes (ragged M, K, ranks below 16) read 0 and
add nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import cdiv, check_bf16, launch, padded, require, row_stride
from megatron_xorl.kernels.linear import output

__all__ = ["lora_shrink", "reference"]

CONFIG = {"BM": 64, "BK": 128, "num_warps": 4, "num_stages": 4}


@triton.jit
def _kernel(
    x, a, t, rows, rank, depth, scale, x_stride, a_stride, t_stride,
    TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    r, k = tl.arange(0, RANK), tl.arange(0, BK)
    row_ok, r_ok = row < rows, r < rank
    x_at = x + row[:, None].to(tl.int64) * x_stride + k[None, :]
    if TRANSPOSED:
        a_at = a + k[:, None].to(tl.int64) * a_stride + r[None, :]
    else:
        a_at = a + r[None, :].to(tl.int64) * a_stride + k[:, None]
    acc = tl.zeros((BM, RANK), tl.float32)
    for step in range(0, tl.cdiv(depth, BK)):
        if EVEN:
            left = tl.load(x_at, mask=row_ok[:, None], other=0.0)
            right = tl.load(a_at, mask=r_ok[None, :], other=0.0)
        else:
            inside = k < depth - step * BK
            left = tl.load(x_at, mask=row_ok[:, None] & inside[None, :], other=0.0)
            right = tl.load(a_at, mask=r_ok[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
        x_at += BK
        if TRANSPOSED:
            a_at += BK * a_stride
        else:
            a_at += BK
    t_at = t + row[:, None].to(tl.int64) * t_stride + r[None, :]
    tl.store(t_at, (acc * scale).to(t.dtype.element_ty), mask=row_ok[:, None] & r_ok[None, :])


def lora_shrink(
    x: Tensor,
    a: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``t = scale x A^T``.

    Args:
        x: bf16 ``[M, K]``; rows may be strided.
        a: bf16 ``[R, K]``, either axis dense: a transposed view of ``[K, R]`` is read as it lies.
        scale: alpha / R.
        out: ``[M, R]`` to write to, bf16 or fp32.
        dtype: of a new output.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_bf16(x=x, a=a)
    (rows, depth), rank = x.shape, a.shape[0]
    require(a.shape[1] == depth, f"a {tuple(a.shape)} does not multiply x {tuple(x.shape)}")
    out = output(out, (rows, rank), dtype, x.device)
    transposed = a.stride(-1) != 1 and a.stride(0) == 1
    config = {
        "TRANSPOSED": transposed,
        "EVEN": depth % CONFIG["BK"] == 0,
        "RANK": padded(rank),
    }
    launch(
        _kernel, (cdiv(rows, CONFIG["BM"]),), x, a, out, rows, rank, depth, float(scale),
        row_stride(x, "x"), row_stride(a.t() if transposed else a, "a"), row_stride(out, "out"),
        **config, **CONFIG,
    )  # fmt: skip
    return out


def reference(x: Tensor, a: Tensor, scale: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """:func:`lora_shrink` without a rounding."""
    return scale * (x.to(dtype) @ a.to(dtype).t())
