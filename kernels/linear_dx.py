"""Products of bf16 activations with a frozen block-FP8 weight: dX of a linear, and its forward without quantisation (w8a16).

    dX[m, k] = sum_b ( sum_{n in step b} dY[m, n] W[n, k] ) * sw[n // 128, k // 128]   +   sum_r u[m, r] A[r, k]
    y[m, n]  = sum_b ( sum_{k in step b} x[m, k] W[n, k] ) * sw[n // 128, k // 128]    +   sum_r t[m, r] B[n, r]

The second is the first with the roles of the weight's axes exchanged; one kernel does both. Codes become bf16 in registers,
which is exact (e4m3 has 4 significant bits): no bf16 copy of the weight is ever in memory, the products are those of the codes.

Accumulation: a step is 64 along the summed axis and lies in one block, its fp32 dot is multiplied by the block's scale in fp32
and added to the fp32 total, in order. Rounding: one, at the end, after the low-rank product (``order="separate"``: the base
before it as well). Masked lanes read 0 and add nothing; columns beyond the end are not stored. Tiles do not depend on M. On
Hopper the fp8 instruction wants both operands dense along the summed axis, which W is not for dX: bf16 is the fast form there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import (
    BLOCK,
    cdiv,
    check_bf16,
    check_weight,
    launch,
    padded,
    require,
    row_stride,
)
from megatron_xorl.kernels.linear import ORDERS, add_low_rank, dequantized, output

__all__ = [
    "bf16_tile",
    "fp8_linear_dx",
    "fp8_linear_w8a16",
    "reference_dx",
    "reference_w8a16",
]

CONFIG = {"BM": 128, "BC": 128, "BR": 64, "num_warps": 8, "num_stages": 4}


@triton.jit
def bf16_tile(
    x, w, sw, row, row_ok, column, column_ok, x_stride, w_stride, sw_stride, depth,
    FORWARD: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """fp32 ``[BM, BC]`` of the base product; ``sw`` points at the first scale along the summed axis."""
    inner = tl.arange(0, BR)
    x_at = x + row[:, None].to(tl.int64) * x_stride + inner[None, :]
    if FORWARD:
        w_at = w + column[None, :].to(tl.int64) * w_stride + inner[:, None]
    else:
        w_at = w + inner[:, None].to(tl.int64) * w_stride + column[None, :]
    acc = tl.zeros((BM, BC), tl.float32)
    for step in range(0, tl.cdiv(depth, BR)):
        if EVEN:
            a = tl.load(x_at, mask=row_ok[:, None], other=0.0)
            b = tl.load(w_at, mask=column_ok[None, :], other=0.0)
        else:
            inside = inner < depth - step * BR
            a = tl.load(x_at, mask=row_ok[:, None] & inside[None, :], other=0.0)
            b = tl.load(w_at, mask=column_ok[None, :] & inside[:, None], other=0.0)
        scale = tl.load(sw + step * BR // 128 * sw_stride)
        acc += tl.dot(a, b.to(tl.bfloat16)) * scale
        x_at += BR
        if FORWARD:
            w_at += BR
        else:
            w_at += BR * w_stride
    return acc


@triton.jit
def _kernel(
    x, w, sw, left, right, out, rows, columns, depth,
    x_stride, w_stride, sw_stride, left_stride, right_stride, out_stride, rank,
    FORWARD: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr, SEPARATE: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    row_ok, column_ok = row < rows, column < columns
    block = tl.program_id(1) * BC // 128
    if FORWARD:
        sw += block * sw_stride
        step_stride = 1
    else:
        sw += block
        step_stride = sw_stride
    acc = bf16_tile(
        x, w, sw, row, row_ok, column, column_ok, x_stride, w_stride, step_stride, depth,
        FORWARD, EVEN, BM, BC, BR,
    )  # fmt: skip
    if RANK > 0:
        acc = add_low_rank(
            acc, left, right, row, row_ok, column, column_ok, left_stride, right_stride, rank,
            RANK, not FORWARD, SEPARATE, out.dtype.element_ty,
        )  # fmt: skip
    out_at = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


def fp8_linear_dx(
    dy: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    u: Tensor | None = None,
    a: Tensor | None = None,
    order: str = "fused",
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``dX = dY W (+ u A)``.

    Args:
        dy: bf16 ``[M, N]``.
        weight: e4m3 ``[N, K]`` (or uint8).
        weight_scales: float32 ``[ceil(N/128), ceil(K/128)]``.
        u: bf16 ``[M, R]``, scaled; with ``a`` bf16 ``[R, K]``.
        order: ``"fused"``, one rounding; ``"separate"``, the base is rounded before ``u A`` is added.
        out: ``[M, K]`` to write to, bf16 or fp32; its last axis is dense.
        dtype: of a new output.

    Raises:
        ValueError: shapes, dtypes or scales that do not fit.
    """
    return _product(dy, weight, weight_scales, u, a, order, out, dtype, forward=False)


