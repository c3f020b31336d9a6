"""Forward of a bank of frozen block-FP8 linears (w8a8): each expert's rows with that expert's weight, one launch.

    y[m] = x[m] W[e(m)]^T + t[m] B[e(m)]^T            formula, sums and rounding points of :mod:`megatron_xorl.kernels.linear`

Rows are sorted by expert. A program takes one 128-row tile of one expert (:mod:`megatron_xorl.kernels.groups`) and one 128-column
tile of the output, and runs the same tile code as the single linear: grouped equals per-expert calls bit for bit. B is per expert
or, with a leading axis of 1, one for all (its expert stride is 0). Empty experts and idle tiles do nothing; a masked lane is one
beyond its expert's last row.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.groups import check_offsets, tile_map
from megatron_xorl.kernels.launch import (
    BLOCK,
    cdiv,
    check_weight,
    e4m3,
    launch,
    padded,
    require,
    row_stride,
)
from megatron_xorl.kernels.linear import add_low_rank, check_call, linear_tile
from megatron_xorl.kernels.linear import reference as linear_reference

__all__ = ["grouped_fp8_linear", "per_expert", "reference"]

CONFIG = {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 4}


@triton.jit
def _kernel(
    q, sx, w, sw, t, lora_b, y, tile_expert, tile_row, offsets, columns, depth,
    q_stride, sx_stride, w_stride, w_expert, sw_stride, sw_expert, t_stride, b_stride, b_expert,
    y_stride, rank,
    EVEN: tl.constexpr, RANK: tl.constexpr, SEPARATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        row = tl.load(tile_row + tl.program_id(0)) + tl.arange(0, BM)
        column = tl.program_id(1) * BN + tl.arange(0, BN)
        row_ok, column_ok = row < tl.load(offsets + expert + 1), column < columns
        sw += expert * sw_expert + tl.program_id(1) * BN // 128 * sw_stride
        acc = linear_tile(
            q, sx, w + expert * w_expert, sw, row, row_ok, column, column_ok,
            q_stride, sx_stride, w_stride, depth, EVEN, BM, BN,
        )  # fmt: skip
        if RANK > 0:
            acc = add_low_rank(
                acc, t, lora_b + expert * b_expert, row, row_ok, column, column_ok,
                t_stride, b_stride, rank, RANK, False, SEPARATE, y.dtype.element_ty,
            )  # fmt: skip
        y_at = y + row[:, None].to(tl.int64) * y_stride + column[None, :]
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


def grouped_fp8_linear(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    offsets: Tensor,
    *,
    t: Tensor | None = None,
    b: Tensor | None = None,
    order: str = "fused",
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``y_e = x_e W_e^T (+ t_e B_e^T)``.

    Args:
        codes: e4m3 ``[M, K]``, rows sorted by expert.
        scales: float32 ``[M, ceil(K/128)]``.
        weight: e4m3 ``[E, N, K]``.
        weight_scales: float32 ``[E, ceil(N/128), ceil(K/128)]``.
        offsets: int32 ``[E + 1]`` on the device, expert e has rows ``offsets[e] .. offsets[e + 1]``.
        t: bf16 ``[M, R]``, scaled; with ``b`` bf16 ``[E or 1, N, R]``.
        order: as in :func:`megatron_xorl.kernels.linear.fp8_linear`.
        out: ``[M, N]`` to write to, bf16 or fp32.
        dtype: of a new output.

    Raises:
        ValueError: shapes, dtypes or scales that do not fit.
    """
    weight, weight_scales = check_weight(weight, weight_scales)
    experts, columns, depth = weight.shape
    check_offsets(offsets, experts)
    out, (t_, b_) = check_call(codes, scales, weight, columns, t, b, order, out, dtype)
    config = {
        "EVEN": depth % BLOCK == 0,
        "RANK": padded(t.shape[1]) if t is not None else 0,
        "SEPARATE": order == "separate",
    }
    tiles = tile_map(offsets, codes.shape[0], CONFIG["BM"])
    grid = (tiles[0].numel(), cdiv(columns, CONFIG["BN"]))
    launch(
        _kernel, grid, e4m3(codes, "codes"), scales, weight, weight_scales, t_, b_, out, *tiles, offsets,
        columns, depth, row_stride(codes, "codes"), row_stride(scales, "scales"),
        row_stride(weight, "weight"), weight.stride(0),
        row_stride(weight_scales, "weight_scales"), weight_scales.stride(0),
        row_stride(t_, "t"), row_stride(b_, "b"), per_expert(b, experts, "b"),
        row_stride(out, "out"), t_.shape[-1], **config, **CONFIG,
    )  # fmt: skip
    return out


def per_expert(factor: Tensor | None, experts: int, name: str) -> int:
    """Elements between the experts of a factor ``[E or 1, ., .]``, 0 where one serves all.

    Raises:
        ValueError: no expert axis, or another length.
    """
    if factor is None:
        return 0
    fits = factor.dim() == 3 and factor.shape[0] in (1, experts)
    require(fits, f"{name} is {tuple(factor.shape)}; expected a leading axis of {experts} or 1")
    return factor.stride(0) if factor.shape[0] > 1 else 0


def reference(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    offsets: Tensor,
    *,
    t: Tensor | None = None,
    b: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """:func:`grouped_fp8_linear` without a rounding, expert by expert."""
    out = torch.empty(codes.shape[0], weight.shape[1], dtype=dtype, device=codes.device)
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        rows = slice(start, end)
        own = {} if t is None or b is None else {"t": t[rows], "b": b[expert % b.shape[0]]}
        out[rows] = linear_reference(
            codes[rows], scales[rows], weight[expert], weight_scales[expert], **own, dtype=dtype
        )
    return out
