"""A frozen linear with LoRA as one function: its values and gradients, what it keeps, and what a zero adapter changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron_xorl.fp8.engine import Backend
from megatron_xorl.fp8.linear import (
    LoraOperand,
    adapted_linear,
    frozen_linear,
    lora_add,
    lora_shrink,
)
from megatron_xorl.fp8.weight import FrozenWeight
from tests.fp8.weights import frozen, inputs, relative

DTYPES = [torch.float32, torch.bfloat16]
# As for the base: fp32 1e-6. In bf16 the base is rounded before the adapter is added and t, u are rounded: three roundings of at
# most 2^-9 each, uniform, so 3^0.5 * 2^-9 / 3^0.5 beside the weight's own.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
ROWS, COLUMNS, RANK = 144, 128, 5


def _operands(
    dtype: torch.dtype, *, zero_b: bool = False, trains: bool = True
) -> list[LoraOperand]:
    """Two adapters on two of three row ranges, as gate and up of a fused base."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for slot in (slice(0, 48), slice(96, 144)):
        a = torch.randn(RANK, COLUMNS, generator=draw) / COLUMNS**0.5
        b = torch.randn(48, RANK, generator=draw) * (0 if zero_b else 1)
        pair = [nn.Parameter(f.to(dtype), requires_grad=trains) for f in (a, b)]
        found.append(LoraOperand(pair[0], pair[1], 1.7, slot))
    return found


def _in_halves(x: Tensor, weight: FrozenWeight, adapters: list[LoraOperand]) -> Tensor:
    y = frozen_linear(x, weight)
    for one in adapters:
        y = lora_add(y, lora_shrink(x, one.a, one.scale), one.b, one.slot)
    return y


def _exact(x: Tensor, exact: Tensor, adapters: list[LoraOperand], factors: list[Tensor]) -> Tensor:
    y = x @ exact.T
    for one, a, b in zip(adapters, factors[::2], factors[1::2], strict=True):
        delta = torch.zeros_like(y)
        delta[..., one.slot] = x @ a.T @ b.T * one.scale
        y = y + delta
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", [adapted_linear, _in_halves], ids=["one function", "halves"])
def test_outputs_and_every_gradient_equal_autograd_in_fp64(
    backend: Backend, dtype: torch.dtype, form: object
) -> None:
    weight, exact = frozen((ROWS, COLUMNS), (32, 32), dtype)
    x = inputs(3, 7, COLUMNS, dtype=dtype)
    adapters = _operands(dtype)
    factors = [f for one in adapters for f in (one.a, one.b)]
    y = form(x, weight, adapters)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = torch.autograd.grad(y, [x, *factors], dy)
    wide = [f.detach().double().requires_grad_() for f in (x, *factors)]
    expected_y = _exact(wide[0], exact, adapters, wide[1:])
    expected = torch.autograd.grad(expected_y, wide, dy.double())
    assert relative(y, expected_y) <= LIMITS[dtype]
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype and relative(got, want) <= LIMITS[dtype]


def test_an_adapter_on_the_neighbour_s_rows_is_seen(backend: Backend) -> None:
    weight, exact = frozen((ROWS, COLUMNS), (32, 32), torch.float32)
    x = inputs(9, COLUMNS, dtype=torch.float32)
    adapters = _operands(torch.float32)
    factors = [f.detach().double() for one in adapters for f in (one.a, one.b)]
    moved = [
        LoraOperand(o.a, o.b, o.scale, slice(o.slot.start % 96 + 1, o.slot.start % 96 + 49))
        for o in adapters
    ]
    expected = _exact(x.detach().double(), exact, adapters, factors)
    assert relative(adapted_linear(x, weight, moved), expected) > 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("trains", [True, False], ids=["trainable", "frozen"])
def test_a_zero_adapter_leaves_the_base_s_bits(
    backend: Backend, dtype: torch.dtype, trains: bool
) -> None:
    weight, _ = frozen((ROWS, COLUMNS), (32, 32), dtype)
    for rows in (1, 7, 33):
        x = inputs(rows, COLUMNS, dtype=dtype)
        y = adapted_linear(x, weight, _operands(dtype, zero_b=True, trains=trains))
        base = frozen_linear(x, weight)
        assert torch.equal(y, base)
        dy = torch.ones_like(y)
        assert torch.equal(*(torch.autograd.grad(out, x, dy)[0] for out in (y, base)))
    y = adapted_linear(x, weight, _operands(dtype))
    assert not torch.equal(y, base)


@pytest.mark.parametrize("form", [adapted_linear, _in_halves], ids=["one function", "halves"])
def test_every_trainable_factor_has_a_gradient_without_a_token(
    backend: Backend, form: object
) -> None:
    weight, _ = frozen((ROWS, COLUMNS), (32, 32), torch.float32)
    adapters = _operands(torch.float32)
    form(inputs(0, COLUMNS, dtype=torch.float32), weight, adapters).sum().backward()
    for one in adapters:
        assert one.a.grad is not None and not one.a.grad.count_nonzero()
        assert one.b.grad is not None and not one.b.grad.count_nonzero()


def _saved_bytes(form: object, x: Tensor, weight: FrozenWeight, adapters: list[LoraOperand]) -> int:
    """Bytes of what autograd keeps, each storage once, parameters not counted."""
    kept: dict[int, int] = {}
    own = {f.data_ptr() for one in adapters for f in (one.a, one.b)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        form(x, weight, adapters)
    return sum(kept.values())


@pytest.mark.parametrize("form", [adapted_linear, _in_halves], ids=["one function", "halves"])
def test_saved_for_backward_are_the_input_and_the_rank_r_products(
    backend: Backend, form: object
) -> None:
    weight, _ = frozen((ROWS, COLUMNS), (32, 32), torch.bfloat16)
    x = inputs(64, COLUMNS, dtype=torch.bfloat16)
    size = x.element_size()
    assert _saved_bytes(form, x, weight, _operands(torch.bfloat16)) == 64 * size * (
        COLUMNS + 2 * RANK
    )
    assert _saved_bytes(form, x, weight, _operands(torch.bfloat16, trains=False)) == 0
    assert _saved_bytes(form, x, weight, []) == 0
    # The plain form keeps more, and this count sees it: a scaled product and the dequantised weight.
    dense = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    plain = lambda x, w, o: x @ dense.T  # noqa: E731
    assert _saved_bytes(plain, x, weight, []) == dense.nbytes