def fp8_linear_w8a16(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    t: Tensor | None = None,
    b: Tensor | None = None,
    order: str = "fused",
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``y = x W^T (+ t B^T)`` with x bf16 ``[M, K]`` as it is and b bf16 ``[N, R]``; all else as :func:`fp8_linear_dx`."""
    return _product(x, weight, weight_scales, t, b, order, out, dtype, forward=True)


def _product(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    order: str,
    out: Tensor | None,
    dtype: torch.dtype,
    *,
    forward: bool,
) -> Tensor:
    weight, weight_scales = check_weight(weight, weight_scales)
    out, factors = check_call(x, weight, left, right, order, out, dtype, forward)
    (rows, depth), columns = x.shape, out.shape[1]
    config = {
        "FORWARD": forward,
        "EVEN": depth % CONFIG["BR"] == 0,
        "RANK": padded(left.shape[1]) if left is not None else 0,
        "SEPARATE": order == "separate",
    }
    grid = (cdiv(rows, CONFIG["BM"]), cdiv(columns, CONFIG["BC"]))
    launch(
        _kernel, grid, x, weight, weight_scales, *factors, out, rows, columns, depth,
        row_stride(x, "activations"), row_stride(weight, "weight"),
        row_stride(weight_scales, "weight_scales"), row_stride(factors[0], "left factor"),
        row_stride(factors[1], "right factor"), row_stride(out, "out"), factors[0].shape[-1],
        **config, **CONFIG,
    )  # fmt: skip
    return out


def check_call(
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    order: str,
    out: Tensor | None,
    dtype: torch.dtype,
    forward: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Check a product, make the output; without factors the output stands in for their pointers, which are not read.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_bf16(activations=x, left=left, right=right)
    columns, depth = weight.shape[-2:] if forward else (weight.shape[-1], weight.shape[-2])
    require(
        x.shape[1] == depth,
        f"activations {tuple(x.shape)} do not multiply weight {tuple(weight.shape)}",
    )
    require(order in ORDERS, f"order is {order!r}; expected one of {', '.join(ORDERS)}")
    require((left is None) == (right is None), "both low-rank factors come together")
    out = output(out, (x.shape[0], columns), dtype, x.device)
    if left is None or right is None:
        return out, (out, out)
    rank = left.shape[-1]
    shape = (columns, rank) if forward else (rank, columns)
    require(
        left.shape[0] == x.shape[0] and tuple(right.shape[-2:]) == shape,
        f"low-rank factors {tuple(left.shape)} and {tuple(right.shape)} do not fit {tuple(out.shape)}",
    )
    return out, (left, right)


def reference_dx(
    dy: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    u: Tensor | None = None,
    a: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """:func:`fp8_linear_dx` without a rounding, in torch operations."""
    dx = dy.to(dtype) @ dequantized(weight, weight_scales, BLOCK, dtype)
    return dx if u is None or a is None else dx + u.to(dtype) @ a.to(dtype)


def reference_w8a16(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    t: Tensor | None = None,
    b: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """:func:`fp8_linear_w8a16` without a rounding, in torch operations."""
    y = x.to(dtype) @ dequantized(weight, weight_scales, BLOCK, dtype).mT
    return y if t is None or b is None else y + t.to(dtype) @ b.to(dtype).mT
