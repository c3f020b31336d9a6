"""Tensors, parameters and bytes of a base checkpoint, region by region, from its name table.

The one idea: the table says what the file holds, so nothing has to be opened. A quantised weight
costs one byte an element and four bytes a block; its scales are tensors of the file, but not
parameters of the model.
"""

from __future__ import annotations

import math
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
    """Return ``hf_tensors`` (scales included) and ``parameters`` and ``bytes``, each ``{total, by_region}``."""
    tensors = 0
    parameters: dict[str, int] = {}
    size: dict[str, int] = {}
    for row in rows:
        elements = math.prod(row.shape)
        scales = 0 if row.scale_shape is None else math.prod(row.scale_shape)
        tensors += 1 if row.scale_shape is None else 2
        parameters[row.region] = parameters.get(row.region, 0) + elements
        size[row.region] = (
            size.get(row.region, 0) + elements * _BYTES[row.dtype] + scales * _SCALE_BYTES
        )
    return {
        "hf_tensors": tensors,
        "parameters": {"total": sum(parameters.values()), "by_region": parameters},
        "bytes": {"total": sum(size.values()), "by_region": size},
    }
