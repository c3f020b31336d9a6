"""Tensors, parameters and bytes of a base checkpoint, region by region, from its name table.

The one idea: the table says what the file holds, so nothing has to be opened. A quantised weight
costs one byte an element and four bytes a block; its scales are tensors of the file, but not
parameters of the model, and are counted apart: GLM-5.2 has 59,585 tensors, in BF16 and in FP8.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["Row", "checkpoint_bytes"]

_BYTES = {"fp8": 1, "bf16": 2, "fp32": 4}
_SCALE_BYTES = 4  # weight_scale_inv is float32


class Row(Protocol):
    """What this file needs to know of one tensor: its shape, dtype, region, and the shape of its scales."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""

    @property
    def dtype(self) -> str:
        """``fp8``, ``bf16`` or ``fp32``."""

    @property
    def region(self) -> str:
        """An adapter region, or embedding, norm, indexer, router, mtp."""

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of the block scales, None for a tensor without."""


def checkpoint_bytes(rows: Iterable[Row]) -> dict[str, Any]:
    """Return ``hf_tensors``, ``scale_tensors`` beside them, and ``parameters`` and ``bytes``, each ``{total, by_region}``."""
    kinds = Counter((row.region, row.dtype, row.shape, row.scale_shape) for row in rows)
    scale_tensors = sum(number for (*_, scales), number in kinds.items() if scales is not None)
    parameters: dict[str, int] = {}
    size: dict[str, int] = {}
    for (region, dtype, shape, scale_shape), number in kinds.items():
        elements = math.prod(shape) * number
        scales = 0 if scale_shape is None else math.prod(scale_shape) * number
        parameters[region] = parameters.get(region, 0) + elements
        size[region] = size.get(region, 0) + elements * _BYTES[dtype] + scales * _SCALE_BYTES
    return {
        "hf_tensors": kinds.total(),
        "scale_tensors": scale_tensors,
        "parameters": {"total": sum(parameters.values()), "by_region": parameters},
        "bytes": {"total": sum(size.values()), "by_region": size},
    }
