"""One tensor of two checkpoints, whatever form each has: where they differ, and in what.

The one idea: both are read in pieces, bitwise from the same bytes of both files, in value by rows on the grid of both FP8
blocks. FP8 weights are then their code times scale in fp32, and a pair of different dtypes is compared in the narrower one,
rounded once. Refused: an FP8 weight without its scale, a file that was cut.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.convert.computed import row_blocks
from megatron_xorl.convert.files import PIECE, SourceFile
from megatron_xorl.errors import FormatError, WeightsError
from megatron_xorl.fp8.format import dequantize_blocks
from megatron_xorl.weights.names import SCALE_SUFFIX
from megatron_xorl.weights.opening import Checkpoint
from megatron_xorl.weights.shards import DTYPE_BYTES, Entry

__all__ = ["Comparison", "shown_number"]

_WIDTH = {torch.float32: 2, torch.bfloat16: 1, torch.float16: 1}


class Comparison:
    """Two checkpoints with the files that are being read; a context, so that they are closed.

    Args:
        a, b: the sides.
        config_a, config_b: their configurations, for the FP8 blocks.
        values: compare values across dtypes instead of bytes.

    Attributes:
        max_abs: largest difference of two values so far; 0 where bytes are compared.
    """

    def __init__(
        self, a: Checkpoint, b: Checkpoint, config_a: GlmConfig, config_b: GlmConfig, values: bool
    ) -> None:
        self.sides = (a, b)
        self.blocks = (config_a.weight_block_size, config_b.weight_block_size)
        self.values = values
        self.max_abs = 0.0
        self._files: dict[Path, SourceFile] = {}
        self._stack = ExitStack()
        self._file = ""

    def __enter__(self) -> Comparison:
        """Return the comparison itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._stack.close()

    def release(self, file: str) -> None:
        """Let the pages of everything mapped go when A's next file begins."""
        if file != self._file:
            self._file = file
            for side in self.sides:
                side.close()

    def size(self, name: str) -> int:
        """Bytes of a tensor on the side of A."""
        entry = self.sides[0].entry(name)
        return entry.stop - entry.start

    def compare(self, name: str) -> list[dict[str, Any]]:
        """Return the difference of one tensor, or nothing."""
        first, second = (side.entry(name) for side in self.sides)
        if first.shape != second.shape:
            what = f"shape {list(first.shape)} and {list(second.shape)}"
            return [{"tensor": name, "what": what}]
        if self.values:
            try:
                return self._in_value(name, first.shape)
            except (
                FormatError,
                WeightsError,
            ) as error:  # of the scale; the other tensors still count
                return [{"tensor": name, "what": f"values unknown: {error}"}]
        if first.dtype != second.dtype:
            return [{"tensor": name, "what": f"dtype {first.dtype} and {second.dtype}"}]
        return self._bitwise(name, first, second)

    def _bitwise(self, name: str, first: Entry, second: Entry) -> list[dict[str, Any]]:
        """Compare entries of one dtype and shape, both files in steps of the same bytes."""
        files = [self._open(side, side.shard_of(name)) for side in self.sides]
        element = DTYPE_BYTES[first.dtype]
        count, place = 0, None
        for at in range(0, first.stop - first.start, PIECE):
            length = min(PIECE, first.stop - first.start - at)
            left, right = (
                _exactly(file, entry.start + at, length)
                for file, entry in zip(files, (first, second), strict=True)
            )
            if left != right:
                a, b = (torch.frombuffer(part, dtype=torch.uint8) for part in (left, right))
                bad = (a != b).view(-1, element).any(dim=1)
                count += int(bad.sum())
                if place is None:
                    place = at // element + int(bad.nonzero()[0])
        if place is None:
            return []
        index = _index(place, first.shape)
        cell = tuple(slice(i, i + 1) for i in index) or None
        found = [side.read(name, cell).reshape(-1)[0].double().item() for side in self.sides]
        return [_difference(name, first.shape, index, found, count)]

    def _in_value(self, name: str, shape: tuple[int, ...]) -> list[dict[str, Any]]:
        height = math.lcm(*(block[0] for block in self.blocks if block is not None))
        count, place, found = 0, None, [0.0, 0.0]
        for rows in row_blocks(shape or (1,), height):
            a, b = (self._rows(side, name, rows).reshape(-1) for side in (0, 1))
            narrow = min((a.dtype, b.dtype), key=lambda dtype: _WIDTH.get(dtype, 3))
            a, b = (x.to(narrow).double() for x in (a, b))
            bad = ((a != b) & ~(a.isnan() & b.isnan())).nonzero().view(-1)
            if len(bad):
                # A NaN against a number is as far apart as can be.
                apart = (a - b)[bad].abs().nan_to_num(nan=math.inf, posinf=math.inf)
                self.max_abs = max(self.max_abs, float(apart.max()))
                count += len(bad)
                if place is None:
                    place = rows.start * math.prod(shape[1:]) + int(bad[0])
                    found = [float(x[bad[0]]) for x in (a, b)]
        if place is None:
            return []
        return [_difference(name, shape, _index(place, shape), found, count)]

    def _rows(self, number: int, name: str, rows: slice) -> Tensor:
        """Values of rows: fp32 of an FP8 weight, the dtype of the file otherwise."""
        side, block = self.sides[number], self.blocks[number]
        value = side.read(name, (rows,) if side.shape(name) else None)
        if value.dtype != torch.float8_e4m3fn:
            return value
        if block is None or name + SCALE_SUFFIX not in side:
            raise WeightsError(
                f"{side.directory}: {name} is FP8 and its scale or weight_block_size is missing; its values are unknown"
            )
        grid = slice(rows.start // block[0], -(-rows.stop // block[0]))
        return dequantize_blocks(value, side.read(name + SCALE_SUFFIX, (grid,)), block)

    def _open(self, side: Checkpoint, file: str) -> SourceFile:
        path = side.directory / file
        if path not in self._files:
            self._files[path] = SourceFile(path)
            self._stack.callback(self._files[path].close)
        return self._files[path]


def _exactly(file: SourceFile, start: int, length: int) -> bytearray:
    """Return ``length`` bytes from ``start``; a read may give fewer than asked for, so it is repeated.

    Raises:
        WeightsError: the file ends before them.
    """
    buffer = bytearray(length)
    left = memoryview(buffer)
    while left:
        read = os.preadv(file.handle, [left], start)
        if not read:
            raise WeightsError(
                f"{file.path} ends at byte {start}, expected {start + len(left)} or more: it was cut while it was read"
            )
        start, left = start + read, left[read:]
    return buffer


def _index(place: int, shape: tuple[int, ...]) -> list[int]:
    """Return the index of a flat place; none of a scalar."""
    return [int(i) for i in torch.unravel_index(torch.tensor(place), shape)] if shape else []


def _difference(
    name: str, shape: tuple[int, ...], index: list[int], found: list[float], count: int
) -> dict[str, Any]:
    """The entry of a report for values that differ, first at ``index``."""
    return {
        "tensor": name,
        "what": f"{count} of {math.prod(shape)} values",
        "index": index,
        "a": shown_number(found[0]),
        "b": shown_number(found[1]),
        "count": count,
    }


def shown_number(number: float) -> float | str:
    """Return a number as JSON has it, which has neither inf nor NaN: those are text."""
    return number if math.isfinite(number) else str(number)
