"""Quantise activations: each 128 consecutive values of a row share one fp32 scale.

    scale = max(amax, floor) / 448            fp32, correctly rounded division
    code  = e4m3(value / scale)               or e4m3(value * (1 / scale)); round to nearest even, saturating

Both divisions exist in the field and differ by an ulp now and then, which moves a code: a :class:`Profile` names the floor and
the form. ``COLUMN`` is this package's own rule (``fp8/format.py``) and SGLang's for column-major scales, ``ROW`` SGLang's for
row-major scales, ``DEEPGEMM`` DeepGEMM's ``per_token_cast_to_fp8``.

Rounding points: the scale, the quotient, the code; nothing is summed. A masked lane reads 0, which never is the maximum of a
group. A NaN keeps its own code NaN. The last group of a row may be ragged. Bit-exact against :func:`reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import BLOCK, cdiv, launch, require, row_stride

__all__ = ["COLUMN", "DEEPGEMM", "ROW", "Profile", "quantize_rows", "reference"]

CONFIG = {"BM": 16, "num_warps": 4, "num_stages": 2}


@dataclass(frozen=True)
class Profile:
    """Smallest group maximum a scale is made from, and whether values are multiplied by the scale's reciprocal."""

    floor: float
    reciprocal: bool


COLUMN = Profile(1e-10, reciprocal=False)
ROW = Profile(1e-10, reciprocal=True)
DEEPGEMM = Profile(1e-4, reciprocal=True)


@triton.jit
def _kernel(
    x, codes, scales, rows, columns, x_stride, floor, RECIPROCAL: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    group = tl.program_id(1)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = group * 128 + tl.arange(0, 128)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    where = row[:, None].to(tl.int64)
    value = tl.load(x + where * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(value), 1), floor), 448.0)
    if RECIPROCAL:
        value = value * tl.math.div_rn(1.0, scale)[:, None]
    else:
        value = tl.math.div_rn(value, tl.broadcast_to(scale[:, None], (BM, 128)))
    tl.store(codes + where * columns + column[None, :], value.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row.to(tl.int64) * tl.num_programs(1) + group, scale, mask=row < rows)


def quantize_rows(x: Tensor, profile: Profile = COLUMN) -> tuple[Tensor, Tensor]:
    """Quantise the 1 x 128 groups of ``x``.

    Args:
        x: bf16 or fp32 ``[M, K]``; rows may be strided.
        profile: floor and form of the division.

    Returns:
        float8_e4m3fn ``[M, K]`` codes and float32 ``[M, ceil(K/128)]`` scales.

    Raises:
        ValueError: another dtype, or a last axis that is not dense.
    """
    known = x.dtype in (torch.bfloat16, torch.float32) and x.dim() == 2
    require(known, f"x is {x.dtype} {tuple(x.shape)}; expected a bf16 or fp32 matrix")
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, cdiv(columns, BLOCK), dtype=torch.float32, device=x.device)
    grid = (cdiv(rows, CONFIG["BM"]), scales.shape[1])
    launch(
        _kernel, grid, x, codes, scales, rows, columns, row_stride(x, "x"), profile.floor,
        RECIPROCAL=profile.reciprocal, **CONFIG,
    )  # fmt: skip
    return codes, scales


def reference(x: Tensor, profile: Profile = COLUMN) -> tuple[Tensor, Tensor]:
    """:func:`quantize_rows` in torch operations."""
    rows, columns = x.shape
    groups = cdiv(columns, BLOCK)
    wide = torch.nn.functional.pad(x.float(), (0, groups * BLOCK - columns))
    wide = wide.view(rows, groups, BLOCK)
    scales = wide.abs().amax(-1).clamp(min=profile.floor) / 448.0
    wide = wide * (1.0 / scales)[..., None] if profile.reciprocal else wide / scales[..., None]
    codes = wide.clamp(-448.0, 448.0).view(rows, -1)[:, :columns]
    return codes.to(torch.float8_e4m3fn), scales
