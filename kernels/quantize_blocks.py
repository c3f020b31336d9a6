"""Quantise a weight: each 128 x 128 block shares one fp32 scale.

    scale = max(amax over the block, 1e-12) / 448     fp32, correctly rounded division
    code  = e4m3(value / scale)                       round to nearest even, saturating

Rounding points: the scale, the quotient, the code; nothing is summed. A masked lane reads 0, which never is the maximum of a
block. Blocks at the edge may be ragged (576 rows are 5 blocks). An all-zero block has zeros and a finite scale. inf and NaN are
the caller's to refuse: looking for them here would cost a synchronisation. Bit-exact against :func:`reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import BLOCK, cdiv, launch, require, row_stride

__all__ = ["quantize_blocks", "reference"]

FLOOR = 1e-12
CONFIG = {"num_warps": 8, "num_stages": 1}


@triton.jit
def _kernel(w, codes, scales, rows, columns, w_stride, floor):
    row = tl.program_id(0) * 128 + tl.arange(0, 128)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    where = row[:, None].to(tl.int64)
    value = tl.load(w + where * w_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(value), 1), 0)
    scale = tl.math.div_rn(tl.maximum(largest, floor), 448.0)
    value = tl.math.div_rn(value, tl.broadcast_to(scale, (128, 128)))
    tl.store(codes + where * columns + column[None, :], value.to(tl.float8e4nv), mask=inside)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the 128 x 128 blocks of ``w``.

    Args:
        w: finite bf16 or fp32 ``[N, K]``; rows may be strided.

    Returns:
        float8_e4m3fn ``[N, K]`` codes and float32 ``[ceil(N/128), ceil(K/128)]`` scales.

    Raises:
        ValueError: another dtype, or a last axis that is not dense.
    """
    known = w.dtype in (torch.bfloat16, torch.float32) and w.dim() == 2
    require(known, f"w is {w.dtype} {tuple(w.shape)}; expected a bf16 or fp32 matrix")
    rows, columns = w.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=w.device)
    grid = (cdiv(rows, BLOCK), cdiv(columns, BLOCK))
    scales = torch.empty(grid, dtype=torch.float32, device=w.device)
    launch(_kernel, grid, w, codes, scales, rows, columns, row_stride(w, "w"), FLOOR, **CONFIG)
    return codes, scales


def reference(w: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`quantize_blocks` in torch operations."""
    rows, columns = w.shape
    n, k = cdiv(rows, BLOCK), cdiv(columns, BLOCK)
    wide = torch.nn.functional.pad(w.float(), (0, k * BLOCK - columns, 0, n * BLOCK - rows))
    wide = wide.view(n, BLOCK, k, BLOCK)
    scales = wide.abs().amax((1, 3)).clamp(min=FLOOR) / 448.0
    codes = (wide / scales[:, None, :, None]).clamp(-448.0, 448.0).view(n * BLOCK, -1)
    return codes[:rows, :columns].to(torch.float8_e4m3fn), scales
