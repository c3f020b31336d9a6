"""LoRA on an expert bank: values and gradients against fp64, bits against one expert at a time, what is kept."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from megatron_xorl.errors import AdapterError, LayoutError
from megatron_xorl.fp8.engine import Backend, use_fp8
from megatron_xorl.fp8.linear import (
    LoraOperand,
    adapted_grouped_linear,
    adapted_linear,
    frozen_grouped_linear,
)
from megatron_xorl.fp8.weight import FrozenWeight
from tests.fp8.weights import frozen, inputs, relative

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # as in test_adapted
ROWS, COLUMNS, RANK = 144, 100, 5
COUNTS = [5, 0, 20, 1]
FACTORS = {"A shared": (1, 4), "B shared": (4, 1), "both own": (4, 4), "both shared": (1, 1)}
KINDS = pytest.mark.parametrize("experts", FACTORS.values(), ids=FACTORS)


def _operands(
    experts: tuple[int, int], dtype: torch.dtype, *, trains: bool = True
) -> list[LoraOperand]:
    """Two adapters on two of three row ranges, as gate and up of a fused bank."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for slot in (slice(0, 48), slice(96, 144)):
        a = torch.randn(experts[0], RANK, COLUMNS, generator=draw) / COLUMNS**0.5
        b = torch.randn(experts[1], 48, RANK, generator=draw)
        pair = [nn.Parameter(f.to(dtype), requires_grad=trains) for f in (a, b)]
        found.append(LoraOperand(pair[0], pair[1], 1.7, slot))
    return found


def _factors(adapters: list[LoraOperand]) -> list[Tensor]:
    return [factor for one in adapters for factor in (one.a, one.b)]


def _gradient(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)


def _exact(x: Tensor, exact: Tensor, adapters: list[LoraOperand], factors: list[Tensor]) -> Tensor:
    """Plain fp64 products, each row with the matrices of its expert."""
    rows = []
    for row, expert in zip(x, torch.arange(4).repeat_interleave(torch.tensor(COUNTS)), strict=True):
        y = exact[expert] @ row
        for one, a, b in zip(adapters, factors[::2], factors[1::2], strict=True):
            own_a, own_b = (f[expert if f.shape[0] > 1 else 0] for f in (a, b))
            delta = torch.zeros_like(y)
            delta[one.slot] = own_b @ (own_a @ row) * one.scale
            y = y + delta
        rows.append(y)
    return torch.stack(rows)


@DTYPES
@KINDS
def test_outputs_and_every_gradient_equal_autograd_in_fp64(
    backend: Backend, dtype: torch.dtype, experts: tuple[int, int]
) -> None:
    bank, exact = frozen((4, ROWS, COLUMNS), (32, 32), dtype)
    x = inputs(sum(COUNTS), COLUMNS, dtype=dtype)
    adapters = _operands(experts, dtype)
    y = adapted_grouped_linear(x, bank, COUNTS, adapters)
    dy = _gradient(y)
    found = torch.autograd.grad(y, [x, *_factors(adapters)], dy)
    wide = [f.detach().double().requires_grad_() for f in (x, *_factors(adapters))]
    expected_y = _exact(wide[0], exact, adapters, wide[1:])
    expected = torch.autograd.grad(expected_y, wide, dy.double())
    assert relative(y, expected_y.detach()) <= LIMITS[dtype]
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype and relative(got, want) <= LIMITS[dtype]
    for gradient in found[1:]:
        if gradient.shape[0] > 1:
            assert not gradient[1].count_nonzero() and gradient[[0, 2, 3]].count_nonzero()


def test_a_factor_of_the_neighbour_s_expert_is_seen(backend: Backend) -> None:
    bank, exact = frozen((4, ROWS, COLUMNS), (32, 32), torch.float32)
    x = inputs(sum(COUNTS), COLUMNS, dtype=torch.float32)
    adapters = _operands((1, 4), torch.float32)
    moved = [dataclasses.replace(one, b=one.b.roll(1, 0)) for one in adapters]
    factors = [factor.detach().double() for factor in _factors(adapters)]
    expected = _exact(x.detach().double(), exact, adapters, factors)
    assert relative(adapted_grouped_linear(x, bank, COUNTS, moved), expected) > 1e-2


def _alone(x: Tensor, bank: FrozenWeight, adapters: list[LoraOperand]) -> Tensor:
    """Each expert as a weight of its own with ordinary two-dimensional adapters."""
    parts = []
    for expert, part in enumerate(x.split(COUNTS)):
        one = FrozenWeight(bank.shape[1:], block=bank.block, dtype=bank.dtype)
        one.set_quantized(bank.codes[expert], bank.scales[expert], bank.block)
        own = [
            LoraOperand(*(f[expert if f.shape[0] > 1 else 0] for f in (o.a, o.b)), o.scale, o.slot)
            for o in adapters
        ]
        parts.append(adapted_linear(part, one, own))
    return torch.cat(parts)


