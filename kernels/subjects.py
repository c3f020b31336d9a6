"""How each kernel of :mod:`megatron_xorl.kernels.shapes` is fed, run, judged and counted.

One idea: a subject knows four things about its kernel (inputs of a shape, the call, the same in fp64 on the same quantised
inputs, and what it costs), so that the tests in the interpreter, the list of variants to compile and the benchmark on a GPU are
three loops over the same table.

Limits are relative L2 errors against fp64. ``fp32`` and ``bf16`` hold in the interpreter, by dtype of the output: fp32 sums of a
few hundred terms stay near 2^-24 * sqrt(depth); a bf16 output adds a rounding of at most 2^-9 of each value, 1.7e-3 in L2 over
values of all mantissas. ``gpu`` is wider where the matrix instruction sums with less than fp32 precision: ``diff`` is
``1 - 2<x, y> / (|x|^2 + |y|^2)``, as DeepGEMM and FlashMLA test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["EXACT", "Limit", "Subject", "difference", "relative", "subjects"]

Dims = dict[str, int]
Inputs = dict[str, Any]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Limit:
    """Allowed errors of one output; 0 means bit for bit, ``gpu`` is ``(relative or diff, value)``."""

    fp32: float
    bf16: float
    gpu: tuple[str, float]


EXACT = Limit(0.0, 0.0, ("relative", 0.0))


@dataclass(frozen=True)
class Subject:
    """What the three loops need of a kernel; ``flop`` and ``traffic`` are counts of one call, traffic in bytes."""

    make: Callable[[Dims, str], Inputs]
    run: Callable[[Inputs, torch.dtype], Outputs]
    expect: Callable[[Inputs], Outputs]
    limits: dict[str, Limit]
    flop: Callable[[Dims], float]
    traffic: Callable[[Dims], float]
    rate: str = "bf16"
    """Which peak the products run at: ``fp8``, ``bf16``, or ``none``."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    """Dtypes an output can have, first the one that a training run uses; one entry where there is no choice."""


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error; infinities must stand in the same places, and any NaN is an infinite error."""
    a, b = found.double(), expected.double()
    same = torch.equal(a.isinf(), b.isinf()) and torch.equal(a[a.isinf()], b[b.isinf()])
    if not same or a.isnan().any() or b.isnan().any():
        return float("inf")
    finite = ~b.isinf()
    a, b = a[finite], b[finite]
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def difference(found: Tensor, expected: Tensor) -> float:
    """``1 - 2<x, y> / (|x|^2 + |y|^2)``; infinities and NaN as in :func:`relative`."""
    if relative(found, expected) == float("inf"):
        return float("inf")
    a, b = found.double(), expected.double()
    finite = ~b.isinf()
    a, b = a[finite], b[finite]
    return float(1 - 2 * (a * b).sum() / (a.square().sum() + b.square().sum()).clamp(min=1e-300))


def subjects() -> dict[str, Subject]:
    """Every subject by the kernel's name in :mod:`megatron_xorl.kernels.shapes`."""
    from megatron_xorl.kernels import attention_subjects, linear_subjects

    return {**linear_subjects.SUBJECTS, **attention_subjects.SUBJECTS}
