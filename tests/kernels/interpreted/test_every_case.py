"""Every kernel at every small shape, in every output dtype, within its limit of the fp64 reference on the same inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_xorl.kernels.shapes import Case, cases
from megatron_xorl.kernels.subjects import Limit, relative, subjects

SUBJECTS = subjects()
# Two roundings to bf16 instead of one: sqrt(2) times the error if they are independent, at most twice.
SEPARATE = 5e-3


def calls() -> Iterator[object]:
    """Every case and dtype; the costliest kernel's second dtype only rounds differently at the end, and is slow."""
    for case in cases("small"):
        for dtype in SUBJECTS[case.kernel].dtypes:
            second = case.kernel == "sparse_mla_backward" and dtype == torch.float32
            name = f"{case.kernel}-{case.label}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(case, dtype, id=name, marks=[pytest.mark.slow] if second else [])


def allowed(case: Case, limit: Limit, dtype: torch.dtype) -> float:
    if dtype == torch.float32 or limit.bf16 == 0:
        return limit.fp32
    return max(limit.bf16, SEPARATE) if case.dims.get("separate") else limit.bf16


@pytest.mark.parametrize(("case", "dtype"), calls())
def test_it_is_its_reference(case: Case, dtype: torch.dtype) -> None:
    subject = SUBJECTS[case.kernel]
    inputs = subject.make(case.dims, "cpu")
    found, expected = subject.run(inputs, dtype), subject.expect(inputs)
    assert set(found) == set(expected) == set(subject.limits)
    for name, limit in subject.limits.items():
        error = relative(found[name], expected[name])
        report(case, name, dtype, error)
        assert error <= allowed(case, limit, dtype), f"{name}: {error:.2e}"


def report(case: Case, name: str, dtype: torch.dtype, error: float) -> None:
    """Append the measured error to the file that ``KERNEL_ERRORS`` names, for the table in docs/kernels.md."""
    if path := os.environ.get("KERNEL_ERRORS"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{case.kernel}\t{case.label}\t{name}\t{dtype}\t{error:.2e}\n")


def test_a_wrong_scale_would_be_seen() -> None:
    subject = SUBJECTS["linear"]
    inputs = subject.make(dict(cases("small")[0].dims), "cpu")
    found = subject.run(inputs, torch.float32)["y"]
    codes, scales = inputs["weight"]
    inputs["weight"] = (codes, scales.roll(1, 1))
    assert relative(found, subject.expect(inputs)["y"]) > 0.1


def test_an_unwritten_element_would_be_seen() -> None:
    assert relative(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert relative(torch.tensor([1.0, float("inf")]), torch.ones(2)) == float("inf")
