"""bf16 products with a bank of frozen block-FP8 weights, one launch: dX of the experts, and their forward without quantisation.

    dX[m] = dY[m] W[e(m)] + u[m] A[e(m)]       formula, sums and rounding points of :mod:`megatron_xorl.kernels.linear_dx`
    y[m]  = x[m] W[e(m)]^T + t[m] B[e(m)]^T

Rows are sorted by expert; a program takes one 128-row tile of one expert (:mod:`megatron_xorl.kernels.groups`) and runs the same
tile code as the single linear: grouped equals per-expert calls bit for bit. The low-rank factor is per expert or, with a leading
axis of 1, one for all. Empty experts and idle tiles do nothing; a masked lane is one beyond its expert's last row.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.grouped_linear import per_expert
from megatron_xorl.kernels.groups import check_offsets, tile_map
from megatron_xorl.kernels.launch import cdiv, check_weight, launch, padded, row_stride
from megatron_xorl.kernels.linear import add_low_rank
from megatron_xorl.kernels.linear_dx import (
    bf16_tile,
    check_call,
    reference_dx,
    reference_w8a16,
)

__all__ = ["grouped_fp8_dx", "grouped_fp8_w8a16", "reference"]

CONFIG = {"BM": 128, "BC": 128, "BR": 64, "num_warps": 8, "num_stages": 4}


@triton.jit
def _kernel(
    x, w, sw, left, right, out, tile_expert, tile_row, offsets, columns, depth,
    x_stride, w_stride, w_expert, sw_stride, sw_expert, left_stride, right_stride, right_expert,
    out_stride, rank,
    FORWARD: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr, SEPARATE: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        row = tl.load(tile_row + tl.program_id(0)) + tl.arange(0, BM)
        column = tl.program_id(1) * BC + tl.arange(0, BC)
        row_ok, column_ok = row < tl.load(offsets + expert + 1), column < columns
        block = tl.program_id(1) * BC // 128
        sw += expert * sw_expert
        if FORWARD:
            sw += block * sw_stride
            step_stride = 1
        else:
            sw += block
            step_stride = sw_stride
        acc = bf16_tile(
            x, w + expert * w_expert, sw, row, row_ok, column, column_ok,
            x_stride, w_stride, step_stride, depth, FORWARD, EVEN, BM, BC, BR,
        )  # fmt: skip
        if RANK > 0:
            acc = add_low_rank(
                acc, left, right + expert * right_expert, row, row_ok, column, column_ok,
                left_stride, right_stride, rank, RANK, not FORWARD, SEPARATE, out.dtype.element_ty,
            )  # fmt: skip
        out_at = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


def grouped_fp8_dx(
    dy: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    offsets: Tensor,
    *,
    u: Tensor | None = None,
    a: Tensor | None = None,
    order: str = "fused",
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``dX_e = dY_e W_e (+ u_e A_e)``.

    Args:
        dy: bf16 ``[M, N]``, rows sorted by expert.
        weight: e4m3 ``[E, N, K]``.
        weight_scales: float32 ``[E, ceil(N/128), ceil(K/128)]``.
        offsets: int32 ``[E + 1]`` on the device, expert e has rows ``offsets[e] .. offsets[e + 1]``.
        u: bf16 ``[M, R]``, scaled; with ``a`` bf16 ``[E or 1, R, K]``.
        order: as in :func:`megatron_xorl.kernels.linear_dx.fp8_linear_dx`.
        out: ``[M, K]`` to write to, bf16 or fp32.
        dtype: of a new output.

    Raises:
        ValueError: shapes, dtypes or scales that do not fit.
    """
    return _product(dy, weight, weight_scales, offsets, u, a, order, out, dtype, forward=False)


def grouped_fp8_w8a16(
    x: Tensor,
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
    """``y_e = x_e W_e^T (+ t_e B_e^T)`` ; x bf16 ``[M, K]``, b bf16 ``[E or 1, N, R]``, else as :func:`grouped_fp8_dx`."""
    return _product(x, weight, weight_scales, offsets, t, b, order, out, dtype, forward=True)


def _product(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    offsets: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    order: str,
    out: Tensor | None,
    dtype: torch.dtype,
    *,
    forward: bool,
) -> Tensor:
    weight, weight_scales = check_weight(weight, weight_scales)
    experts = weight.shape[0]
    check_offsets(offsets, experts)
    out, (left_, right_) = check_call(x, weight, left, right, order, out, dtype, forward)
    depth, columns = x.shape[1], out.shape[1]
    config = {
        "FORWARD": forward,
        "EVEN": depth % CONFIG["BR"] == 0,
        "RANK": padded(left.shape[1]) if left is not None else 0,
        "SEPARATE": order == "separate",
    }
    tiles = tile_map(offsets, x.shape[0], CONFIG["BM"])
    grid = (tiles[0].numel(), cdiv(columns, CONFIG["BC"]))
    launch(
        _kernel, grid, x, weight, weight_scales, left_, right_, out, *tiles, offsets, columns, depth,
        row_stride(x, "activations"), row_stride(weight, "weight"), weight.stride(0),
        row_stride(weight_scales, "weight_scales"), weight_scales.stride(0),
        row_stride(left_, "left factor"), row_stride(right_, "right factor"),
        per_expert(right, experts, "right factor"), row_stride(out, "out"), left_.shape[-1],
        **config, **CONFIG,
    )  # fmt: skip
    return out


def reference(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    offsets: Tensor,
    *,
    left: Tensor | None = None,
    right: Tensor | None = None,
    forward: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Both products without a rounding, expert by expert; ``left`` and ``right`` are ``u, a`` or, if ``forward``, ``t, b``."""
    names = ("t", "b") if forward else ("u", "a")
    product = reference_w8a16 if forward else reference_dx
    columns = weight.shape[1] if forward else weight.shape[2]
    out = torch.empty(x.shape[0], columns, dtype=dtype, device=x.device)
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        rows = slice(start, end)
        own = {}
        if left is not None and right is not None:
            own = dict(zip(names, (left[rows], right[expert % right.shape[0]]), strict=True))
        out[rows] = product(x[rows], weight[expert], weight_scales[expert], **own, dtype=dtype)
    return out
