"""``megatron-xorl verify A B``: are two checkpoints the same, tensor by tensor, whatever form each has?

The one idea: both are read by Hugging Face name in pieces, so a shard here and a ``.distcp`` file there make no difference.
Bitwise, every byte, dtype and shape must agree. In value (``values=True``) FP8 weights are their code times scale in fp32, and a
pair of different dtypes is compared in the narrower one, rounded once: a bf16 export of an FP8 checkpoint is equal to it so.

Everything that differs is reported together: tensors that one side lacks, differences with place and both values, and the fields
in which the configurations differ.

    megatron-xorl verify A B [--values] [--json]
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.convert.files import SourceFile
from megatron_xorl.convert.progress import Reporter
from megatron_xorl.convert.values import OutputTensor, pieces, row_blocks
from megatron_xorl.errors import WeightsError
from megatron_xorl.fp8.format import dequantize_blocks
from megatron_xorl.weights.fingerprint import NOT_SEMANTIC
from megatron_xorl.weights.names import SCALE_SUFFIX
from megatron_xorl.weights.opening import Checkpoint, open_checkpoint

__all__ = ["SHOWN", "verify"]

SHOWN = 20
"""Differences and names that a report lists; all are counted."""

_WIDTH = {torch.float32: 2, torch.bfloat16: 1, torch.float16: 1}


def verify(
    a: Path | str, b: Path | str, *, values: bool = False, hashed: bool = True
) -> dict[str, Any]:
    """Compare two checkpoints.

    Args:
        a, b: directories of either form.
        values: compare values across dtypes instead of bytes.
        hashed: also compare the files of each with the hashes of its manifest, where it has one.

    Returns:
        ``equal``; ``metrics`` (``tensors_a``, ``tensors_b``, ``compared``, ``different``, ``bytes``, ``max_abs``);
        ``missing`` (in A alone) and ``extra`` (in B alone); ``differences``, a list of ``tensor``, ``what``, and for values
        ``index``, ``a``, ``b``, ``count``; ``config``, the fields that differ.

    Raises:
        WeightsError: a side is no checkpoint, unfinished or damaged.
    """
    sides = [open_checkpoint(path, hashes=hashed) for path in (a, b)]
    configs = [load_glm_config(side.directory) for side in sides]
    names = [_compared(side, values) for side in sides]
    # In the order of A's files, so that each is read once and can be let go.
    common = sorted(names[0] & names[1], key=lambda name: (sides[0].shard_of(name), name))
    comparison = _Comparison(sides[0], sides[1], configs[0], configs[1], values)
    total = sum(comparison.size(name) for name in common)
    with Reporter(f"verify {Path(a).name} and {Path(b).name}", total) as reporter, comparison:
        differences = []
        for name in common:
            differences += comparison.compare(name)
            comparison.release(sides[0].shard_of(name))
            reporter.advance(comparison.size(name))
    missing, extra = sorted(names[0] - names[1]), sorted(names[1] - names[0])
    fields = _config_differences(configs[0], configs[1], values)
    metrics = {
        "tensors_a": len(names[0]),
        "tensors_b": len(names[1]),
        "compared": len(common),
        "different": len(differences),
        "missing": len(missing),
        "extra": len(extra),
        "bytes": total,
        "max_abs": comparison.max_abs,
    }
    return {
        "equal": not (differences or missing or extra or fields),
        "compared_as": "values" if values else "bytes",
        "metrics": metrics,
        "missing": missing[:SHOWN],
        "extra": extra[:SHOWN],
        "differences": differences[:SHOWN],
        "config": fields,
    }


def _compared(side: Checkpoint, values: bool) -> set[str]:
    """Names to compare; scales are part of their weight's value."""
    return {name for name in side.names() if not (values and name.endswith(SCALE_SUFFIX))}


