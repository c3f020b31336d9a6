"""Products with a frozen weight, and their backward: dX only, always available, nothing saved.

Three shapes of the same product, each an autograd function whose backward reads the weight again instead of keeping a
dequantised copy alive:

* :func:`frozen_linear`: ``y = x W^T`` for one projection;
* :func:`frozen_grouped_linear`: ``y_e = x_e W_e^T`` for the tokens of each expert of a bank;
* :func:`frozen_head_matmul`: the absorbed form of ``kv_b_proj``, one small matrix a head, contracted over its rows (K half)
  or over its columns (V half).

Compute dtype is the activation's. fp32: fp32 product ``code x scale``, fp32 GEMM. bf16: ``code x scale`` rounded once to bf16,
then a bf16 GEMM. fp64 runs exactly and serves as the reference. There is no gradient for the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_xorl.fp8.weight import FrozenWeight

__all__ = ["FORWARD", "frozen_grouped_linear", "frozen_head_matmul", "frozen_linear"]

FORWARD = {"mode": "w8a16", "backend": "reference"}
"""How base products are computed; recorded in every checkpoint and adapter, a resume under another is refused."""


def frozen_linear(x: Tensor, weight: FrozenWeight) -> Tensor:
    """Return ``x W^T``: x ``[..., K]`` -> ``[..., N]``, dtype of ``x``."""
    return _FrozenLinear.apply(x, weight)


def frozen_grouped_linear(x: Tensor, weight: FrozenWeight, tokens_per_expert: list[int]) -> Tensor:
    """Return ``x_e W_e^T`` for consecutive groups of rows.

    Args:
        x: ``[T, K]``, the tokens of expert 0 first; ``T == sum(tokens_per_expert)``.
        weight: bank ``[E, N, K]``.
        tokens_per_expert: E counts, zero allowed.
    """
    return _FrozenGroupedLinear.apply(x, weight, tokens_per_expert)


def frozen_head_matmul(x: Tensor, weight: FrozenWeight, rows: slice, *, contract: str) -> Tensor:
    """Multiply each head's slice of ``x`` with that head's rows of the weight.

    Args:
        x: ``[T, H, D]``; the weight is ``[H * R, K]``, R rows a head.
        rows: which of a head's R rows take part (``0..nope`` for K, ``nope..nope+v`` for V).
        contract: ``"rows"``: D = number of rows, returns ``[T, H, K]``; ``"cols"``: D = K, returns ``[T, H, rows]``.
    """
    return _FrozenHeadMatmul.apply(x, weight, rows, contract)


def _matmul_t(x: Tensor, weight: FrozenWeight, expert: int | None, out: Tensor) -> None:
    """``out = x W^T`` by row tiles; each output column is written once, so no partial sum is ever rounded."""
    for rows in weight.row_tiles(x.dtype):
        tile = weight.tile(x.dtype, rows=rows, cols=slice(0, weight.shape[-1]), expert=expert)
        out[:, rows] = x @ tile.t()


def _matmul(dy: Tensor, weight: FrozenWeight, expert: int | None, out: Tensor) -> None:
    """``out = dY W`` by column tiles, for the same reason."""
    for cols in weight.col_tiles(dy.dtype):
        tile = weight.tile(dy.dtype, rows=slice(0, weight.shape[-2]), cols=cols, expert=expert)
        out[:, cols] = dy @ tile


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight) -> Tensor:
        ctx.weight = weight
        # Not a view: Megatron's cross-entropy works in place on the head's output, which autograd refuses for views.
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        _matmul_t(x.reshape(-1, x.shape[-1]), weight, None, out.view(-1, weight.shape[0]))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        weight: FrozenWeight = ctx.weight
        flat = dy.reshape(-1, dy.shape[-1])
        dx = dy.new_empty(flat.shape[0], weight.shape[1])
        _matmul(flat, weight, None, dx)
        return dx.view(*dy.shape[:-1], weight.shape[1]), None


class _FrozenGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, counts: list[int]) -> Tensor:
        ctx.weight, ctx.counts = weight, counts
        out = x.new_empty(x.shape[0], weight.shape[1])
        for expert, (part, result) in enumerate(
            zip(x.split(counts), out.split(counts), strict=True)
        ):
            if part.shape[0]:
                _matmul_t(part, weight, expert, result)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        weight: FrozenWeight = ctx.weight
        dx = dy.new_empty(dy.shape[0], weight.shape[2])
        for expert, (part, result) in enumerate(
            zip(dy.split(ctx.counts), dx.split(ctx.counts), strict=True)
        ):
            if part.shape[0]:
                _matmul(part, weight, expert, result)
        return dx, None, None


class _FrozenHeadMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, rows: slice, contract: str) -> Tensor:
        ctx.weight, ctx.rows, ctx.contract = weight, rows, contract
        return _head_matmul(x, weight, rows, contract)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        other = "cols" if ctx.contract == "rows" else "rows"
        return _head_matmul(dy, ctx.weight, ctx.rows, other), None, None, None


def _head_matmul(x: Tensor, weight: FrozenWeight, rows: slice, contract: str) -> Tensor:
    heads, width = x.shape[1], weight.shape[1]
    per_head = weight.shape[0] // heads
    size = width if contract == "rows" else rows.stop - rows.start
    out = x.new_empty(x.shape[0], heads, size)
    for tile_rows in weight.row_tiles(x.dtype, multiple=per_head):
        head = slice(tile_rows.start // per_head, tile_rows.stop // per_head)
        tile = weight.tile(x.dtype, rows=tile_rows, cols=slice(0, width)).view(-1, per_head, width)[
            :, rows
        ]
        if contract == "cols":
            tile = tile.transpose(1, 2)
        out[:, head] = torch.bmm(x[:, head].transpose(0, 1), tile).transpose(0, 1)
    return out
