"""The ``reference`` backend: torch operations, a tile of the weight at a time; the oracle of the other backends.

One idea: nothing clever. A tile is dequantised by :meth:`FrozenWeight.tile`, multiplied, and dropped; each output element is
written once, so no partial sum is rounded. Any device, any floating dtype; in fp64 every step is exact but the sums.

fp32 operands are summed in fp64 and rounded once. An fp32 sum of 128 products is off by 2.0e-7 (rel-L2) already and one of 2,048
by 2.6e-7, so an fp32 GEMM could not be the measure of another; nor would it be the same GEMM where TF32 is allowed.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_xorl.fp8.engine import LowRank
from megatron_xorl.fp8.format import (
    dequantize_activations,
    quantize_activations,
    quantize_blocks,
)
from megatron_xorl.fp8.weight import FrozenWeight

__all__ = ["ExpertLoops", "ReferenceBackend", "groups"]


class ExpertLoops(ABC):
    """The grouped products of LoRA factors as one product an expert: for backends without a launch that takes all of them."""

    def grouped_shrink(
        self, x: Tensor, a: Tensor, scale: float, counts: Sequence[int], out: Tensor
    ) -> None:
        """``out_e = scale x_e A_e^T``, for a shared factor too: one product over all rows may have other bits."""
        for expert, rows in enumerate(groups(counts)):
            self.shrink(x[rows], a[expert % a.shape[0]], scale, out[rows])

    def grouped_factor_gradient(
        self, left: Tensor, right: Tensor, counts: Sequence[int], out: Tensor
    ) -> None:
        """``out_e = left_e^T right_e``, or one sum over all rows where ``out`` has one expert."""
        own = groups(counts) if out.shape[0] > 1 else [slice(None)]
        for gradient, rows in zip(out, own, strict=True):
            self.factor_gradient(left[rows], right[rows], gradient)

    @abstractmethod
    def shrink(self, x: Tensor, a: Tensor, scale: float, out: Tensor) -> None:
        """``out = scale x A^T``."""

    @abstractmethod
    def factor_gradient(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out = left^T right``."""


class ReferenceBackend(ExpertLoops):
    """See :class:`megatron_xorl.fp8.engine.Backend`, whose shapes and rounding points hold here."""

    name = "reference"

    def quantize_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[M, K]`` -> codes, scales."""
        return quantize_activations(x)

    def quantize_weight(self, w: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """``[..., N, K]`` -> codes, scales."""
        return quantize_blocks(w, block)

    def linear(
        self, x: Tensor, weight: FrozenWeight, out: Tensor, *, mode: str, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out = x W^T``, then the adapters."""
        _matmul_t(x, weight, None, out, mode)
        for term in lora:
            self.add(out[:, term.columns], term.left, term.right.t())

    def linear_dx(
        self, dy: Tensor, weight: FrozenWeight, out: Tensor, *, lora: Sequence[LowRank] = ()
    ) -> None:
        """``out = dY W``, then the adapters."""
        _matmul(dy, weight, None, out)
        for term in lora:
            self.add(out, term.left, term.right)

    def grouped_linear(
        self, x: Tensor, weight: FrozenWeight, counts: Sequence[int], out: Tensor, *, mode: str, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out_e = x_e W_e^T``, then the adapters."""
        for expert, rows in enumerate(groups(counts)):
            if rows.stop > rows.start:
                _matmul_t(x[rows], weight, expert, out[rows], mode)
                for term in lora:
                    factor = term.right[expert if term.right.shape[0] > 1 else 0]
                    self.add(out[rows, term.columns], term.left[rows], factor.t())

    def grouped_dx(
        self, dy: Tensor, weight: FrozenWeight, counts: Sequence[int], out: Tensor, *, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out_e = dY_e W_e``, then the adapters."""
        for expert, rows in enumerate(groups(counts)):
            if rows.stop > rows.start:
                _matmul(dy[rows], weight, expert, out[rows])
                for term in lora:
                    factor = term.right[expert if term.right.shape[0] > 1 else 0]
                    self.add(out[rows], term.left[rows], factor)

    def head_matmul(
        self, x: Tensor, weight: FrozenWeight, rows: slice, contract: str, out: Tensor
    ) -> None:
        """Each head with its own rows."""
        heads, width = x.shape[1], weight.shape[1]
        per_head = weight.shape[0] // heads
        for tile_rows in weight.row_tiles(_sums(x.dtype), multiple=per_head):
            head = slice(tile_rows.start // per_head, tile_rows.stop // per_head)
            tile = weight.tile(x.dtype, rows=tile_rows, cols=slice(0, width))
            tile = tile.view(-1, per_head, width)[:, rows]
            if contract == "cols":
                tile = tile.transpose(1, 2)
            out[:, head] = (_summed(x[:, head].transpose(0, 1)) @ _summed(tile)).transpose(0, 1)

    def shrink(self, x: Tensor, a: Tensor, scale: float, out: Tensor) -> None:
        """``out = scale x A^T``."""
        left, right = _summed(x), _summed(a.t())
        out.copy_(torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale))

    def add(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """``out += left right``."""
        out.copy_(torch.addmm(_summed(out), _summed(left), _summed(right)))

    def factor_gradient(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out = left^T right``."""
        out.copy_(_summed(left.t()) @ _summed(right))


def groups(counts: Sequence[int]) -> list[slice]:
    """Row ranges of consecutive groups."""
    ends = itertools.accumulate(counts)
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _sums(dtype: torch.dtype) -> torch.dtype:
    """The dtype a product of ``dtype`` operands runs in: fp64 for fp32; narrower ones are summed in fp32 by torch's GEMM."""
    return torch.float64 if dtype == torch.float32 else dtype


def _summed(operand: Tensor) -> Tensor:
    return operand.to(_sums(operand.dtype))


def _matmul_t(x: Tensor, weight: FrozenWeight, expert: int | None, out: Tensor, mode: str) -> None:
    """``out = x W^T`` by row tiles; each output column is written once, so no partial sum is ever rounded."""
    quantized = mode == "w8a8" and weight.quantized
    if quantized:
        value = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = dequantize_activations(*quantize_activations(x), value)
    wide = _sums(x.dtype)
    x = x.to(wide)
    for rows in weight.row_tiles(wide):
        tile = weight.tile(out.dtype, rows=rows, cols=slice(0, weight.shape[-1]), expert=expert)
        out[:, rows] = x @ tile.to(wide).t()


def _matmul(dy: Tensor, weight: FrozenWeight, expert: int | None, out: Tensor) -> None:
    """``out = dY W`` by column tiles, for the same reason."""
    wide = _summed(dy)
    for cols in weight.col_tiles(wide.dtype):
        tile = weight.tile(dy.dtype, rows=slice(0, weight.shape[-2]), cols=cols, expert=expert)
        out[:, cols] = wide @ _summed(tile)
