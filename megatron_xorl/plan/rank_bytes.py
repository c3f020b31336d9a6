"""Parameters and bytes of what one rank holds of the base, region by region.

The one idea: a frozen weight is held in the bytes of its file, so a rank's share costs what its codes, scales and unquantised
elements cost, and nothing else. Which tensors those are is the caller's question (``weights.placement``); the same sums are
taken of real modules (``training.meta_model``), so that the two can be compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_xorl.plan.checkpoint_bytes import Row

__all__ = ["Held", "differences", "held", "held_by", "held_report"]


@dataclass(frozen=True, slots=True)
class Held:
    """``parameters`` are elements of the model (scales are none); the others are bytes."""

    parameters: int = 0
    fp8_codes: int = 0
    fp8_scales: int = 0
    bf16: int = 0
    fp32: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.fp8_codes + self.fp8_scales + self.bf16 + self.fp32

    def __add__(self, other: Held) -> Held:
        return Held(
            self.parameters + other.parameters,
            self.fp8_codes + other.fp8_codes,
            self.fp8_scales + other.fp8_scales,
            self.bf16 + other.bf16,
            self.fp32 + other.fp32,
        )

    def __str__(self) -> str:
        parts = [f"{self.parameters:,} parameters"]
        parts += [f"{size:,} bytes {name}" for name, size in self.bytes_by_form().items() if size]
        return ", ".join(parts)

    def bytes_by_form(self) -> dict[str, int]:
        """``{fp8_codes, fp8_scales, bf16, fp32}``."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "parameters"
        }


def held(row: Row) -> Held:
    """Return what one tensor, or a rank's part of it, costs; an unquantised weight is held in the dtype of its file."""
    elements = math.prod(row.shape)
    if row.scale_shape is not None:
        return Held(elements, fp8_codes=elements, fp8_scales=4 * math.prod(row.scale_shape))
    if row.dtype == "fp32":
        return Held(elements, fp32=4 * elements)
    return Held(elements, bf16=2 * elements)


def held_by[T: Row](rows: Iterable[T], key: Callable[[T], str]) -> dict[str, Held]:
    """Return the sums of ``rows`` that share a ``key``, in order of first appearance."""
    examples: dict[tuple[object, ...], T] = {}
    counts: dict[str, Counter[tuple[object, ...]]] = {}
    for row in rows:
        kind = (row.shape, row.scale_shape, row.dtype)
        examples.setdefault(kind, row)
        counts.setdefault(key(row), Counter())[kind] += 1
    return {
        name: sum((_times(held(examples[kind]), n) for kind, n in group.items()), Held())
        for name, group in counts.items()
    }


def _times(one: Held, number: int) -> Held:
    return Held(*(getattr(one, field.name) * number for field in fields(one)))


def held_report(by_region: Mapping[str, Held]) -> dict[str, Any]:
    """Return ``parameters`` and ``bytes``, each with ``total`` and ``by_region``; ``bytes`` by form too."""
    total = sum(by_region.values(), Held())
    return {
        "parameters": {
            "total": total.parameters,
            "by_region": {region: item.parameters for region, item in by_region.items()},
        },
        "bytes": {
            "total": total.total,
            **total.bytes_by_form(),
            "by_region": {region: item.bytes_by_form() for region, item in by_region.items()},
        },
    }


def differences(expected: Mapping[str, Held], found: Mapping[str, Held]) -> tuple[str, ...]:
    """Return a sentence for every name whose sums differ, and for every name that only one side has."""
    faults = []
    for name in [*expected, *(name for name in found if name not in expected)]:
        if name not in found:
            faults.append(f"{name}: {expected[name]} by arithmetic, the modules have none")
        elif name not in expected:
            faults.append(f"{name}: {found[name]} in the modules, none by arithmetic")
        elif expected[name] != found[name]:
            faults.append(f"{name}: {expected[name]} by arithmetic, {found[name]} in the modules")
    return tuple(faults)
