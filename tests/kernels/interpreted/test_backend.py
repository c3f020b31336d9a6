"""The engine's ``triton`` backend, kernels interpreted: the layers' products and gradients, against fp64 on the same codes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_xorl.fp8 import engine
from megatron_xorl.fp8.engine import use_fp8
from megatron_xorl.fp8.format import dequantize_activations, quantize_activations
from megatron_xorl.fp8.linear import (
    LoraOperand,
    adapted_grouped_linear,
    adapted_linear,
    frozen_head_matmul,
    frozen_linear,
    lora_add,
    lora_shrink,
)
from megatron_xorl.fp8.triton import _say_once
from megatron_xorl.kernels.subjects import relative
from tests.fp8.weights import frozen

# t and u are rounded to bf16 before they are multiplied, the base before the adapter is added, the result at the end.
LIMIT = 5e-3
BLOCK = (128, 128)


@pytest.fixture(autouse=True, params=["w8a16", "w8a8"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    _say_once.cache_clear()
    assert use_fp8(backend="triton", mode=request.param).backend.name == "triton"
    yield request.param
    engine._asked.backend = engine._asked.mode = None
    engine.engine_on.cache_clear()


def values(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def multiplied(x: Tensor, mode: str) -> Tensor:
    """What the forward multiplies, in fp64."""
    x = x.detach()
    return dequantize_activations(*quantize_activations(x), torch.float64) if mode == "w8a8" else x.double()  # fmt: skip


def adapters(lead: tuple[int, ...], slots: list[slice], k: int, rank: int = 8) -> list[LoraOperand]:
    made = []
    for place, slot in enumerate(slots):
        a = (values(*lead, rank, k) / k**0.5).requires_grad_()
        b = values(
            *(lead if place == 0 else lead[:0] + (1,) * len(lead)), slot.stop - slot.start, rank
        )
        made.append(LoraOperand(a, b.requires_grad_(), 0.5, slot))
    return made


def expected(
    x: Tensor,
    exact: Tensor,
    terms: list[tuple[Tensor, Tensor, float, slice]],
    dy: Tensor,
    mode: str,
) -> list[Tensor]:
    """Output, dX, then dA and dB of each adapter, by autograd in fp64."""
    wide = x.detach().double().requires_grad_()
    factors = [f.detach().double().requires_grad_() for a, b, _, _ in terms for f in (a, b)]
    y = wide @ exact.double().mT
    y = y + (multiplied(x, mode) - wide.detach()) @ exact.double().mT
    for (_, _, scale, slot), (a, b) in zip(terms, itertools.batched(factors, 2), strict=True):
        y = y + torch.nn.functional.pad(
            scale * wide @ a.mT @ b.mT, (slot.start, y.shape[-1] - slot.stop)
        )
    return [y.detach(), *torch.autograd.grad(y, [wide, *factors], dy.double())]


def worst(found: list[Tensor], right: list[Tensor]) -> float:
    return max(relative(f, r) for f, r in zip(found, right, strict=True))


@pytest.mark.parametrize(
    ("shape", "parts", "slots"),
    [
        ((576, 256), 1, [slice(0, 576)]),
        ((256, 192), 2, [slice(0, 128), slice(128, 256)]),
        ((256, 256), 2, [slice(128, 256)]),
        ((200, 128), 1, [slice(8, 72)]),  # off the block grid: a GEMM of its own
    ],
    ids=["576 rows", "gate and up", "up alone", "off the grid"],
)
def test_an_adapted_linear(
    shape: tuple[int, int], parts: int, slots: list[slice], mode: str
) -> None:
    weight, exact = frozen(shape, BLOCK, torch.bfloat16, parts=parts)
    x = values(21, shape[1]).requires_grad_()
    own = adapters((), slots, shape[1])
    y = adapted_linear(x, weight, own)
    dy = values(*y.shape)
    factors = [f for one in own for f in (one.a, one.b)]
    found = [y, *torch.autograd.grad(y, [x, *factors], dy)]
    right = expected(x, exact, [(o.a, o.b, o.scale, o.slot) for o in own], dy, mode)
    assert worst(found, right) < LIMIT
    wrong = expected(x, exact.roll(1, -1), [(o.a, o.b, o.scale, o.slot) for o in own], dy, mode)
    assert worst(found, wrong) > 0.1


@pytest.mark.parametrize("shared", [False, True], ids=["a factor each", "one for all"])
def test_an_adapted_bank(shared: bool, mode: str) -> None:
    counts = [5, 0, 30]
    weight, exact = frozen((3, 256, 128), BLOCK, torch.bfloat16, parts=2)
    x = values(sum(counts), 128).requires_grad_()
    own = adapters((1 if shared else 3,), [slice(0, 128), slice(128, 256)], 128)
    y = adapted_grouped_linear(x, weight, counts, own)
    dy = values(*y.shape)
    factors = [f for one in own for f in (one.a, one.b)]
    found = [y, *torch.autograd.grad(y, [x, *factors], dy)]
    sums = [torch.zeros(f.shape, dtype=torch.float64) for f in factors]
    outs = []
    for expert, rows in enumerate(torch.arange(len(x)).split(counts)):
        terms = [(o.a[expert % len(o.a)], o.b[expert % len(o.b)], o.scale, o.slot) for o in own]
        one = expected(x[rows], exact[expert], terms, dy[rows], mode)
        outs.append(one[:2])
        for total, gradient in zip(sums, one[2:], strict=True):
            total[expert % len(total)] += gradient
    right = [torch.cat(both) for both in zip(*outs, strict=True)] + sums
    assert worst(found, right) < LIMIT


@pytest.mark.parametrize(("rows", "contract"), [(slice(0, 192), "rows"), (slice(192, 448), "cols")])
def test_the_absorbed_halves_of_kv_b(rows: slice, contract: str) -> None:
    weight, exact = frozen((2 * 448, 128), BLOCK, torch.bfloat16)
    x = values(9, 2, 192 if contract == "rows" else 128).requires_grad_()
    y = frozen_head_matmul(x, weight, rows, contract=contract)
    own = exact.double().view(2, 448, 128)[:, rows]
    formula = "thp,hpk->thk" if contract == "rows" else "thk,hpk->thp"
    dy = values(*y.shape)
    wide = x.detach().double().requires_grad_()
    right = torch.einsum(formula, wide, own)
    (dx,) = torch.autograd.grad(right, wide, dy.double())
    assert worst([y, torch.autograd.grad(y, x, dy)[0]], [right.detach(), dx]) < LIMIT


def test_the_two_halves_of_an_adapter() -> None:
    x, y = values(12, 256).requires_grad_(), values(12, 130)
    a, b = (values(16, 256) / 16).requires_grad_(), values(64, 16).requires_grad_()
    t = lora_shrink(x, a, 0.5)
    out = lora_add(y.clone(), t, b, slice(3, 67))
    found = [out, *torch.autograd.grad(out.float().sum(), [x, a, b])]
    wide = [v.detach().double().requires_grad_() for v in (x, a, b)]
    low = torch.nn.functional.pad(0.5 * wide[0] @ wide[1].t() @ wide[2].t(), (3, 63))
    right = [(y.double() + low).detach(), *torch.autograd.grad(low.sum(), wide)]
    assert worst(found, right) < LIMIT


@pytest.mark.parametrize(
    ("dtype", "block", "said"),
    [(torch.float32, BLOCK, "torch.float32 activations"), (torch.bfloat16, (32, 32), "FP8 blocks of (32, 32)")],
)  # fmt: skip
def test_what_has_no_kernel_is_computed_by_the_reference_and_said_once(
    dtype: torch.dtype, block: tuple[int, int], said: str, caplog: pytest.LogCaptureFixture, mode: str
) -> None:  # fmt: skip
    weight, _ = frozen((64, 128), block, dtype)
    x = torch.randn(5, 128).to(dtype)
    with caplog.at_level(logging.WARNING):
        found = [frozen_linear(x, weight) for _ in range(2)]
    assert [one.message for one in caplog.records if said in one.message] == [
        caplog.records[0].message
    ]
    use_fp8(backend="reference", mode=mode)
    assert torch.equal(found[0], frozen_linear(x, weight)) and torch.equal(*found)


def test_a_dense_weight_is_torch_s_product() -> None:
    from megatron_xorl.fp8.weight import FrozenWeight

    dense = values(40, 64)
    weight = FrozenWeight((40, 64), block=None, dtype=torch.bfloat16)
    weight.set_dense(dense)
    x = values(7, 64)
    assert torch.equal(frozen_linear(x, weight), x @ dense.t())
