"""What each tensor of a conversion's output is made of, and its bytes, piece by piece.

The one idea: a recipe names the source tensor and what to do with it; :func:`pieces` yields the bytes of the result, a bounded
number at a time, so that the largest tensor needs no more memory than the smallest. Torch is imported where values are computed
(``convert.computed``), so a conversion that copies starts without it.

* ``copy``: the bytes of the file, whatever they mean. FP8 codes and scales are never touched by it.
* ``cast``: a floating dtype to another, rounded once.
* ``dequantize``: code times scale in fp32, then one cast.
* ``codes`` and ``scales``: the two halves of quantising by ``fp8.format.quantize_blocks``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megatron_xorl.convert.files import SourceFile
from megatron_xorl.weights.checkpoint import Checkpoint
from megatron_xorl.weights.shards import DTYPE_BYTES

__all__ = ["Block", "OutputTensor", "pieces"]

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
        opened: files that are read in order and hashed, by name; the one of the tensor's source among them.
        block: FP8 block of the source, or of the output when quantising.

    Raises:
        WeightsError, FormatError: the source ends early, or holds inf or NaN where values are computed.
    """
    entry = checkpoint.entry(tensor.source)
    source = opened[checkpoint.shard_of(tensor.source)]
    if tensor.recipe == "copy":
        yield from source.pieces(entry.start, entry.stop)
    else:
        from megatron_xorl.convert.computed import computed

        yield from computed(
            tensor.recipe, tensor.source, tensor.dtype, checkpoint, source.handle, block
        )
