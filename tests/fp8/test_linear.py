"""Products with a frozen weight against fp64 on the same codes, scales and activations: forward and dX.

Limits (rel-L2) are the design's: fp32 2e-7 for the reference (which sums in fp64; an fp32 sum of 2,048 products is off by 2.6e-7,
as a control here shows) and 1e-6 for ``cpu``, bf16 2.5e-3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_xorl.fp8 import weight as fp8_weight
from megatron_xorl.fp8.engine import Backend, use_fp8
from megatron_xorl.fp8.linear import frozen_grouped_linear, frozen_head_matmul, frozen_linear
from megatron_xorl.fp8.weight import FrozenWeight
from tests.fp8.weights import frozen, inputs, relative

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3}
REFERENCE_FP32 = 2e-7


def _limit(backend: Backend, dtype: torch.dtype) -> float:
    exact = backend.name == "reference" and dtype == torch.float32
    return REFERENCE_FP32 if exact else LIMITS[dtype]


DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "bf16"])
SHAPES = {
    "aligned": ((128, 96), (32, 32)),
    "144 rows, 4.5 blocks": ((144, 128), (32, 32)),
    "576 rows on 128, 4.5 blocks": ((576, 256), (128, 128)),
    "ragged both ways": ((100, 70), (32, 16)),
    "smaller than a block": ((20, 12), (32, 32)),
}
WEIGHTS = pytest.mark.parametrize(("shape", "block"), SHAPES.values(), ids=SHAPES.keys())


def _check(
    product: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[float, float]:
    """Errors of the product and of dX against fp64, for one random output gradient."""
    y = product(x)
    wide = x.detach().double().requires_grad_()
    expected = exact(wide)
    assert y.dtype == x.dtype and y.shape == expected.shape
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    (expected_dx,) = torch.autograd.grad(expected, wide, dy.double())
    assert dx.dtype == x.dtype
    return relative(y, expected.detach()), relative(dx, expected_dx)


@DTYPES
@WEIGHTS
def test_a_projection_and_its_dx_equal_fp64(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    weight, exact = frozen(shape, block, dtype)
    x = inputs(3, 7, shape[1], dtype=dtype)
    errors = _check(lambda t: frozen_linear(t, weight), lambda t: t @ exact.T, x)
    assert max(errors) <= _limit(backend, dtype), errors


@DTYPES
def test_a_dense_projection_and_its_dx_equal_fp64(backend: Backend, dtype: torch.dtype) -> None:
    weight, exact = frozen((144, 96), None, dtype)
    errors = _check(
        lambda t: frozen_linear(t, weight), lambda t: t @ exact.T, inputs(9, 96, dtype=dtype)
    )
    assert max(errors) <= _limit(backend, dtype), errors


@DTYPES
@pytest.mark.parametrize("shape", [(192, 2048), (2048, 192)], ids=["2,048 deep", "dX 2,048 deep"])
def test_long_sums_hold_the_same_limits(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, exact = frozen(shape, (128, 128), dtype)
    x = inputs(16, shape[1], dtype=dtype)
    errors = _check(lambda t: frozen_linear(t, weight), lambda t: t @ exact.T, x)
    assert max(errors) <= _limit(backend, dtype), errors


def test_an_fp32_sum_of_2048_products_would_miss_the_reference_s_limit() -> None:
    weight, exact = frozen((192, 2048), (128, 128), torch.float32)
    x = inputs(16, 2048, dtype=torch.float32)
    tile = weight.tile(torch.float32, rows=slice(0, 192), cols=slice(0, 2048))
    assert REFERENCE_FP32 < relative(x @ tile.T, x.detach().double() @ exact.T) <= 1e-6


def test_the_reference_holds_its_limit_in_every_product_with_factors() -> None:
    backend = use_fp8(backend="reference").backend
    x, a, dy = (inputs(n, 2048, dtype=torch.float32, seed=n).detach() for n in (40, 8, 24))
    out = torch.empty(40, 8)
    backend.shrink(x, a, 1.7, out)
    assert relative(out, 1.7 * x.double() @ a.double().T) <= REFERENCE_FP32
    gradient = torch.empty(40, 24)
    backend.factor_gradient(x.T, dy.T, gradient)
    assert relative(gradient, x.double() @ dy.double().T) <= REFERENCE_FP32
    total = gradient.clone()
    backend.add(total, x, dy.T)
    expected = gradient.double() + x.double() @ dy.double().T
    assert relative(total, expected) <= REFERENCE_FP32


def test_fp64_activations_give_the_exact_product() -> None:
    weight, exact = frozen((144, 128), (32, 32), torch.float32)
    x = inputs(5, 128, dtype=torch.float64)
    errors = _check(lambda t: frozen_linear(t, weight), lambda t: t @ exact.T, x)
    assert max(errors) <= 1e-14, errors


def _grouped_exact(exact: Tensor, counts: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([part @ w.T for part, w in zip(x.split(counts), exact, strict=True)])


@DTYPES
@pytest.mark.parametrize(
    "counts",
    [[5, 3, 9, 4], [0, 11, 0, 2], [0, 0, 0, 6], [0, 0, 0, 0]],
    ids=["all", "some empty", "one", "none"],
)
def test_a_bank_and_its_dx_equal_fp64_with_empty_experts(
    backend: Backend, dtype: torch.dtype, counts: list[int]
) -> None:
    weight, exact = frozen((4, 144, 96), (32, 32), dtype)
    x = inputs(sum(counts), 96, dtype=dtype)
    if not sum(counts):
        y = frozen_grouped_linear(x, weight, counts)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert y.shape == (0, 144) and dx.shape == x.shape
        return
    errors = _check(
        lambda t: frozen_grouped_linear(t, weight, counts), _grouped_exact(exact, counts), x
    )
    assert max(errors) <= _limit(backend, dtype), errors


def test_each_group_meets_its_own_expert(backend: Backend) -> None:
    counts = [4, 4, 4]
    weight, exact = frozen((3, 64, 32), (32, 32), torch.float32)
    x = inputs(12, 32, dtype=torch.float32)
    swapped = _grouped_exact(exact[[1, 0, 2]], counts)
    y, _ = _check(lambda t: frozen_grouped_linear(t, weight, counts), swapped, x)
    assert y > 0.5


@DTYPES
@pytest.mark.parametrize("half", ["K", "V"])
@pytest.mark.parametrize("contract", ["rows", "cols"])
def test_one_half_of_every_head_and_its_dx_equal_fp64(
    backend: Backend, dtype: torch.dtype, half: str, contract: str
) -> None:
    # As kv_b_proj: 112 rows a head are 3.5 blocks, its K half 1.5, so that neither heads nor halves lie on the grid.
    heads, per_head, latent = 4, 112, 128
    rows = slice(0, 48) if half == "K" else slice(48, 112)
    weight, exact = frozen((heads * per_head, latent), (32, 32), dtype)
    part = exact.view(heads, per_head, latent)[:, rows]
    width = rows.stop - rows.start if contract == "rows" else latent
    x = inputs(6, heads, width, dtype=dtype)
    equation = "thr,hrk->thk" if contract == "rows" else "thk,hrk->thr"
    errors = _check(
        lambda t: frozen_head_matmul(t, weight, rows, contract=contract),
        lambda t: torch.einsum(equation, t, part),
        x,
    )
    assert max(errors) <= _limit(backend, dtype), errors


# ---- tiles ----------------------------------------------------------------------------------------


def _products() -> dict[str, tuple[FrozenWeight, Callable[[Tensor], Tensor], Tensor]]:
    single, _ = frozen((576, 256), (128, 128), torch.float32)
    bank, _ = frozen((3, 144, 96), (32, 32), torch.float32)
    heads, _ = frozen((448, 128), (32, 32), torch.float32)
    return {
        "linear": (
            single,
            lambda x: frozen_linear(x, single),
            inputs(11, 256, dtype=torch.float32),
        ),
        "bank": (
            bank,
            lambda x: frozen_grouped_linear(x, bank, [4, 0, 7]),
            inputs(11, 96, dtype=torch.float32),
        ),
        "head rows": (
            heads,
            lambda x: frozen_head_matmul(x, heads, slice(0, 48), contract="rows"),
            inputs(5, 4, 48, dtype=torch.float32),
        ),
        "head cols": (
            heads,
            lambda x: frozen_head_matmul(x, heads, slice(48, 112), contract="cols"),
            inputs(5, 4, 128, dtype=torch.float32),
        ),
    }


def _both(product: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    y = product(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach(), dx


@pytest.mark.parametrize("which", ["linear", "bank", "head rows", "head cols"])
@pytest.mark.parametrize("scratch", [1, 20_000, 70_000], ids=["a row", "20 kB", "70 kB"])
def test_several_tiles_equal_one_tile_and_no_tile_is_larger_than_the_scratch(
    which: str, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fp8(backend="reference")
    weight, product, x = _products()[which]
    one = _both(product, x)
    sizes: list[int] = []
    real = FrozenWeight.tile

    def measured(self: FrozenWeight, *args: Any, **named: Any) -> Tensor:
        tile = real(self, *args, **named)
        sizes.append(tile.numel() * tile.element_size())
        return tile

    monkeypatch.setattr(FrozenWeight, "tile", measured)
    monkeypatch.setattr(fp8_weight, "SCRATCH_BYTES", scratch)
    several = _both(product, x)
    for found, expected in zip(several, one, strict=True):
        assert relative(found, expected.double()) <= 1e-6
    # The smallest possible tile is one row, one column, or one head; none is larger than the scratch or that.
    per_head = 112 if which.startswith("head") else 1
    smallest = 4 * per_head * max(weight.shape[-2:] if per_head == 1 else (weight.shape[-1],))
    assert len(sizes) > 2 and max(sizes) <= max(scratch, smallest)


def test_a_tile_that_begins_inside_a_block_has_that_block_s_scale() -> None:
    weight, exact = frozen((144, 100), (32, 16), torch.float32)
    for rows in (slice(0, 144), slice(5, 7), slice(31, 97), slice(130, 144)):
        for cols in (slice(0, 100), slice(15, 17), slice(3, 81), slice(96, 100)):
            tile = weight.tile(torch.float64, rows=rows, cols=cols)
            assert torch.equal(tile, exact[rows, cols]), (rows, cols)


# ---- what the backward keeps, and where gradients go ----------------------------------------------


@pytest.mark.parametrize("which", ["linear", "bank", "head rows", "head cols"])
def test_nothing_is_saved_for_the_backward(backend: Backend, which: str) -> None:
    _, product, x = _products()[which]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = product(x)
        assert not saved
        _ = x @ torch.ones(x.shape[-1], 2)  # a plain product saves its weight, which the hook sees
        assert saved
    assert y.grad_fn is not None
    assert all(tensor is None for tensor in getattr(y.grad_fn, "saved_tensors", ()))


@pytest.mark.parametrize("which", ["linear", "bank", "head rows", "head cols"])
def test_no_dequantised_tile_lives_after_a_call(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fp8(backend="reference")
    weight, product, x = _products()[which]
    tiles: list[weakref.ref[Tensor]] = []
    real = FrozenWeight.tile

    def watched(self: FrozenWeight, *args: Any, **named: Any) -> Tensor:
        tile = real(self, *args, **named)
        tiles.append(weakref.ref(tile))
        return tile

    monkeypatch.setattr(FrozenWeight, "tile", watched)
    y = product(x)
    assert tiles and all(tile() is None for tile in tiles)
    y.sum().backward()
    assert all(tile() is None for tile in tiles)
    assert [b.dtype for b in weight.buffers()] == [torch.uint8, torch.float32]


def test_gradients_flow_through_several_products_to_earlier_layers(backend: Backend) -> None:
    first, exact_first = frozen((64, 32), (32, 32), torch.float32, seed=1)
    second, exact_second = frozen((2, 48, 64), (32, 32), torch.float32, seed=2)
    factor = inputs(32, 5, dtype=torch.float32)
    x = torch.randn(10, 5, generator=torch.Generator().manual_seed(4))

    def ours(f: Tensor) -> Tensor:
        return frozen_grouped_linear(frozen_linear(x @ f.T, first), second, [6, 4])

    def plain(f: Tensor) -> Tensor:
        h = x.double() @ f.T @ exact_first.T
        return _grouped_exact(exact_second, [6, 4])(h)

    errors = _check(ours, plain, factor)
    assert max(errors) <= 1e-6, errors
    assert not list(first.parameters()) and not list(second.parameters())


def test_the_output_may_be_changed_in_place_as_megatron_s_cross_entropy_does(
    backend: Backend,
) -> None:
    weight, exact = frozen((64, 32), (32, 32), torch.float32)
    x = inputs(2, 3, 32, dtype=torch.float32)
    y = frozen_linear(x, weight)
    assert y._base is None
    y -= 1.0
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert relative(dx, exact.sum(0).expand(2, 3, 32)) <= 1e-6


@pytest.mark.parametrize("fault", ["scales ignored", "transposed scales", "dX of a doubled weight"])
def test_a_wrong_product_is_seen_by_the_same_comparison(
    backend: Backend, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, exact = frozen((96, 96), (32, 32), torch.float32)
    if fault == "scales ignored":
        weight.scales = torch.ones_like(weight.scales)
    elif fault == "transposed scales":
        weight.scales = weight.scales.T.contiguous()
    else:
        real = type(backend).linear_dx

        def doubled(self: Backend, dy: Tensor, w: FrozenWeight, out: Tensor, **named: Any) -> None:
            real(self, dy, w, out, **named)
            out.mul_(2)

        monkeypatch.setattr(type(backend), "linear_dx", doubled)
    errors = _check(
        lambda t: frozen_linear(t, weight),
        lambda t: t @ exact.T,
        inputs(5, 96, dtype=torch.float32),
    )
    assert max(errors) > 1e-2, errors
