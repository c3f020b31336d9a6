"""A frozen weight is storage: buffers with the file's bytes, no parameter, and every wrong pair refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_xorl.errors import FormatError
from megatron_xorl.fp8.weight import FrozenWeight

SHAPE, BLOCK = (144, 128), (32, 32)


def _pair() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, SHAPE, dtype=torch.uint8, generator=draw)
    return codes, torch.rand(5, 4, generator=draw) + 0.01


def _loaded() -> FrozenWeight:
    weight = FrozenWeight(SHAPE, block=BLOCK, dtype=torch.bfloat16)
    weight.set_quantized(*_pair(), BLOCK)
    return weight


def test_it_has_buffers_and_no_parameter_so_no_optimizer_sees_it() -> None:
    weight = _loaded()
    assert not list(weight.parameters())
    assert {name for name, _ in weight.named_buffers()} == {"codes", "scales"}
    assert weight.nbytes == 144 * 128 + 5 * 4 * 4


def test_codes_and_scales_are_held_unchanged_whether_given_as_uint8_or_as_float8() -> None:
    codes, scales = _pair()
    for given in (codes, codes.view(torch.float8_e4m3fn)):
        weight = FrozenWeight(SHAPE, block=BLOCK, dtype=torch.float32)
        weight.set_quantized(given, scales, BLOCK)
        assert weight.codes.dtype == torch.uint8 and torch.equal(weight.codes, codes)
        assert torch.equal(weight.scales, scales)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_a_cast_leaves_codes_and_scales_alone(cast: str) -> None:
    codes, scales = _pair()
    weight = getattr(_loaded(), cast)()
    assert torch.equal(weight.codes, codes) and weight.codes.dtype == torch.uint8
    assert torch.equal(weight.scales, scales) and weight.scales.dtype == torch.float32


def test_a_cast_changes_the_dense_form() -> None:
    weight = FrozenWeight(SHAPE, block=None, dtype=torch.float32)
    assert weight.bfloat16().dense.dtype == torch.bfloat16


def test_a_device_move_moves_everything_and_keeps_the_dtypes() -> None:
    weight = _loaded().to("meta")
    assert weight.codes.is_meta and weight.scales.is_meta
    assert (weight.codes.dtype, weight.scales.dtype) == (torch.uint8, torch.float32)


def test_a_move_and_cast_in_one_call_keeps_the_scales() -> None:
    weight = _loaded().to("meta", torch.bfloat16)
    assert weight.scales.is_meta and weight.scales.dtype == torch.float32


def test_a_bf16_tile_is_the_fp32_product_rounded_once() -> None:
    codes, scales = _pair()
    rows, columns = torch.arange(144)[:, None] // 32, torch.arange(128) // 32
    product = codes.view(torch.float8_e4m3fn).float() * scales[rows, columns]
    tile = _loaded().tile(torch.bfloat16, rows=slice(0, 144), cols=slice(0, 128))
    assert torch.equal(tile, product.bfloat16())
    twice = codes.view(torch.float8_e4m3fn).bfloat16() * scales.bfloat16()[rows, columns]
    assert not torch.equal(tile, twice)


def test_tiles_cover_the_weight_exactly_once() -> None:
    weight = FrozenWeight((70_000, 512), block=BLOCK, dtype=torch.float32, device="meta")
    for tiles, length, other in (
        (weight.row_tiles(torch.float32), 70_000, 512),
        (weight.col_tiles(torch.float32), 512, 70_000),
        (weight.row_tiles(torch.bfloat16, multiple=112), 70_000, 512),
    ):
        assert tiles[0].start == 0 and tiles[-1].stop == length and len(tiles) > 1
        assert all(a.stop == b.start for a, b in itertools.pairwise(tiles))
        itemsize = 2 if tiles[0].stop % 112 == 0 else 4
        assert max(t.stop - t.start for t in tiles) * other * itemsize <= 8 * 2**20
    assert all(t.start % 112 == 0 for t in weight.row_tiles(torch.bfloat16, multiple=112))


@pytest.mark.parametrize(
    ("codes_shape", "scales", "told"),
    [
        ((144, 128), torch.ones(4, 4), "needs float32 (5, 4)"),
        ((144, 128), torch.ones(4, 5), "needs float32 (5, 4)"),
        ((144, 128), torch.ones(5, 4, dtype=torch.bfloat16), "torch.bfloat16"),
        ((128, 144), torch.ones(5, 4), "this rank's module holds (144, 128)"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(
    codes_shape: tuple[int, int], scales: torch.Tensor, told: str
) -> None:
    weight = FrozenWeight(SHAPE, block=BLOCK, dtype=torch.float32)
    with pytest.raises(FormatError) as refused:
        weight.set_quantized(torch.zeros(codes_shape, dtype=torch.uint8), scales, BLOCK)
    assert told in str(refused.value)


def test_a_dense_value_of_another_shape_is_refused() -> None:
    weight = FrozenWeight(SHAPE, block=None, dtype=torch.float32)
    with pytest.raises(FormatError, match="check the layout"):
        weight.set_dense(torch.zeros(128, 128))


def test_a_weight_built_for_fp8_takes_a_dense_value_and_drops_its_codes() -> None:
    weight = FrozenWeight(SHAPE, block=BLOCK, dtype=torch.float32)
    weight.set_dense(torch.full(SHAPE, 2.0, dtype=torch.bfloat16))
    assert not weight.quantized and weight.dense.dtype == torch.float32
    assert {name for name, _ in weight.named_buffers()} == {"dense"}


@pytest.mark.parametrize("expert", [None, 1])
def test_stacked_parts_have_a_grid_each_and_their_ragged_last_blocks_are_their_own(
    expert: int | None,
) -> None:
    # Two parts of 40 rows in blocks of 32: each ends in a quarter of a block.
    draw = torch.Generator().manual_seed(1)
    experts = 1 if expert is None else 2
    codes = torch.randint(0, 120, (experts, 80, 48), dtype=torch.uint8, generator=draw)
    scales = torch.rand(experts, 4, 2, generator=draw) + 0.01
    expected = torch.empty(experts, 80, 48, dtype=torch.float64)
    for e, row, col in itertools.product(range(experts), range(80), range(48)):
        scale = scales[e, row // 40 * 2 + row % 40 // 32, col // 32].double()
        expected[e, row, col] = codes[e, row, col].view(torch.float8_e4m3fn).double() * scale
    if expert is None:
        codes, scales = codes[0], scales[0]
    weight = FrozenWeight(tuple(codes.shape), block=BLOCK, dtype=torch.float32, parts=2)
    weight.set_quantized(codes, scales, BLOCK)
    for rows, cols in itertools.product(
        [slice(0, 80), slice(0, 40), slice(33, 41), slice(39, 80), slice(72, 73)],
        [slice(0, 48), slice(30, 34)],
    ):
        tile = weight.tile(torch.float64, rows=rows, cols=cols, expert=expert)
        assert torch.equal(tile, expected[expert or 0][rows, cols])


def test_a_stacked_weight_refuses_the_grid_of_one_piece() -> None:
    weight = FrozenWeight((80, 48), block=BLOCK, dtype=torch.float32, parts=2)
    with pytest.raises(FormatError, match=r"needs float32 \(4, 2\)"):
        weight.set_quantized(torch.zeros(80, 48, dtype=torch.uint8), torch.ones(3, 2), BLOCK)
