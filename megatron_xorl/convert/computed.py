"""Values of a conversion that torch computes: casts, dequantising, quantising, a bounded number of rows at a time.

The one idea: rows are cut on the grid of FP8 blocks, so every cut has its scales and the result does not depend on the cuts.

Refused: inf or NaN in a tensor whose values are computed. Copying would keep it; a cast or a code would hide it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_xorl.errors import FormatError
from megatron_xorl.fp8.format import check_pair, dequantize_blocks, quantize_blocks
from megatron_xorl.weights.checkpoint import Checkpoint
from megatron_xorl.weights.container import torch_dtype
from megatron_xorl.weights.names import SCALE_SUFFIX
from megatron_xorl.weights.reader import refuse_nonfinite
from megatron_xorl.weights.shards import Entry

__all__ = ["ROWS_BYTES", "computed", "row_blocks"]

ROWS_BYTES = 32 * 2**20
"""Bytes of fp32 values that are computed at a time."""

Block = tuple[int, int]


def computed(
    recipe: str, name: str, dtype: str, checkpoint: Checkpoint, handle: int, block: Block | None
) -> Iterator[memoryview]:
    """Yield the bytes of a computed tensor.

    Args:
        recipe: ``cast``, ``dequantize``, ``codes`` or ``scales``.
        name: of the source tensor.
        dtype: of the result, as safetensors names it.
        checkpoint: the source.
        handle: of the file that holds the source tensor.
        block: FP8 block, where the recipe needs one.

    Raises:
        WeightsError, FormatError: inf or NaN, a scale that does not fit, or a file that was cut.
    """
    for value in _values(recipe, name, torch_dtype(dtype), checkpoint, handle, block):
        yield memoryview(value.contiguous().view(-1).view(torch.uint8).numpy())


def row_blocks(shape: tuple[int, ...], height: int = 1) -> Iterator[slice]:
    """Cut the first axis so that the fp32 values of a cut fit :data:`ROWS_BYTES`; cuts lie on multiples of ``height``."""
    width = math.prod(shape[1:]) * 4
    step = max(1, ROWS_BYTES // max(1, width) // height) * height
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _values(
    recipe: str,
    name: str,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    handle: int,
    block: Block | None,
) -> Iterator[Tensor]:
    entry = checkpoint.entry(name)
    if recipe == "cast":
        for rows in row_blocks(entry.shape):
            value = _rows(handle, entry, rows)
            refuse_nonfinite(name, value)
            yield value.to(dtype)
        return
    assert block is not None
    scales = checkpoint.read(name + SCALE_SUFFIX) if recipe == "dequantize" else None
    for rows in row_blocks(entry.shape, block[0]):
        value = _rows(handle, entry, rows)
        if scales is not None:
            own = scales[rows.start // block[0] : -(-rows.stop // block[0])]
            check_pair(name, value, own, block)
            yield dequantize_blocks(value, own, block, dtype)
        else:
            codes, made = quantize_blocks(value, block, name=name)
            yield codes if recipe == "codes" else made


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
    values = torch.frombuffer(buffer, dtype=torch_dtype(entry.dtype))
    return values.reshape(rows.stop - rows.start, *entry.shape[1:])
