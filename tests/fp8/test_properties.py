"""What holds bit for bit: groups and experts, runs, batches; what does not hold is what a wrong tile would do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_xorl.fp8 import cpu, engine
from megatron_xorl.fp8.cpu import CpuBackend
from megatron_xorl.fp8.engine import Backend, use_fp8
from megatron_xorl.fp8.format import dequantize_activations, quantize_activations
from megatron_xorl.fp8.linear import frozen_grouped_linear, frozen_linear
from megatron_xorl.fp8.native import BF16, FP32, FP32_OF_BF16, Library
from megatron_xorl.fp8.weight import FrozenWeight
from tests.fp8.weights import frozen, inputs, relative

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LIMITS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.5e-3}


def _both(product: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    y = product(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def _expert(bank: FrozenWeight, index: int) -> FrozenWeight:
    one = FrozenWeight(bank.shape[1:], block=bank.block, dtype=bank.dtype)
    one.set_quantized(bank.codes[index].clone(), bank.scales[index].clone(), bank.block)
    return one


@DTYPES
def test_a_group_has_the_bits_of_its_expert_alone(backend: Backend, dtype: torch.dtype) -> None:
    counts = [5, 0, 40, 1]
    bank, _ = frozen((4, 144, 100), (32, 32), dtype)
    x = inputs(sum(counts), 100, dtype=dtype)
    found = _both(lambda t: frozen_grouped_linear(t, bank, counts), x)
    y = torch.cat([frozen_linear(part, _expert(bank, e)) for e, part in enumerate(x.split(counts))])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    assert torch.equal(found[0], y) and torch.equal(found[1], torch.autograd.grad(y, x, dy)[0])


@DTYPES
def test_two_runs_have_the_same_bits(backend: Backend, dtype: torch.dtype) -> None:
    weight, _ = frozen((576, 200), (128, 128), dtype)
    first, second = (
        _both(lambda t: frozen_linear(t, weight), inputs(37, 200, dtype=dtype)) for _ in range(2)
    )
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@DTYPES
@pytest.mark.parametrize("mode", ["w8a16", "w8a8"])
def test_a_row_s_bits_do_not_depend_on_its_batch(
    dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cpu.get_capabilities().get("amx_bf16"):  # not claimed for AMX tiles
        monkeypatch.setattr(engine, "_cpu", lambda device: CpuBackend(native_bf16=False))
    use_fp8(backend="cpu", mode=mode)
    weight, _ = frozen((576, 1100), (128, 128), dtype)  # several steps along both axes
    x = inputs(300, 1100, dtype=dtype)
    whole = _both(lambda t: frozen_linear(t, weight), x)
    for start, stop in [(0, m) for m in (*range(1, 18), 63, 127, 200, 299)] + [(7, 8), (100, 260)]:
        part = x.detach()[start:stop].clone().requires_grad_()
        y = frozen_linear(part, weight)
        dy = torch.randn(300, 576, generator=torch.Generator().manual_seed(9)).to(dtype)[start:stop]
        (dx,) = torch.autograd.grad(y, part, dy)
        assert torch.equal(y, whole[0][start:stop]) and torch.equal(dx, whole[1][start:stop]), (
            start,
            stop,
        )


def test_without_padding_a_few_rows_would_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fp8(backend="cpu")
    weight, _ = frozen((576, 1100), (128, 128), torch.float32)
    x = inputs(300, 1100, dtype=torch.float32)
    whole = frozen_linear(x, weight)
    monkeypatch.setattr(cpu, "MIN_ROWS", 1)
    assert not all(torch.equal(frozen_linear(x[:m], weight), whole[:m]) for m in range(1, 8))


@pytest.mark.parametrize("dtype", LIMITS, ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("columns", [256, 200])
def test_w8a8_multiplies_the_quantised_activations_and_keeps_dx(
    backend: Backend, dtype: torch.dtype, columns: int
) -> None:
    weight, exact = frozen((144, columns), (32, 32), dtype)
    x = inputs(20, columns, dtype=dtype)
    plain_dx = _both(lambda t: frozen_linear(t, weight), x)[1]
    use_fp8(backend=backend.name, mode="w8a8")
    y, dx = _both(lambda t: frozen_linear(t, weight), x)
    values = dequantize_activations(*quantize_activations(x.detach()), torch.float64)
    assert relative(y, values @ exact.T) <= LIMITS[dtype]
    assert relative(y, x.double() @ exact.T) > 1e-2  # not the activations themselves
    assert torch.equal(dx, plain_dx)
    dense, _ = frozen((144, columns), None, dtype)
    y_dense = frozen_linear(x, dense)
    use_fp8(backend=backend.name, mode="w8a16")
    assert torch.equal(y_dense, frozen_linear(x, dense))  # a dense weight knows no mode


@DTYPES
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_tensor_parallel_slices_give_the_whole_product(
    backend: Backend, dtype: torch.dtype, axis: int
) -> None:
    whole, exact = frozen((256, 256), (64, 64), dtype)
    x = inputs(10, 256, dtype=dtype)
    parts, gradients = [], []
    for codes, scales in zip(whole.codes.chunk(2, axis), whole.scales.chunk(2, axis), strict=True):
        one = FrozenWeight(tuple(codes.shape), block=(64, 64), dtype=dtype)
        one.set_quantized(codes, scales, (64, 64))  # views: rows further apart than they are long
        own = x if axis == 0 else x.chunk(2, dim=1)[len(parts)]
        y = frozen_linear(own, one)
        parts.append(y)
        gradients.append(torch.autograd.grad(y.double().sum(), x, retain_graph=True)[0].double())
    y = torch.cat(parts, 1) if axis == 0 else sum(part.double() for part in parts)
    # A sum of two rounded halves has up to 2^0.5 times the rounding of one.
    assert relative(y, x.double() @ exact.T) <= 1.5 * LIMITS[dtype]
    assert relative(sum(gradients), exact.sum(0).expand(10, 256)) <= 1.5 * LIMITS[dtype]


# ---- faults that a tile could have, seen by the comparison with fp64 --------------------------------


def _ignored(codes: Tensor, scales: Tensor, **at: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return codes, torch.ones_like(scales), at


def _neighbour(codes: Tensor, scales: Tensor, **at: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return codes, scales.roll(1, 1).contiguous(), at


def _off_by_one(codes: Tensor, scales: Tensor, **at: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    cols = at["cols"]
    shift = 1 if cols.start else 0  # only tiles that do not begin at the first column
    return codes, scales, at | {"cols": slice(cols.start - shift, cols.stop - shift)}


@pytest.mark.parametrize("fault", [_ignored, _neighbour, _off_by_one])
def test_a_faulty_tile_is_seen(
    fault: Callable[..., tuple[Tensor, Tensor, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fp8(backend="cpu")
    weight, exact = frozen((144, 2500), (32, 32), torch.float32)
    x = inputs(20, 2500, dtype=torch.float32)
    assert relative(frozen_linear(x, weight), x.double() @ exact.T) <= 1e-6
    real = Library.dequantize

    def faulty(
        self: Library, codes: Tensor, scales: Tensor, block: Any, out: Tensor, **at: Any
    ) -> None:
        codes, scales, at = fault(codes, scales, **at)
        real(self, codes, scales, block, out, **at)

    monkeypatch.setattr(Library, "dequantize", faulty)
    assert relative(frozen_linear(x, weight), x.double() @ exact.T) > 1e-2


def test_a_second_rounding_of_the_weight_is_seen_in_its_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding the scale to bf16 before the product is seen here alone, by bits.

    It adds an error no larger than the one rounding that is due, so the rel-L2 limit of 2.5e-3 against fp64 lets it pass, as the
    last lines show: whoever replaces this comparison by a tolerance loses the contract's "rounded once".
    """
    backend = CpuBackend(native_bf16=False)
    weight, exact = frozen((144, 96), (32, 32), torch.bfloat16)
    identity = torch.eye(96, dtype=torch.bfloat16)
    out = torch.empty(96, 144, dtype=torch.bfloat16)
    backend.linear(identity, weight, out, mode="w8a16")
    tile = weight.tile(torch.bfloat16, rows=slice(0, 144), cols=slice(0, 96))
    assert torch.equal(out.t(), tile)  # one rounding: exactly what the reference's tile holds
    real = Library.dequantize

    def twice(
        self: Library, codes: Tensor, scales: Tensor, block: Any, out: Tensor, **at: Any
    ) -> None:
        real(self, codes, scales.bfloat16().float(), block, out, **at)

    monkeypatch.setattr(Library, "dequantize", twice)
    backend.linear(identity, weight, out, mode="w8a16")
    assert not torch.equal(out.t(), tile)
    assert relative(out.t(), exact) <= LIMITS[torch.bfloat16]


