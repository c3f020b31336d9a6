"""Planted faults: the sanitizer sees each, and lets the correct kernel pass."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _copy(x, y, size, stride, MASK_LOAD: tl.constexpr, MASK_STORE: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, N)
    value = tl.load(x + at, mask=at < size, other=0.0) if MASK_LOAD else tl.load(x + at)
    tl.store(y + at, value, mask=at < size) if MASK_STORE else tl.store(y + at, value)


@triton.jit
def _sum(x, y, size, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y, tl.sum(tl.load(x + at, mask=at < size), 0))


@triton.jit
def _neighbour(x, N: tl.constexpr):
    me = tl.program_id(0)
    tl.store(x + me, tl.load(x + (me + 1) % N) + 1)


@triton.jit
def _add(x, index, N: tl.constexpr, ATOMIC: tl.constexpr):
    at = tl.load(index + tl.program_id(0) * N + tl.arange(0, N))
    one = tl.full((N,), 1.0, tl.float32)
    tl.atomic_add(x + at, one) if ATOMIC else tl.store(x + at, one)


def copy(size: int, *, load: bool = True, store: bool = True, stride: int = 16) -> torch.Tensor:
    x = torch.arange(64.0)[:size]
    y = torch.zeros(64)[:size]
    _copy[(-(-size // 16),)](x, y, size, stride, MASK_LOAD=load, MASK_STORE=store, N=16)
    return y


def test_a_masked_copy_passes() -> None:
    assert torch.equal(copy(40), torch.arange(40.0))


@pytest.mark.parametrize("which", ["load", "store"])
def test_a_lane_past_the_end_of_a_view_is_caught(which: str) -> None:
    with pytest.raises(InterpreterError, match=f"out of bounds: a {which} of 8 of 16 lanes"):
        copy(40, **{which: False})


def test_a_lane_between_strided_rows_is_caught() -> None:
    x = torch.zeros(4, 32)[:, :16]
    with pytest.raises(InterpreterError, match="out of bounds"):
        _copy[(4,)](x, torch.zeros(64), 64, 16, MASK_LOAD=True, MASK_STORE=True, N=16)


def test_programs_that_overlap_are_caught() -> None:
    with pytest.raises(InterpreterError, match="race: program 1 overwrites"):
        copy(40, stride=8)


def test_reading_what_another_program_writes_is_caught() -> None:
    with pytest.raises(InterpreterError, match="race"):
        _neighbour[(8,)](torch.zeros(8), N=8)


def test_lanes_of_one_store_that_collide_are_caught_and_atomics_are_not() -> None:
    index = torch.tensor([0, 1, 1, 2] * 2, dtype=torch.int32)
    with pytest.raises(InterpreterError, match="two lanes"):
        _add[(1,)](torch.zeros(4), index, N=4, ATOMIC=False)
    x = torch.zeros(4)
    _add[(2,)](x, index, N=4, ATOMIC=True)
    assert x.tolist() == [2, 4, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_load_without_other_is_poisoned(dtype: torch.dtype) -> None:
    y = torch.zeros(1, dtype=dtype)
    _sum[(1,)](torch.ones(16, dtype=dtype), y, 10, N=16)
    assert y.isnan()
