"""The corrected interpreter equals torch bit for bit: casts, bf16 arithmetic, dots. Fails when Triton's internals move."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels import interpreter

SIZE = 4096


@triton.jit
def _cast(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def _arithmetic(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + N + at, a * b)
    tl.store(out + 2 * N + at, a - b)
    tl.store(out + 3 * N + at, tl.where(a < b, a, b))
    tl.store(out + 4 * N + at, -a)
    tl.store(out + 5 * N + at, tl.abs(a))


@triton.jit
def _reductions(x, out, N: tl.constexpr):
    value = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.max(value, 0))
    tl.store(out + 1, tl.min(value, 0))
    tl.store(out + 2, tl.sum(value.to(tl.float32), 0).to(tl.bfloat16))


@triton.jit
def _dot(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def e4m3_midpoints() -> torch.Tensor:
    """Every e4m3 value, every midpoint between neighbours and the fp32 values beside it, both signs, and what lies beyond."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    up = torch.nextafter(middle, torch.tensor(float("inf")))
    down = torch.nextafter(middle, torch.tensor(0.0))
    odd = torch.tensor([448.0, 463.9, 464.0, 465.0, 1e4, float("inf"), float("nan"), 1e-40, 2**-10])
    values = torch.cat([codes, middle, up, down, odd])
    values = torch.cat([values, -values])
    return torch.nn.functional.pad(values, (0, SIZE - values.numel()))


def random_bits(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (SIZE,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def as_gpu(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize > 1:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(x.isnan(), x, x.clamp(-limit, limit)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN equal to any other."""
    nan = a.float().isnan()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.view(whole) == b.view(whole)
    return torch.equal(nan, b.float().isnan()) and bool((equal | nan).all())


@pytest.mark.parametrize("values", ["midpoints", "random 1", "random 2"])
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_a_cast_rounds_to_nearest_even_and_saturates(target: torch.dtype, values: str) -> None:
    x = e4m3_midpoints() if values == "midpoints" else random_bits(int(values[-1]))
    y = torch.empty(SIZE, dtype=target)
    _cast[(1,)](x, y, N=SIZE)
    assert same_bits(y, as_gpu(x, target))


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.bfloat16])
def test_widening_is_exact(source: torch.dtype) -> None:
    whole = torch.uint8 if source.itemsize == 1 else torch.int16
    x = torch.arange(65536).to(whole).view(source)
    y = torch.empty(65536)
    _cast[(1,)](x, y, N=65536)
    assert same_bits(y, x.float())


def test_e4m3_to_bf16_is_exact() -> None:
    x = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    y = torch.empty(256, dtype=torch.bfloat16)
    _cast[(1,)](x, y, N=256)
    assert same_bits(y, x.to(torch.bfloat16))
    assert same_bits(y.float(), x.float())


def test_bf16_arithmetic_is_torchs() -> None:
    a, b = torch.randn(SIZE).bfloat16(), torch.randn(SIZE).bfloat16()
    out = torch.empty(6, SIZE, dtype=torch.bfloat16)
    _arithmetic[(1,)](a, b, out, N=SIZE)
    for got, expected in zip(out, [a + b, a * b, a - b, torch.minimum(a, b), -a, a.abs()], strict=True):  # fmt: skip
        assert same_bits(got, expected)


def test_bf16_reductions_compare_values_not_bit_patterns() -> None:
    x = torch.randn(SIZE).bfloat16()
    out = torch.empty(3, dtype=torch.bfloat16)
    _reductions[(1,)](x, out, N=SIZE)
    assert out[0] == x.max() and out[1] == x.min()
    # One bf16 ulp: the fp32 sums differ in order.
    torch.testing.assert_close(out[2], x.float().sum().bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_dot_of_small_integers_is_exact(dtype: torch.dtype) -> None:
    a, b = (torch.randint(-8, 9, (64, 64)).float().to(dtype) for _ in range(2))
    c = torch.empty(64, 64)
    _dot[(1,)](a, b, c, N=64)
    assert torch.equal(c, a.float() @ b.float())


def test_a_tf32_dot_is_refused() -> None:
    a = torch.randn(64, 64)
    with pytest.raises(InterpreterError, match="TF32"):
        _dot[(1,)](a, a, torch.empty(64, 64), N=64)


def test_another_triton_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_installed", False)
    monkeypatch.setattr(triton, "__version__", "99.0")
    with pytest.raises(RuntimeError, match=r"99\.0.*raise TRITON_VERSION"):
        interpreter.install()