def test_bf16_values_in_fp32_storage_and_bf16_tiles_are_the_same_numbers() -> None:
    weight, _ = frozen((144, 96), (32, 32), torch.bfloat16)
    native = CpuBackend()._native
    at: dict[str, Any] = {"rows": slice(0, 144), "cols": slice(0, 96)}
    narrow, wide, exact = (
        torch.empty(144, 96, dtype=torch.bfloat16),
        torch.empty(144, 96),
        torch.empty(144, 96),
    )
    for out, kind in ((narrow, BF16), (wide, FP32_OF_BF16), (exact, FP32)):
        native.dequantize(weight.codes, weight.scales, (32, 32), out, kind=kind, **at)
    assert torch.equal(narrow.float(), wide) and torch.equal(exact.bfloat16(), narrow)


# ---- few rows, few columns, odd addresses -----------------------------------------------------------


def _few_columns(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """``x A^T`` of a small rank: from the whole, row by row, and into memory that begins anywhere."""
    backend, draw = CpuBackend(native_bf16=False), torch.Generator().manual_seed(rank)
    x, a = (torch.randn(n, 100, generator=draw) for n in (64, rank))
    whole, parts, moved = (torch.empty(64 * rank + 1)[i:][: 64 * rank].view(64, rank) for i in (0, 0, 1))  # fmt: skip
    backend.shrink(x, a, 1.5, whole)
    backend.shrink(x, a, 1.5, moved)
    for start, stop in itertools.pairwise([0, 1, 4, 21, 64]):
        backend.shrink(x[start:stop], a, 1.5, parts[start:stop])
    return whole, parts, moved


@pytest.mark.parametrize("rank", [1, 2, 4, 5, 8, 16])
def test_a_small_rank_s_bits_depend_neither_on_the_batch_nor_on_the_address(rank: int) -> None:
    whole, parts, moved = _few_columns(rank)
    assert torch.equal(whole, parts) and torch.equal(whole, moved)


def test_without_padded_columns_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_COLUMNS", 1)
    found = [_few_columns(rank) for rank in (1, 2, 4, 5, 8)]
    assert not all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in found)


@DTYPES
@pytest.mark.parametrize("native", [False, True], ids=["fp32 GEMM", "bf16 GEMM"])
def test_more_tokens_than_a_padded_copy_has_room_for(dtype: torch.dtype, native: bool) -> None:
    """A gradient contracts all tokens, and a rank below 8 is padded: 140,000 of them fill no region of the scratch beyond."""
    backend, tokens = CpuBackend(native_bf16=native), 140_000
    left, right = (inputs(tokens, n, dtype=dtype, seed=n).detach() for n in (4, 20))
    limit = LIMITS[dtype]
    for a, b in ((left, right), (right, left)):
        out = torch.empty(a.shape[1], b.shape[1], dtype=dtype)
        backend.factor_gradient(a, b, out)
        assert relative(out, a.double().t() @ b.double()) <= limit
    factor, out = right[:4].contiguous(), torch.empty(tokens, 4, dtype=dtype)
    backend.shrink(right, factor, 1.0, out)
    assert relative(out, right.double() @ factor.double().t()) <= limit
