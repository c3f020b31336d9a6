"""Forward of a frozen block-FP8 linear on quantised activations (w8a8), with LoRA's second half in its epilogue.

    y[m, n] = sum_b ( sum_{k in block b} q[m, k] W[n, k] ) * sx[m, b] * sw[n // 128, b]   +   sum_r t[m, r] B[n, r]

``q`` and ``W`` are e4m3 codes, multiplied as they are by the fp8 instruction; ``t = alpha / R * x A^T`` comes scaled, in bf16.

Accumulation: one dot per 128 columns into a fresh fp32 accumulator, times ``sx * sw`` in fp32, added to the fp32 total in the
order of the blocks (Hopper's fp8 instruction sums with less than fp32 precision: it is never left to sum across blocks).
Rounding: ``order="fused"`` adds ``t B^T`` to the fp32 total and rounds once; ``"separate"`` rounds the base first, as a layer
does that adds its adapter afterwards. Masked lanes (ragged M, N, K) read 0 and add nothing; columns beyond N are not stored.

A tile is 128 x 128 whatever M is and K is never split: a row's result does not depend on the rows beside it. Rows of ``q``,
``W``, ``t``, ``B`` and ``y`` may be strided, so a slice of a weight (tensor parallelism, gate or up of a fused base) needs no
copy as long as it starts on a block.
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
    e4m3,
    launch,
    padded,
    require,
    row_stride,
)

__all__ = ["ORDERS", "add_low_rank", "fp8_linear", "linear_tile", "reference"]

ORDERS = ("fused", "separate")
CONFIG = {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 4}
GROUP = 8


@triton.jit
def linear_tile(
    q, sx, w, sw, row, row_ok, column, column_ok, q_stride, sx_stride, w_stride, depth,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """fp32 ``[BM, BN]`` of the base product; ``sw`` points at the scales of this tile's one block row."""
    inner = tl.arange(0, 128)
    q_at = q + row[:, None].to(tl.int64) * q_stride + inner[None, :]
    w_at = w + column[None, :].to(tl.int64) * w_stride + inner[:, None]
    sx_at = sx + row.to(tl.int64) * sx_stride
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(0, tl.cdiv(depth, 128)):
        if EVEN:
            a = tl.load(q_at, mask=row_ok[:, None], other=0.0)
            b = tl.load(w_at, mask=column_ok[None, :], other=0.0)
        else:
            inside = inner < depth - block * 128
            a = tl.load(q_at, mask=row_ok[:, None] & inside[None, :], other=0.0)
            b = tl.load(w_at, mask=column_ok[None, :] & inside[:, None], other=0.0)
        scale = tl.load(sx_at + block, mask=row_ok, other=0.0) * tl.load(sw + block)
        acc += tl.dot(a, b) * scale[:, None]
        q_at += 128
        w_at += 128
    return acc


