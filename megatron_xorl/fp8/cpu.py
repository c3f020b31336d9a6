"""The ``cpu`` backend: C++ turns a tile of the weight into numbers, the CPU's own GEMM multiplies it.

One idea: *every product is one loop over tiles that fit a scratch of 8 MiB a thread*, allocated once and shared by all weights,
layers and experts. What differs is only what a tile is made of:

* fp32: fp32 tiles, the GEMM accumulates straight into the output;
* bf16 where the CPU has bf16 instructions (AVX512_BF16 or AMX): bf16 tiles over the whole contracted axis, oneDNN's bf16 GEMM;
* bf16 elsewhere: the same bf16 *values* stored as fp32, and an fp32 GEMM. Products of two bf16 numbers are exact in fp32 and the
  sums are fp32 in both, so the contract is the same; oneDNN's bf16 GEMM is 5 to 200 times slower than this on such a CPU.

``w8a8`` quantises the activations of a tile in the scratch, keeps ``code x scale`` in fp32, and takes the third form everywhere.

A GEMM of fewer than ``MIN_ROWS`` rows or ``MIN_COLUMNS`` columns is padded to that many: below them MKL takes other loops, whose
bits depend on the number of rows and on where the operands lie in memory. A row's bits would depend on its batch, and an
expert's on its place in the bank.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_xorl.fp8.engine import LowRank
from megatron_xorl.fp8.format import (
    ACTIVATION_AMAX_FLOOR,
    ACTIVATION_GROUP,
    quantize_activations,
    quantize_blocks,
)
from megatron_xorl.fp8.native import BF16, FP32, FP32_OF_BF16, Library, library
from megatron_xorl.fp8.reference import ExpertLoops, groups
from megatron_xorl.fp8.weight import FrozenWeight

__all__ = ["MIN_COLUMNS", "MIN_ROWS", "SCRATCH_BYTES", "CpuBackend", "has_native_bf16"]

SCRATCH_BYTES = 8 * 2**20
"""Persistent scratch of one thread, whatever the weights: activations, sums and the weight's tile in it."""

MIN_ROWS, MIN_COLUMNS = 8, 16
_INPUT, _SUMS = (
    2 * 2**20,
    2 * 2**20,
)  # bytes of the first two regions where tiles decide; the tile has the rest
_TILE = SCRATCH_BYTES - _INPUT - _SUMS

# fp32 storage of bf16 values: most rows and outputs, and the contracted elements, of a step. MKL packs its operands anew for
# every step, so few outputs cost more than a second decoding of the weight for another 1,024 rows does.
_ROWS, _OUT, _DEEP = 1024, 1024, 512
_OUT_FP32, _DEEP_FP32 = 512, 2048


@functools.cache
def has_native_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512_BF16 or AMX), by ``torch.cpu.get_capabilities``."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


