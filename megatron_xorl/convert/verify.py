"""``megatron-xorl verify A B``: are two checkpoints the same, tensor by tensor, whatever form each has?

The one idea: both are read by Hugging Face name in pieces, so a shard here and a ``.distcp`` file there make no difference.
Bitwise, every byte, dtype and shape must agree. In value (``values=True``) FP8 weights are their code times scale in fp32, and a
pair of different dtypes is compared in the narrower one, rounded once: a bf16 export of an FP8 checkpoint is equal to it so.

Everything that differs is reported together: tensors that one side lacks, differences with place and both values, the fields in
which the configurations differ, and what is wrong with the files of a side: shards that are missing, damaged or in no index, and
tensors that index and shard disagree about. Refused: a side that is no checkpoint, unfinished, or not what its manifest says.

    megatron-xorl verify A B [--values] [--json]
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.convert.files import PIECE, SourceFile
from megatron_xorl.convert.progress import Reporter
from megatron_xorl.convert.values import row_blocks
from megatron_xorl.errors import FormatError, WeightsError
from megatron_xorl.fp8.format import dequantize_blocks
from megatron_xorl.weights.fingerprint import NOT_SEMANTIC
from megatron_xorl.weights.names import SCALE_SUFFIX
from megatron_xorl.weights.opening import Checkpoint, open_checkpoint
from megatron_xorl.weights.shards import DTYPE_BYTES, Entry

__all__ = ["SHOWN", "verify"]

SHOWN = 20
"""Differences, problems and names that a report lists; all are counted."""

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
        ``equal``; ``metrics`` (``tensors_a``, ``tensors_b``, ``compared``, ``different``, ``missing``, ``extra``, ``problems``,
        ``bytes``, and with ``values`` ``max_abs``); ``missing`` (in A alone) and ``extra`` (in B alone); ``differences``, a list
        of ``tensor``, ``what``, and for values ``index``, ``a``, ``b``, ``count``; ``problems``, a line for each fault of the
        files of one side; ``config``, the fields that differ. Numbers that JSON does not have are ``"inf"`` and ``"nan"``.

    Raises:
        WeightsError: a side is no checkpoint, unfinished, not what its manifest says, or cut while it is read.
    """
    sides = _opened(a, b, hashed)
    configs = [load_glm_config(side.directory) for side in sides]
    contents = [_contents(side) for side in sides]
    names = [_compared(held, values) for held, _ in contents]
    problems = [
        f"{side}: {line}"
        for side, (_, lines) in zip(("A", "B"), contents, strict=True)
        for line in lines
    ]
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
    metrics: dict[str, Any] = {
        "tensors_a": len(names[0]),
        "tensors_b": len(names[1]),
        "compared": len(common),
        "different": len(differences),
        "missing": len(missing),
        "extra": len(extra),
        "problems": len(problems),
        "bytes": total,
    }
    if values:
        metrics["max_abs"] = _shown(comparison.max_abs)
    return {
        "equal": not (differences or missing or extra or problems or fields),
        "compared_as": "values" if values else "bytes",
        "metrics": metrics,
        "missing": missing[:SHOWN],
        "extra": extra[:SHOWN],
        "differences": differences[:SHOWN],
        "problems": problems[:SHOWN],
        "config": fields,
    }


def _opened(a: Path | str, b: Path | str, hashed: bool) -> list[Checkpoint]:
    """Open both sides, or raise one error with what is wrong with each."""
    sides, errors = [], []
    for path in (a, b):
        try:
            sides.append(open_checkpoint(path, hashes=hashed))
        except WeightsError as error:
            errors.append(error)
    if len(errors) == 2 and str(errors[0]) != str(errors[1]):
        raise WeightsError(f"{errors[0]}\n{errors[1]}") from errors[0]
    if errors:
        raise errors[0]
    return sides


def _contents(side: Checkpoint) -> tuple[set[str], list[str]]:
    """Return the names that the index gives and its shards hold, and a line for each thing that is not so."""
    held: set[str] = set()
    home: dict[str, str] = {}
    lines = []
    unread = set()
    for shard in side.shards():
        try:
            header = side.header(shard)
        except WeightsError as error:
            lines.append(str(error))
            unread.add(shard)
            continue
        for name in header:
            if name in home:
                lines.append(f"{name} is in two shards, {home[name]} and {shard}")
            elif name not in side:
                lines.append(f"{shard} holds {name}, which the index does not name")
            home.setdefault(name, shard)
            if name in side and side.shard_of(name) == shard:
                held.add(name)
    for name in side.names():
        shard = side.shard_of(name)
        if shard not in unread and name not in side.header(shard):
            lines.append(f"the index puts {name} into {shard}, which does not hold it")
    return held, lines + list(_strays(side))


def _strays(side: Checkpoint) -> Iterator[str]:
    """Say which files look like shards of this form and are in no index."""
    named = set(side.shards())
    ends = {Path(shard).suffix for shard in named}
    for path in sorted(side.directory.iterdir()):
        if path.suffix in ends and path.name not in named:
            yield f"{path.name} is a shard that the index does not name"


def _compared(held: set[str], values: bool) -> set[str]:
    """Names to compare; scales are part of their weight's value."""
    return {name for name in held if not (values and name.endswith(SCALE_SUFFIX))}


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
        "a": _shown(found[0]),
        "b": _shown(found[1]),
        "count": count,
    }


def _shown(number: float) -> float | str:
    """A number as JSON has it; it has neither inf nor NaN."""
    return number if math.isfinite(number) else str(number)
