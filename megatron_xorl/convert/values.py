"""What each tensor of a conversion's output is computed from, and its bytes, piece by piece.

The one idea: a recipe names the source tensor and what to do with it; :func:`pieces` yields the bytes of the result, a bounded
number of rows at a time, so that the largest tensor needs no more memory than the smallest.

* ``copy``: the bytes of the file, whatever they mean. FP8 codes and scales are never touched by it.
* ``cast``: a floating dtype to another, rounded once.
* ``dequantize``: code times scale in fp32, then one cast.
* ``codes`` and ``scales``: the two halves of quantising by ``fp8.format.quantize_blocks``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_xorl.convert.files import SourceFile
from megatron_xorl.errors import FormatError
from megatron_xorl.fp8.format import check_pair, dequantize_blocks, quantize_blocks
from megatron_xorl.weights.container import TORCH_DTYPES
from megatron_xorl.weights.names import SCALE_SUFFIX
from megatron_xorl.weights.opening import Checkpoint
from megatron_xorl.weights.reader import refuse_nonfinite
from megatron_xorl.weights.shards import DTYPE_BYTES, Entry

__all__ = ["OutputTensor", "pieces", "row_blocks"]

ROWS_BYTES = 32 * 2**20
"""Bytes of fp32 values that are computed at a time."""

Block = tuple[int, int]


class OutputTensor(NamedTuple):
    """One tensor of the output: its name, dtype and shape as safetensors has them, and the ``recipe`` applied to ``source``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    recipe: str
    source: str

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def pieces(
    tensor: OutputTensor, checkpoint: Checkpoint, opened: dict[str, SourceFile], block: Block | None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an output tensor.

    Args:
        tensor: what to make.
        checkpoint: the source.
        opened: files that are read in order and hashed, by name; others are read where needed.
        block: FP8 block of the source, or of the output when quantising.

    Raises:
        WeightsError, FormatError: the source ends early, or holds inf or NaN where values are computed.
    """
    entry = checkpoint.entry(tensor.source)
    file = checkpoint.shard_of(tensor.source)
    if tensor.recipe == "copy" and file in opened:
        yield from opened[file].pieces(entry.start, entry.stop)
        return
    other = opened.get(file)
    source = other or SourceFile(checkpoint.directory / file)
    try:
        if tensor.recipe == "copy":
            yield from source.pieces(entry.start, entry.stop)
        else:
            for value in _computed(tensor, checkpoint, entry, source.handle, block):
                yield memoryview(value.contiguous().view(-1).view(torch.uint8).numpy())
    finally:
        if other is None:
            source.close()


def row_blocks(shape: tuple[int, ...], height: int = 1) -> Iterator[slice]:
    """Cut the first axis so that the fp32 values of a cut fit :data:`ROWS_BYTES`; cuts lie on multiples of ``height``."""
    width = math.prod(shape[1:]) * 4
    step = max(1, ROWS_BYTES // max(1, width) // height) * height
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _computed(
    tensor: OutputTensor, checkpoint: Checkpoint, entry: Entry, handle: int, block: Block | None
) -> Iterator[Tensor]:
    name, dtype = tensor.source, TORCH_DTYPES[tensor.dtype]
    if tensor.recipe == "cast":
        for rows in row_blocks(entry.shape):
            value = _rows(handle, entry, rows)
            refuse_nonfinite(name, value)
            yield value.to(dtype)
        return
    assert block is not None
    scales = checkpoint.read(name + SCALE_SUFFIX) if tensor.recipe == "dequantize" else None
    for rows in row_blocks(entry.shape, block[0]):
        value = _rows(handle, entry, rows)
        if scales is not None:
            own = scales[rows.start // block[0] : -(-rows.stop // block[0])]
            check_pair(name, value, own, block)
            yield dequantize_blocks(value, own, block, dtype)
        else:
            codes, made = quantize_blocks(value, block, name=name)
            yield codes if tensor.recipe == "codes" else made


def _rows(handle: int, entry: Entry, rows: slice) -> Tensor:
    """Rows of a tensor in its file, in the dtype of the file."""
    row = (entry.stop - entry.start) // max(1, entry.shape[0])
    buffer = bytearray((rows.stop - rows.start) * row)
    start, view = entry.start + rows.start * row, memoryview(buffer)
    while view:
        read = os.preadv(handle, [view], start)
        if not read:
            raise FormatError(f"a source file ends at byte {start}: it was cut while it was read")
        start, view = start + read, view[read:]
    values = torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype])
    return values.reshape(rows.stop - rows.start, *entry.shape[1:])
