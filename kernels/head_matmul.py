"""The absorbed form of ``kv_b_proj``: each head's activations with that head's own rows of one frozen block-FP8 weight.

    contract="rows":   out[t, h, k] = sum_p x[t, h, p] W[h R + first + p, k]       queries into latents; backward of the other
    contract="cols":   out[t, h, p] = sum_k x[t, h, k] W[h R + first + p, k]       latents into values; backward of the other

A head has R rows of the weight, of which ``first .. first + P`` take part (the K half or the V half).

A head need not begin on a block (GLM-5.2: R = 448, three and a half blocks), only on a step of 64, so a scale belongs to a
step of the sum (``rows``) or to a column of the output and a step (``cols``). Codes become bf16 in registers, which is exact;
the fp32 dot of a step is multiplied by its scale in fp32 and added to the fp32 total, in order. Rounding: one, at the end.
Masked lanes read 0 and add nothing. Tiles do not depend on T.
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
    require,
    row_stride,
)
from megatron_xorl.kernels.linear import dequantized

__all__ = ["CONTRACTS", "STEP", "fits", "head_matmul", "reference"]

CONTRACTS = ("rows", "cols")
STEP = 64
"""Rows between places where a head's part may begin: a step of the sum lies in one block."""

CONFIG = {"BM": 128, "BC": 128, "BR": STEP, "num_warps": 8, "num_stages": 4}


@triton.jit
def _kernel(
    x, w, sw, out, tokens, columns, depth, height, first,
    x_token, x_head, w_stride, sw_stride, out_token, out_head,
    ROWS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    token_ok, column_ok = token < tokens, column < columns
    head = tl.program_id(2).to(tl.int64)
    begin = head * height + first
    inner = tl.arange(0, BR)
    x_at = x + head * x_head + token[:, None].to(tl.int64) * x_token + inner[None, :]
    if ROWS:
        w_at = w + (begin + inner[:, None]) * w_stride + column[None, :]
    else:
        w_at = w + (begin + column[None, :]) * w_stride + inner[:, None]
    acc = tl.zeros((BM, BC), tl.float32)
    for step in range(0, tl.cdiv(depth, BR)):
        if EVEN:
            a = tl.load(x_at, mask=token_ok[:, None], other=0.0)
            b = tl.load(w_at, mask=column_ok[None, :], other=0.0)
        else:
            inside = inner < depth - step * BR
            a = tl.load(x_at, mask=token_ok[:, None] & inside[None, :], other=0.0)
            b = tl.load(w_at, mask=column_ok[None, :] & inside[:, None], other=0.0)
        product = tl.dot(a, b.to(tl.bfloat16))
        if ROWS:
            acc += product * tl.load(
                sw + (begin + step * BR) // 128 * sw_stride + tl.program_id(1) * BC // 128
            )
            w_at += BR * w_stride
        else:
            scale = tl.load(
                sw + (begin + column) // 128 * sw_stride + step * BR // 128,
                mask=column_ok,
                other=0.0,
            )
            acc += product * scale[None, :]
            w_at += BR
        x_at += BR
    out_at = out + head * out_head + token[:, None].to(tl.int64) * out_token + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=token_ok[:, None] & column_ok[None, :])


def fits(height: int, first: int) -> bool:
    """Whether heads of ``height`` rows, of which the part begins at ``first``, begin where the kernel can read them."""
    return height % STEP == 0 and first % STEP == 0


def head_matmul(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    rows: slice,
    contract: str,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Each head of ``x`` times its rows of the weight.

    Args:
        x: bf16 ``[T, H, D]``, D = number of ``rows`` (``contract="rows"``) or K (``"cols"``); tokens and heads may be strided.
        weight: e4m3 ``[H * R, K]`` (or uint8).
        weight_scales: float32 ``[ceil(H * R / 128), ceil(K / 128)]``.
        rows: which of a head's R rows take part.
        contract: ``"rows"`` gives ``[T, H, K]``, ``"cols"`` gives ``[T, H, rows]``.
        out: to write to, bf16 or fp32; its last axis is dense.
        dtype: of a new output.

    Raises:
        ValueError: shapes, dtypes, or a head that does not begin on a step of 64 rows.
    """
    weight, weight_scales = check_weight(weight, weight_scales)
    check_bf16(x=x)
    require(
        contract in CONTRACTS, f"contract is {contract!r}; expected one of {', '.join(CONTRACTS)}"
    )
    tokens, heads, depth = x.shape
    height, part = weight.shape[0] // max(1, heads), rows.stop - rows.start
    known = (
        heads > 0 and weight.shape[0] == heads * height and 0 <= rows.start < rows.stop <= height
    )
    require(
        known,
        f"rows {rows.start}..{rows.stop} of {heads} heads do not fit weight {tuple(weight.shape)}",
    )
    require(
        fits(height, rows.start),
        f"heads of {height} rows with a part from row {rows.start} on: both must be multiples of {STEP}; "
        "use the reference backend for others",
    )
    expected, columns = (part, weight.shape[1]) if contract == "rows" else (weight.shape[1], part)
    require(
        depth == expected,
        f"x {tuple(x.shape)} has depth {depth}; contract {contract} needs {expected}",
    )
    if out is None:
        out = torch.empty((tokens, heads, columns), dtype=dtype, device=x.device)
    known = out.dtype in (torch.bfloat16, torch.float32) and tuple(out.shape) == (
        tokens,
        heads,
        columns,
    )
    require(
        known,
        f"out is {out.dtype} {tuple(out.shape)}; expected bf16 or fp32 {(tokens, heads, columns)}",
    )
    x_head, out_head = row_stride(x, "x"), row_stride(out, "out")
    launch(
        _kernel, (cdiv(tokens, CONFIG["BM"]), cdiv(columns, CONFIG["BC"]), heads),
        x, weight, weight_scales, out, tokens, columns, depth, height, rows.start,
        x.stride(0), x_head, row_stride(weight, "weight"), row_stride(weight_scales, "weight_scales"),
        out.stride(0), out_head, ROWS=contract == "rows", EVEN=depth % STEP == 0, **CONFIG,
    )  # fmt: skip
    return out


def reference(
    x: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    rows: slice,
    contract: str,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """:func:`head_matmul` without a rounding, in torch operations."""
    wide = dequantized(weight, weight_scales, BLOCK, dtype)
    own = wide.view(x.shape[1], -1, wide.shape[-1])[:, rows]
    own = own if contract == "rows" else own.mT
    return (x.to(dtype).transpose(0, 1) @ own).transpose(0, 1)