@triton.jit
def add_low_rank(
    acc, left, right, row, row_ok, column, column_ok, left_stride, right_stride, rank,
    RANK: tl.constexpr, TRANSPOSED: tl.constexpr, SEPARATE: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """``acc + left[row] right^T``, right ``[columns, rank]``; ``TRANSPOSED``: ``acc + left[row] right``, ``[rank, columns]``."""
    r = tl.arange(0, RANK)
    r_ok = r < rank
    left_at = left + row[:, None].to(tl.int64) * left_stride + r[None, :]
    a = tl.load(left_at, mask=row_ok[:, None] & r_ok[None, :], other=0.0)
    if TRANSPOSED:
        right_at = right + r[:, None].to(tl.int64) * right_stride + column[None, :]
    else:
        right_at = right + column[None, :].to(tl.int64) * right_stride + r[:, None]
    b = tl.load(right_at, mask=column_ok[None, :] & r_ok[:, None], other=0.0)
    if SEPARATE:
        return acc.to(OUT).to(tl.float32) + tl.dot(a, b)
    return tl.dot(a, b, acc)


@triton.jit
def _kernel(
    q, sx, w, sw, t, lora_b, y, rows, columns, depth,
    q_stride, sx_stride, w_stride, sw_stride, t_stride, b_stride, y_stride, rank,
    EVEN: tl.constexpr, RANK: tl.constexpr, SEPARATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs walk the output in bands of GROUP row tiles, so that a band's weights are read from L2.
    row_tiles = tl.cdiv(rows, BM)
    band = GROUP * tl.cdiv(columns, BN)
    first = tl.program_id(0) // band * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + tl.program_id(0) % band % height
    column_tile = tl.program_id(0) % band // height

    row = row_tile * BM + tl.arange(0, BM)
    column = column_tile * BN + tl.arange(0, BN)
    row_ok, column_ok = row < rows, column < columns
    sw += (column_tile * BN // 128).to(tl.int64) * sw_stride
    acc = linear_tile(
        q, sx, w, sw, row, row_ok, column, column_ok, q_stride, sx_stride, w_stride, depth, EVEN, BM, BN
    )  # fmt: skip
    if RANK > 0:
        acc = add_low_rank(
            acc, t, lora_b, row, row_ok, column, column_ok, t_stride, b_stride, rank,
            RANK, False, SEPARATE, y.dtype.element_ty,
        )  # fmt: skip
    y_at = y + row[:, None].to(tl.int64) * y_stride + column[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


def fp8_linear(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    t: Tensor | None = None,
    b: Tensor | None = None,
    order: str = "fused",
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``y = x W^T (+ t B^T)`` on the activations' codes.

    Args:
        codes: e4m3 ``[M, K]`` (or uint8).
        scales: float32 ``[M, ceil(K/128)]``.
        weight: e4m3 ``[N, K]`` (or uint8).
        weight_scales: float32 ``[ceil(N/128), ceil(K/128)]``.
        t: bf16 ``[M, R]``, scaled; with ``b`` bf16 ``[N, R]``.
        order: ``"fused"``, one rounding; ``"separate"``, the base is rounded before ``t B^T`` is added.
        out: ``[M, N]`` to write to, bf16 or fp32; its last axis is dense.
        dtype: of a new output.

    Raises:
        ValueError: shapes, dtypes or scales that do not fit.
    """
    rows, depth = codes.shape
    weight, weight_scales = check_weight(weight, weight_scales)
    columns = weight.shape[0]
    out, factors = check_call(codes, scales, weight, columns, t, b, order, out, dtype)
    config = {
        "EVEN": depth % BLOCK == 0,
        "RANK": padded(t.shape[1]) if t is not None else 0,
        "SEPARATE": order == "separate",
    }
    grid = (cdiv(rows, CONFIG["BM"]) * cdiv(columns, CONFIG["BN"]),)
    launch(
        _kernel, grid, e4m3(codes, "codes"), scales, weight, weight_scales, *factors, out,
        rows, columns, depth, row_stride(codes, "codes"), row_stride(scales, "scales"),
        row_stride(weight, "weight"), row_stride(weight_scales, "weight_scales"),
        row_stride(factors[0], "t"), row_stride(factors[1], "b"), row_stride(out, "out"),
        factors[0].shape[-1], **config, **CONFIG, GROUP=GROUP,
    )  # fmt: skip
    return out


def check_call(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    columns: int,
    t: Tensor | None,
    b: Tensor | None,
    order: str,
    out: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Check a forward, make the output; without factors the output stands in for their pointers, which are not read.

    Raises:
        ValueError: shapes, dtypes or scales that do not fit.
    """
    rows, depth = codes.shape
    grid = (rows, cdiv(depth, BLOCK))
    require(
        tuple(scales.shape) == grid and scales.dtype == torch.float32,
        f"scales are {scales.dtype} {tuple(scales.shape)}; codes {tuple(codes.shape)} need float32 {grid}",
    )
    require(
        weight.shape[-1] == depth,
        f"weight {tuple(weight.shape)} does not multiply codes {tuple(codes.shape)}",
    )
    require(order in ORDERS, f"order is {order!r}; expected one of {', '.join(ORDERS)}")
    require((t is None) == (b is None), "t and b come together")
    check_bf16(t=t, b=b)
    if t is not None and b is not None:
        fits = tuple(t.shape) == (rows, b.shape[-1]) and b.shape[-2] == columns
        require(fits, f"t {tuple(t.shape)} and b {tuple(b.shape)} do not fit y {(rows, columns)}")
    out = output(out, (rows, columns), dtype, codes.device)
    return out, (out, out) if t is None or b is None else (t, b)


def output(
    out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The caller's output, checked, or a new one.

    Raises:
        ValueError: another shape, or neither bf16 nor fp32.
    """
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    known = out.dtype in (torch.bfloat16, torch.float32) and tuple(out.shape) == shape
    require(known, f"out is {out.dtype} {tuple(out.shape)}; expected bf16 or fp32 {shape}")
    return out


def dequantized(codes: Tensor, scales: Tensor, block_rows: int, dtype: torch.dtype) -> Tensor:
    """``code * scale`` in ``dtype``, blocks of ``block_rows`` x 128 over the last two axes; the references use it."""
    wide = scales.to(dtype).repeat_interleave(block_rows, -2).repeat_interleave(BLOCK, -1)
    return e4m3(codes, "codes").to(dtype) * wide[..., : codes.shape[-2], : codes.shape[-1]]


def reference(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    t: Tensor | None = None,
    b: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """:func:`fp8_linear` without a rounding, in torch operations."""
    y = dequantized(codes, scales, 1, dtype) @ dequantized(weight, weight_scales, BLOCK, dtype).mT
    return y if t is None or b is None else y + t.to(dtype) @ b.to(dtype).mT
