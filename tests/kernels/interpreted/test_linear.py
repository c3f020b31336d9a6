"""Frozen linears: slices, batches, groups, adapters of zero, gradients; bit for bit where nothing is summed in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_xorl.kernels import (
    grouped_dx,
    grouped_linear,
    linear,
    linear_dx,
    lora_gradient,
    lora_shrink,
    quantize_rows,
)
from megatron_xorl.kernels.groups import tile_map
from megatron_xorl.kernels.linear_subjects import bf16, random_weight
from megatron_xorl.kernels.subjects import relative

FP32 = 2e-7
"""Relative L2 of fp32 results, facts of the format: fp32 sums over a few hundred terms."""

M, N, K, R = 40, 256, 256, 16


def operands(rows: int = M, n: int = N, k: int = K) -> dict[str, Tensor]:
    weight, scales = random_weight({"N": n, "K": k}, "cpu")
    x = bf16(rows, k, device="cpu")
    codes, x_scales = quantize_rows.reference(x)
    found = {"x": x, "codes": codes, "x_scales": x_scales, "weight": weight, "scales": scales}
    found["dy"] = bf16(rows, n, device="cpu")
    return found | {"t": bf16(rows, R, device="cpu"), "a": bf16(R, k, device="cpu"), "b": bf16(n, R, device="cpu")}  # fmt: skip


def forward(o: dict[str, Tensor], **kw: object) -> Tensor:
    return linear.fp8_linear(o["codes"], o["x_scales"], o["weight"], o["scales"], **kw)


def backward(o: dict[str, Tensor], **kw: object) -> Tensor:
    return linear_dx.fp8_linear_dx(o["dy"], o["weight"], o["scales"], **kw)


def plain(o: dict[str, Tensor], **kw: object) -> Tensor:
    return linear_dx.fp8_linear_w8a16(o["x"], o["weight"], o["scales"], **kw)


CALLS = pytest.mark.parametrize("call", [forward, backward, plain])


@CALLS
def test_a_rows_result_does_not_depend_on_the_batch(call: Callable[..., Tensor]) -> None:
    o = operands(rows=150)
    one = {name: v[137:138] if v.shape[0] == 150 else v for name, v in o.items()}
    assert torch.equal(call(o)[137:138], call(one))


@CALLS
def test_a_call_gives_the_same_bits_again(call: Callable[..., Tensor]) -> None:
    o = operands()
    assert torch.equal(call(o), call(o))


@CALLS
@pytest.mark.parametrize("order", linear.ORDERS)
def test_an_adapter_of_zero_is_no_adapter(call: Callable[..., Tensor], order: str) -> None:
    o = operands()
    right = ("a", torch.zeros_like(o["a"])) if call is backward else ("b", torch.zeros_like(o["b"]))
    left = "u" if call is backward else "t"
    assert torch.equal(call(o), call(o, **{left: o["t"], right[0]: right[1], "order": order}))


def test_the_orders_round_differently() -> None:
    o = operands()
    separate = forward(o, t=o["t"], b=o["b"], order="separate")
    base, low_rank = forward(o), o["t"].float() @ o["b"].float().t()
    # The low-rank sum may be an fp32 ulp off, which moves a bf16 rounding once in a while.
    near = (separate - (base.float() + low_rank).bfloat16()).abs() <= 2**-7 * separate.abs()
    assert near.all()
    assert not torch.equal(separate, forward(o, t=o["t"], b=o["b"]))


def test_a_column_parallel_slice_is_a_slice_of_the_result() -> None:
    o = operands()
    part = o | {"weight": o["weight"][128:], "scales": o["scales"][1:]}
    assert torch.equal(forward(o)[:, 128:], forward(part))
    assert torch.equal(plain(o)[:, 128:], plain(part))


def test_row_parallel_slices_sum_to_the_result() -> None:
    o = operands()
    total = torch.zeros(M, N)
    for k in range(2):
        columns, block = slice(k * 128, k * 128 + 128), slice(k, k + 1)
        total += linear.fp8_linear(
            o["codes"][:, columns], o["x_scales"][:, block], o["weight"][:, columns], o["scales"][:, block],
            dtype=torch.float32,
        )  # fmt: skip
    assert relative(total, forward(o, dtype=torch.float32)) < FP32


def test_gate_and_up_of_one_base_write_into_their_columns() -> None:
    o = operands()
    out = torch.full((M, N + 3), 7.0, dtype=torch.bfloat16)
    for part in range(2):
        rows = slice(part * 128, part * 128 + 128)
        linear.fp8_linear(
            o["codes"], o["x_scales"], o["weight"][rows], o["scales"][part : part + 1],
            t=o["t"], b=o["b"][rows], out=out[:, rows],
        )  # fmt: skip
    assert torch.equal(out[:, :N], forward(o, t=o["t"], b=o["b"]))
    assert (out[:, N:] == 7.0).all()


@pytest.mark.parametrize("shared", [False, True])
def test_grouped_is_per_expert_bit_for_bit(shared: bool) -> None:
    counts = [0, 5, 0, 140]
    offsets = torch.tensor([0, 0, 5, 5, 145], dtype=torch.int32)
    o = operands(rows=145)
    weight, scales = random_weight({"E": 4, "N": N, "K": K}, "cpu")
    lead = 1 if shared else 4
    b, a = bf16(lead, N, R, device="cpu"), bf16(lead, R, K, device="cpu")
    y = grouped_linear.grouped_fp8_linear(o["codes"], o["x_scales"], weight, scales, offsets, t=o["t"], b=b)  # fmt: skip
    dx = grouped_dx.grouped_fp8_dx(o["dy"], weight, scales, offsets, u=o["t"], a=a)
    da = lora_gradient.grouped_lora_gradient(o["x"], o["t"], offsets, rank_first=True)
    for expert, count in enumerate(counts):
        rows = slice(int(offsets[expert]), int(offsets[expert]) + count)
        own = {"weight": weight[expert], "scales": scales[expert]}
        own |= {name: o[name][rows] for name in ("codes", "x_scales", "dy")}
        which = 0 if shared else expert
        assert torch.equal(y[rows], forward(own, t=o["t"][rows], b=b[which]))
        assert torch.equal(dx[rows], backward(own, u=o["t"][rows], a=a[which]))
        own_da = lora_gradient.lora_gradient(o["x"][rows], o["t"][rows], rank_first=True)
        assert torch.equal(da[expert], own_da)
    assert (da[0] == 0).all() and (da[2] == 0).all()


def test_tiles_cover_every_row_once_and_the_rest_is_idle() -> None:
    offsets = torch.tensor([0, 0, 5, 5, 145, 145], dtype=torch.int32)
    expert, first = tile_map(offsets, 145, 128)
    assert expert.tolist() == [1, 3, 3, -1, -1, -1, -1]
    assert first.tolist() == [0, 5, 133, 0, 0, 0, 0]


def test_gradients_are_those_of_autograd_in_fp64() -> None:
    """The whole adapted linear: dX through the frozen weight and the factors, dA, dB."""
    o, scale = operands(), 0.5
    x, a, b = (o[name].double().requires_grad_() for name in ("x", "a", "b"))
    weight = linear.dequantized(o["weight"], o["scales"], 128, torch.float64)
    y = x @ weight.t() + scale * (x @ a.t()) @ b.t()
    y.backward(o["dy"].double())
    u = lora_shrink.lora_shrink(o["dy"], o["b"].t(), scale)
    t = lora_shrink.lora_shrink(o["x"], o["a"], scale)
    dx = backward(o, u=u, a=o["a"], dtype=torch.float32)
    da = lora_gradient.lora_gradient(o["x"], u, rank_first=True)
    db = lora_gradient.lora_gradient(o["dy"], t, rank_first=False)
    # t and u are bf16: one rounding of 2^-9 at most, on that term alone.
    for found, expected in ((dx, x.grad), (da, a.grad), (db, b.grad)):
        assert relative(found, expected) < 2.5e-3


def test_without_tokens_factor_gradients_are_zero() -> None:
    found = lora_gradient.lora_gradient(
        bf16(0, 64, device="cpu"), bf16(0, 8, device="cpu"), rank_first=True
    )
    assert found.shape == (8, 64) and (found == 0).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scales": torch.ones(16, 16)}, "reference backend for other blocks"),
        ({"weight": torch.zeros(N, K, dtype=torch.bfloat16)}, "expected float8_e4m3fn"),
        ({"x_scales": torch.ones(M, 3)}, "scales are"),
        ({"codes": torch.zeros(M, 128, dtype=torch.uint8)}, "scales are"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        forward(operands() | change)


def test_fp32_activations_and_half_an_adapter_are_refused() -> None:
    o = operands()
    with pytest.raises(ValueError, match="reference backend"):
        plain(o | {"x": o["x"].float()})
    with pytest.raises(ValueError, match="t and b come together"):
        forward(o, t=o["t"])
    with pytest.raises(ValueError, match="order is 'last'"):
        forward(o, order="last")