def _config_differences(a: GlmConfig, b: GlmConfig, values: bool) -> dict[str, list[Any]]:
    """Return the fields that matter and differ, with both values; in value the block of the FP8 weights does not matter."""
    left, right = dataclasses.asdict(a), dataclasses.asdict(b)
    ignored = {*NOT_SEMANTIC, *(("weight_block_size",) if values else ())}
    return {
        field: [left[field], right[field]]
        for field in left
        if field not in ignored and left[field] != right[field]
    }


class _Comparison:
    """Two checkpoints with the files that are being read."""

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

    def __enter__(self) -> _Comparison:
        return self

    def __exit__(self, *_: object) -> None:
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
            return self._in_value(name, first.shape)
        if first.dtype != second.dtype:
            return [{"tensor": name, "what": f"dtype {first.dtype} and {second.dtype}"}]
        return self._bitwise(name)

    def _bitwise(self, name: str) -> list[dict[str, Any]]:
        width = self.sides[0].entry(name)
        copy = OutputTensor(name, width.dtype, width.shape, "copy", name)
        streams = [
            pieces(copy, side, {file: self._open(side, file)}, None)
            for side in self.sides
            for file in [side.shard_of(name)]
        ]
        element = max(1, (width.stop - width.start) // max(1, math.prod(width.shape)))
        count, first, at = 0, None, 0
        for left, right in zip(*streams, strict=True):
            if left != right:
                a, b = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (left, right))
                bad = (a != b).view(-1, element).any(dim=1)
                count += int(bad.sum())
                if first is None:
                    first = at + int(bad.nonzero()[0])
            at += len(left) // element
        return [] if first is None else [self._difference(name, width.shape, first, count)]

    def _difference(
        self, name: str, shape: tuple[int, ...], flat: int, count: int
    ) -> dict[str, Any]:
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), shape or (1,))]
        cell = tuple(slice(i, i + 1) for i in index)
        found = [_shown(side.read(name, cell).reshape(-1)[0]) for side in self.sides]
        return {
            "tensor": name,
            "what": f"{count} of {math.prod(shape)} values",
            "index": index,
            "a": found[0],
            "b": found[1],
            "count": count,
        }

    def _in_value(self, name: str, shape: tuple[int, ...]) -> list[dict[str, Any]]:
        height = math.lcm(*(block[0] for block in self.blocks if block is not None))
        count, first, shown = 0, None, (0.0, 0.0)
        for rows in row_blocks(shape, height):
            a, b = (self._rows(side, name, rows) for side in (0, 1))
            narrow = min((a.dtype, b.dtype), key=lambda dtype: _WIDTH.get(dtype, 3))
            a, b = (x.to(narrow).double() for x in (a, b))
            same = (a == b) | (a.isnan() & b.isnan())
            if not same.all():
                bad = (~same).view(-1).nonzero().view(-1)
                worst = float((a - b).abs().nan_to_num(math.inf).max())
                self.max_abs = max(self.max_abs, worst)
                count += len(bad)
                if first is None:
                    place = int(bad[0])
                    first = rows.start * math.prod(shape[1:]) + place
                    shown = (float(a.view(-1)[place]), float(b.view(-1)[place]))
        if first is None:
            return []
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), shape or (1,))]
        what = f"{count} of {math.prod(shape)} values"
        return [
            {
                "tensor": name,
                "what": what,
                "index": index,
                "a": shown[0],
                "b": shown[1],
                "count": count,
            }
        ]

    def _rows(self, number: int, name: str, rows: slice) -> Tensor:
        """Values of rows: fp32 of an FP8 weight, the dtype of the file otherwise."""
        side, block = self.sides[number], self.blocks[number]
        value = side.read(name, (rows,))
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


def _shown(value: Tensor) -> float | int | str:
    """A number as JSON has it, and the code of an FP8 value."""
    number = value.item() if value.dtype != torch.float8_e4m3fn else float(value.float())
    return number if math.isfinite(number) else str(number)
