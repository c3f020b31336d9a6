"""Gradients of LoRA factors: products over the rows of activations, of a batch or of each expert.

    dA[r, k] = sum_m u[m, r] x[m, k]          dB[n, r] = sum_m dY[m, n] t[m, r]

Both are ``large^T small`` with one wide axis (K or N) and one of rank R; the wide one is the long side of the matrix
instruction. The result is written as ``[R, wide]`` or ``[wide, R]``. Grouped: one result per expert over that expert's rows,
zeros for none.

Accumulation: fp32 over steps of 64 rows, in order, one program for a tile of the result: no atomics, the same bits every time,
and a group equals a call of its own. Rounding: the sum, once (fp32 outputs are not rounded). Masked lanes (rows beyond the
group, ragged widths) read 0 and add nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.groups import check_offsets
from megatron_xorl.kernels.launch import cdiv, check_bf16, launch, padded, require, row_stride

__all__ = ["grouped_lora_gradient", "lora_gradient", "reference"]

CONFIG = {"BW": 128, "BM": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def _kernel(
    large, small, out, offsets, rows, width, rank, large_stride, small_stride,
    out_expert, out_width, out_rank,
    GROUPED: tl.constexpr, RANK: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BW + tl.arange(0, BW)
    r, m = tl.arange(0, RANK), tl.arange(0, BM)
    column_ok, r_ok = column < width, r < rank
    start, end = 0, rows
    if GROUPED:
        start = tl.load(offsets + tl.program_id(1))
        end = tl.load(offsets + tl.program_id(1) + 1)
        out += tl.program_id(1).to(tl.int64) * out_expert
    acc = tl.zeros((BW, RANK), tl.float32)
    for first in range(start, end, BM):
        row = (first + m).to(tl.int64)
        row_ok = row < end
        a_at = large + row[None, :] * large_stride + column[:, None]
        b_at = small + row[:, None] * small_stride + r[None, :]
        a = tl.load(a_at, mask=row_ok[None, :] & column_ok[:, None], other=0.0)
        b = tl.load(b_at, mask=row_ok[:, None] & r_ok[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
    out_at = out + column[:, None].to(tl.int64) * out_width + r[None, :].to(tl.int64) * out_rank
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=column_ok[:, None] & r_ok[None, :])


def lora_gradient(
    large: Tensor,
    small: Tensor,
    *,
    rank_first: bool,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``small^T large`` ``[R, W]`` if ``rank_first`` (dA of u and x), else ``large^T small`` ``[W, R]`` (dB of dY and t).

    Args:
        large: bf16 ``[M, W]``; rows may be strided, M may be 0.
        small: bf16 ``[M, R]``.
        rank_first: order of the result's axes.
        out: fp32 or bf16 to write to, any strides.
        dtype: of a new output.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return _gradient(large, small, None, rank_first, out, dtype)


def grouped_lora_gradient(
    large: Tensor,
    small: Tensor,
    offsets: Tensor,
    *,
    rank_first: bool,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`lora_gradient` per expert, ``[E, R, W]`` or ``[E, W, R]``; offsets int32 ``[E + 1]`` on the device."""
    check_offsets(offsets, offsets.numel() - 1)
    return _gradient(large, small, offsets, rank_first, out, dtype)


def _gradient(
    large: Tensor,
    small: Tensor,
    offsets: Tensor | None,
    rank_first: bool,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    check_bf16(large=large, small=small)
    (rows, width), rank = large.shape, small.shape[1]
    require(
        small.shape[0] == rows,
        f"activations {tuple(large.shape)} and {tuple(small.shape)} have different rows",
    )
    experts = offsets.numel() - 1 if offsets is not None else 1
    shape = (experts, *((rank, width) if rank_first else (width, rank)))
    shape = shape if offsets is not None else shape[1:]
    out = out if out is not None else torch.empty(shape, dtype=dtype, device=large.device)
    known = out.dtype in (torch.float32, torch.bfloat16) and tuple(out.shape) == shape
    require(known, f"out is {out.dtype} {tuple(out.shape)}; expected fp32 or bf16 {shape}")
    by_width = out.mT if rank_first else out
    launch(
        _kernel, (cdiv(width, CONFIG["BW"]), experts), large, small, out,
        offsets if offsets is not None else out, rows, width, rank,
        row_stride(large, "large"), row_stride(small, "small"),
        out.stride(0) if offsets is not None else 0, by_width.stride(-2), by_width.stride(-1),
        GROUPED=offsets is not None, RANK=padded(rank), **CONFIG,
    )  # fmt: skip
    return out


def reference(
    large: Tensor, small: Tensor, *, rank_first: bool, dtype: torch.dtype = torch.float64
) -> Tensor:
    """:func:`lora_gradient` without a rounding."""
    a, b = large.to(dtype), small.to(dtype)
    return b.t() @ a if rank_first else a.t() @ b