@DTYPES
@KINDS
@pytest.mark.parametrize("mode", ["w8a16", "w8a8"])
def test_each_expert_has_the_bits_of_an_adapted_linear_of_its_own(
    backend: Backend, dtype: torch.dtype, experts: tuple[int, int], mode: str
) -> None:
    use_fp8(backend=backend.name, mode=mode)
    bank, _ = frozen((4, ROWS, COLUMNS), (32, 32), dtype)
    x = inputs(sum(COUNTS), COLUMNS, dtype=dtype)
    adapters = _operands(experts, dtype)
    found = []
    for form in (lambda: adapted_grouped_linear(x, bank, COUNTS, adapters), lambda: _alone(x, bank, adapters)):  # fmt: skip
        y = form()
        found.append((y, *torch.autograd.grad(y, [x, *_factors(adapters)], _gradient(y))))
    for got, want in zip(*found, strict=True):
        # A shared factor's gradient is one sum over all rows here and a sum of rounded sums there: not the same bits.
        assert torch.equal(got, want) or (got.ndim == 3 and got.shape[0] == 1)
        assert relative(got, want) <= LIMITS[dtype]


@DTYPES
def test_a_zero_b_leaves_the_bank_s_bits_and_another_does_not(
    backend: Backend, dtype: torch.dtype
) -> None:
    bank, _ = frozen((4, ROWS, COLUMNS), (32, 32), dtype)
    x = inputs(sum(COUNTS), COLUMNS, dtype=dtype)
    adapters = _operands((1, 4), dtype)
    zero = [dataclasses.replace(one, b=torch.zeros_like(one.b)) for one in adapters]
    y, base = adapted_grouped_linear(x, bank, COUNTS, zero), frozen_grouped_linear(x, bank, COUNTS)
    assert torch.equal(y, base)
    assert torch.equal(*(torch.autograd.grad(out, x, _gradient(y))[0] for out in (y, base)))
    assert not torch.equal(adapted_grouped_linear(x, bank, COUNTS, adapters), base)


def test_without_a_token_every_factor_has_a_zero_gradient(backend: Backend) -> None:
    bank, _ = frozen((4, ROWS, COLUMNS), (32, 32), torch.float32)
    adapters = _operands((1, 4), torch.float32)
    x = inputs(0, COLUMNS, dtype=torch.float32)
    adapted_grouped_linear(x, bank, [0] * 4, adapters).sum().backward()
    for factor in _factors(adapters):
        assert factor.grad is not None and not factor.grad.count_nonzero()


def _saved_bytes(x: Tensor, bank: FrozenWeight, adapters: list[LoraOperand]) -> int:
    kept: dict[int, int] = {}
    own = {factor.data_ptr() for factor in _factors(adapters)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adapted_grouped_linear(x, bank, COUNTS, adapters)
    return sum(kept.values())


def test_saved_for_backward_are_the_input_and_the_rank_r_products(backend: Backend) -> None:
    bank, _ = frozen((4, ROWS, COLUMNS), (32, 32), torch.bfloat16)
    x = inputs(sum(COUNTS), COLUMNS, dtype=torch.bfloat16)
    trained = _operands((1, 4), torch.bfloat16)
    assert _saved_bytes(x, bank, trained) == 2 * sum(COUNTS) * (COLUMNS + 2 * RANK)
    only_b = [dataclasses.replace(one, a=one.a.detach()) for one in trained]
    assert _saved_bytes(x, bank, only_b) == 2 * sum(COUNTS) * 2 * RANK
    assert _saved_bytes(x, bank, _operands((1, 4), torch.bfloat16, trains=False)) == 0


@pytest.mark.parametrize(
    ("counts", "experts", "error", "told"),
    [
        ([5, 0, 20], (1, 4), LayoutError, "3 experts with 25 tokens were given for 26 rows"),
        ([5, 0, 20, 0], (1, 4), LayoutError, "4 experts with 25 tokens were given for 26 rows"),
        (COUNTS, (2, 4), AdapterError, r"\(2, 5, 100\); a bank of 4 needs a leading axis of 4"),
    ],
    ids=["an expert missing", "a row missing", "factors of another bank"],
)
def test_what_does_not_fit_the_bank_is_refused(
    counts: list[int], experts: tuple[int, int], error: type[Exception], told: str
) -> None:
    bank, _ = frozen((4, ROWS, COLUMNS), (32, 32), torch.float32)
    x = inputs(26, COLUMNS, dtype=torch.float32)
    with pytest.raises(error, match=told):
        adapted_grouped_linear(x, bank, counts, _operands(experts, torch.float32))