class _Scratch(threading.local):
    """The thread's 8 MiB, allocated at its first product."""

    def __init__(self) -> None:
        self.pool = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
        self.cut(_INPUT, _SUMS)

    def cut(self, first: int, second: int) -> None:
        """Give the input and the sums of the next product that many bytes; its tile has the rest."""
        self.regions = (0, first, first + second, SCRATCH_BYTES)

    def input(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        return self._take(0, rows, cols, dtype)

    def sums(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        return self._take(1, rows, cols, dtype)

    def tile(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        return self._take(2, rows, cols, dtype)

    def _take(self, region: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """A dense ``[rows, cols]`` at the beginning of a region, which it must fit: regions do not run into each other."""
        start, stop = self.regions[region : region + 2]
        end = start + rows * cols * dtype.itemsize
        assert end <= stop, (region, rows, cols, dtype)
        return self.pool[start:end].view(dtype).view(rows, cols)


_scratch = _Scratch()


@dataclass(frozen=True)
class _Right:
    """The right operand of a product, ``[deep, outputs]``: a dense matrix, or rows of an FP8 weight that are read by tiles.

    For ``x W^T`` the outputs are the weight's rows (``transposed``), for ``dY W`` its columns.
    """

    shape: tuple[int, int]
    dense: Tensor | None
    weight: FrozenWeight | None = None
    expert: int | None = None
    first_row: int = 0
    transposed: bool = False

    @classmethod
    def of(
        cls, weight: FrozenWeight, expert: int | None, *, transposed: bool, rows: slice | None = None
    ) -> _Right:  # fmt: skip
        """``W[rows]^T`` or ``W[rows]`` of a weight or of one expert."""
        rows = rows or slice(0, weight.shape[-2])
        shape = (rows.stop - rows.start, weight.shape[-1])
        dense = None
        if weight.dense is not None:
            dense = (weight.dense if expert is None else weight.dense[expert])[rows]
            dense = dense.t() if transposed else dense
        shape = shape[::-1] if transposed else shape
        return cls(shape, dense, weight, expert, rows.start, transposed)

    def tile(self, deep: slice, outputs: slice, gemm: torch.dtype, values: torch.dtype, native: Library) -> Tensor:  # fmt: skip
        """``[deep, outputs]`` in dtype ``gemm``, its values rounded to ``values``; zeros up to ``MIN_COLUMNS`` columns."""
        if self.dense is not None:
            part = self.dense[deep, outputs]
            if part.dtype == gemm == values and part.shape[1] >= MIN_COLUMNS:
                return part
            return self._stored(part.to(values), gemm)
        weight = self.weight
        assert weight is not None and weight.codes is not None and weight.scales is not None
        assert weight.block is not None
        rows, cols = (outputs, deep) if self.transposed else (deep, outputs)
        codes = weight.codes if self.expert is None else weight.codes[self.expert]
        scales = weight.scales if self.expert is None else weight.scales[self.expert]
        out = self._room(
            deep.stop - deep.start, outputs.stop - outputs.start, gemm, self.transposed
        )
        inner = out[: rows.stop - rows.start, : cols.stop - cols.start]
        kind = BF16 if gemm == torch.bfloat16 else FP32 if values == gemm else FP32_OF_BF16
        shifted = slice(rows.start + self.first_row, rows.stop + self.first_row)
        native.dequantize(
            codes,
            scales,
            weight.block,
            inner,
            rows=shifted,
            cols=cols,
            parts=weight.parts,
            kind=kind,
        )
        return out.t() if self.transposed else out

    @staticmethod
    def _stored(part: Tensor, gemm: torch.dtype) -> Tensor:
        """A copy in the scratch with the source's own layout, so that the copy runs along memory."""
        transposed = part.stride(0) == 1 and part.stride(1) != 1
        out = _Right._room(*part.shape, gemm, transposed)
        out = out.t() if transposed else out
        out[:, : part.shape[1]].copy_(part)
        return out

    @staticmethod
    def _room(deep: int, outputs: int, gemm: torch.dtype, transposed: bool) -> Tensor:
        """Scratch for ``[deep, outputs]``, or for its transpose, as wide as ``MIN_COLUMNS`` at least; zeros if widened."""
        wide = max(outputs, MIN_COLUMNS)
        out = _scratch.tile(*((wide, deep) if transposed else (deep, wide)), gemm)
        return out if wide == outputs else out.zero_()


@dataclass(frozen=True)
class _Steps:
    """Sizes of one step, the dtype the GEMM runs in, and the bytes of the input's and the sums' regions."""

    gemm: torch.dtype
    rows: int
    outputs: int
    deep: int
    regions: tuple[int, int] = (_INPUT, _SUMS)


class CpuBackend(ExpertLoops):
    """See :class:`megatron_xorl.fp8.engine.Backend`, whose shapes and rounding points hold here; bf16 and fp32 on a CPU.

    Args:
        native_bf16: whether bf16 products use oneDNN's bf16 GEMM; by default what the CPU has.

    Raises:
        PlatformError: the C++ part cannot be built or decodes otherwise than torch.
    """

    name = "cpu"

    def __init__(self, native_bf16: bool | None = None) -> None:
        self._native = library()
        self._native_bf16 = has_native_bf16() if native_bf16 is None else native_bf16

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
        quantize = mode == "w8a8" and weight.quantized
        self._product(x, _Right.of(weight, None, transposed=True), out, quantize=quantize)
        for term in lora:
            self.add(out[:, term.columns], term.left, term.right.t())

    def linear_dx(
        self, dy: Tensor, weight: FrozenWeight, out: Tensor, *, lora: Sequence[LowRank] = ()
    ) -> None:
        """``out = dY W``, then the adapters."""
        self._product(dy, _Right.of(weight, None, transposed=False), out)
        for term in lora:
            self.add(out, term.left, term.right)

    def grouped_linear(
        self, x: Tensor, weight: FrozenWeight, counts: Sequence[int], out: Tensor, *, mode: str, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out_e = x_e W_e^T``, then the adapters."""
        quantize = mode == "w8a8" and weight.quantized
        for expert, rows in enumerate(groups(counts)):
            right = _Right.of(weight, expert, transposed=True)
            self._product(x[rows], right, out[rows], quantize=quantize)
            for term in lora:
                factor = term.right[expert if term.right.shape[0] > 1 else 0]
                self.add(out[rows, term.columns], term.left[rows], factor.t())

    def grouped_dx(
        self, dy: Tensor, weight: FrozenWeight, counts: Sequence[int], out: Tensor, *, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out_e = dY_e W_e``, then the adapters."""
        for expert, rows in enumerate(groups(counts)):
            self._product(dy[rows], _Right.of(weight, expert, transposed=False), out[rows])
            for term in lora:
                factor = term.right[expert if term.right.shape[0] > 1 else 0]
                self.add(out[rows], term.left[rows], factor)

    def head_matmul(
        self, x: Tensor, weight: FrozenWeight, rows: slice, contract: str, out: Tensor
    ) -> None:
        """Each head with its own rows."""
        per_head = weight.shape[0] // x.shape[1]
        for head in range(x.shape[1]):
            own = slice(head * per_head + rows.start, head * per_head + rows.stop)
            right = _Right.of(weight, None, transposed=contract == "cols", rows=own)
            self._product(x[:, head], right, out[:, head])

    def shrink(self, x: Tensor, a: Tensor, scale: float, out: Tensor) -> None:
        """``out = scale x A^T``."""
        self._product(x, _Right((a.shape[1], a.shape[0]), a.t()), out, alpha=scale)

    def add(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """``out += left right``."""
        self._product(left, _Right((right.shape[0], right.shape[1]), right), out, add=True)

    def factor_gradient(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out = left^T right``."""
        self._product(left.t(), _Right((right.shape[0], right.shape[1]), right), out)

    def _steps(self, x: Tensor, right: _Right, quantize: bool) -> _Steps:
        """Sizes whose padded copies fit the regions; ``deep`` never depends on the rows, or a row's bits would."""
        deep, outputs = right.shape
        size = x.dtype.itemsize
        rows, across = _SUMS // (size * MIN_COLUMNS), _SUMS // (size * MIN_ROWS)
        deepest = min(_INPUT // (size * MIN_ROWS), _TILE // (size * MIN_COLUMNS))
        direct = right.dense is not None and right.dense.dtype == x.dtype
        if x.dtype == torch.float32 and not quantize:
            if direct:
                return _Steps(torch.float32, rows, across, deepest)
            return _Steps(torch.float32, rows, _OUT_FP32, _DEEP_FP32)
        if self._native_bf16 and not quantize and deep <= deepest:  # bf16 sums cannot be continued
            fits = outputs if direct else _TILE // (size * max(1, deep))
            return _Steps(torch.bfloat16, rows, min(fits, across), deep)
        return _stored_wide(x.shape[0])

    def _product(
        self, x: Tensor, right: _Right, out: Tensor, *, add: bool = False, alpha: float = 1.0, quantize: bool = False
    ) -> None:  # fmt: skip
        """``out = alpha x right`` (``out +=`` if ``add``): x ``[M, deep]``, out ``[M, outputs]``, any row strides."""
        if x.shape[1] == 0 and not add:
            out.zero_()
        if 0 in (*x.shape, *out.shape):
            return
        steps = self._steps(x, right, quantize)
        _scratch.cut(*steps.regions)
        for rows in _cut(x.shape[0], steps.rows):
            for outputs in _cut(right.shape[1], steps.outputs):
                self._block(x[rows], right, outputs, out[rows, outputs], steps, add, alpha, quantize)  # fmt: skip

    def _block(
        self, x: Tensor, right: _Right, outputs: slice, out: Tensor, steps: _Steps, add: bool, alpha: float, quantize: bool
    ) -> None:  # fmt: skip
        """One block of the output: the sums over the contracted axis stay in one place and are rounded once."""
        count, width = out.shape
        padded, wide = max(count, MIN_ROWS), max(width, MIN_COLUMNS)
        staged = (padded, wide) != (count, width) or out.dtype != steps.gemm
        sums = _scratch.sums(padded, wide, steps.gemm) if staged else out
        if staged and add:
            if (padded, wide) != (count, width):
                sums.zero_()
            sums[:count, :width].copy_(out)
        for deep in _cut(x.shape[1], steps.deep):
            part = x[:, deep]
            if quantize or padded != count or part.dtype != steps.gemm:
                part = _scratch.input(padded, part.shape[1], steps.gemm)
                part[:count].copy_(x[:, deep])
                part[count:].zero_()
                if quantize:
                    self._native.quantize_round_trip(part, ACTIVATION_GROUP, ACTIVATION_AMAX_FLOOR)
            tile = right.tile(deep, outputs, steps.gemm, out.dtype, self._native)
            beta = 1 if add or deep.start else 0
            torch.addmm(sums, part, tile, beta=beta, alpha=alpha, out=sums)
        if staged:
            out.copy_(sums[:count, :width])


def _cut(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _stored_wide(count: int) -> _Steps:
    """The steps of bf16 values in fp32: as many outputs as the scratch holds beside the rows there are."""
    rows = max(MIN_ROWS, min(count, _ROWS))
    fits = (SCRATCH_BYTES // 4 - rows * _DEEP) // (rows + _DEEP) // 64 * 64
    outputs = min(fits, _OUT)
    return _Steps(torch.float32, rows, outputs, _DEEP, (4 * rows * _DEEP, 4 * rows * outputs))
