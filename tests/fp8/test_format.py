"""The block-FP8 format against a table of e4m3 values and per-element loops written from the standard."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_xorl.errors import FormatError
from megatron_xorl.fp8.format import (
    E4M3_MAX,
    block_grid,
    check_pair,
    dequantize_blocks,
    quantize_blocks,
)


def e4m3_value(code: int) -> float:
    """Decode by the standard: sign, 4 exponent bits of bias 7, 3 mantissa bits, subnormals at exponent 0."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (
        mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
    )


MAGNITUDES = [e4m3_value(code) for code in range(0x7F)]


def nearest_even_code(value: float) -> int:
    """The code nearest to ``value``, ties to the even code, saturating; by search over all of them."""
    size = min(abs(value), MAGNITUDES[-1])
    best = min(range(0x7F), key=lambda code: (abs(MAGNITUDES[code] - size), code & 1))
    return best | (0x80 if math.copysign(1.0, value) < 0 else 0)


SHAPES = [(1, 1), (1, 129), (127, 5), (128, 128), (129, 127), (576, 20), (20, 576), (33, 257)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (16, 32)], ids=str)
def test_dequantising_equals_a_per_element_loop_on_ragged_shapes(shape, block):
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
    grid = (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    scales = torch.rand(grid, generator=generator) + 0.5
    got = dequantize_blocks(codes, scales, block)
    for row in range(0, shape[0], max(1, shape[0] // 40)):
        for column in range(0, shape[1], max(1, shape[1] // 40)):
            scale = scales[row // block[0], column // block[1]]
            expected = (
                torch.tensor(e4m3_value(int(codes[row, column])), dtype=torch.float32) * scale
            )
            assert got[row, column].item() == expected.item(), (row, column)


def test_every_code_decodes_by_the_standard():
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    got = dequantize_blocks(codes, torch.ones(1, 1), (16, 16)).flatten().tolist()
    expected = [e4m3_value(code) for code in range(256)]
    assert all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(got, expected, strict=True)
    )


def test_quantising_rounds_to_nearest_even_and_saturates():
    # amax 448 gives scale 1, so inputs are the values to round: midpoints between neighbouring codes, and random ones
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)]
    values = [448.0, *midpoints, *[-m for m in midpoints], *(torch.randn(200) * 30).tolist()]
    codes, scales = quantize_blocks(torch.tensor([values]), (1, len(values)))
    assert scales.item() == 1.0
    assert codes[0].tolist() == [nearest_even_code(value) for value in values]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_are_the_block_maximum_over_448(shape):
    block = (128, 128)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    codes, scales = quantize_blocks(w, block)
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float32
    assert (
        tuple(scales.shape)
        == (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
        == block_grid(shape, block)
    )
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = w[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128].float()
            assert scales[i, j] == part.abs().max() / 448
    # e4m3 has 3 mantissa bits: half a unit in the last place is 2**-4 of the value; below the normal range 2**-10 of the scale
    error = (dequantize_blocks(codes, scales, block) - w.float()).abs()
    bound = w.float().abs() * 2**-4 + 448 * scales.max() * 2**-18
    assert (error <= bound).all()


def test_an_expert_bank_is_quantised_expert_by_expert():
    bank = torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(3))
    codes, scales = quantize_blocks(bank, (16, 32))
    assert tuple(scales.shape) == (3, 3, 2)
    for expert in range(3):
        one_codes, one_scales = quantize_blocks(bank[expert], (16, 32))
        assert torch.equal(codes[expert], one_codes) and torch.equal(scales[expert], one_scales)
    assert torch.equal(
        dequantize_blocks(codes, scales, (16, 32))[1],
        dequantize_blocks(codes[1], scales[1], (16, 32)),
    )


@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_blocks_of_nothing_give_zeros_and_a_finite_scale(value):
    w = torch.full((256, 256), value)
    w[0, 0] = 1.0
    codes, scales = quantize_blocks(w, (128, 128))
    check_pair("w", codes, scales, (128, 128))
    got = dequantize_blocks(codes, scales, (128, 128))
    assert got[0, 0] == 1.0 and got.abs().sum() == 1.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_are_refused_by_name(bad):
    w = torch.zeros(4, 4)
    w[2, 3] = bad
    with pytest.raises(FormatError, match=r"layers\.7\.o_proj has 1 inf or NaN"):
        quantize_blocks(w, (2, 2), name="layers.7.o_proj")


def test_the_product_is_cast_once():
    """A scale rounded to bf16 before the product would give another value: the control computes that one too."""
    codes = torch.tensor([[1.375, 208.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0037]])
    got = dequantize_blocks(codes, scales, (1, 2), torch.bfloat16)
    exact = (codes.double() * scales.double()).float().bfloat16()
    twice = codes.bfloat16() * scales.bfloat16()
    assert torch.equal(got, exact)
    assert not torch.equal(got, twice)


def _pair(shape=(576, 256), block=(128, 128)):
    return quantize_blocks(torch.randn(shape, generator=torch.Generator().manual_seed(4)), block)


def test_a_guessed_block_would_mis_scale_ragged_rows():
    """Negative control: blocks of 116 = ceil(576 / 5), inferred from the grid, change 120 of the 576 rows."""
    codes, scales = _pair()
    scales = torch.arange(1.0, 11.0).reshape(5, 2)
    right = dequantize_blocks(codes, scales, (128, 128))
    wrong = dequantize_blocks(codes, scales, (116, 128))
    assert int((right != wrong).any(dim=1).sum()) == 120


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c, s: (c.view(torch.float8_e4m3fn).float(), s), "expected float8_e4m3fn"),
        (lambda c, s: (c, s.bfloat16()), "expected float32"),
        (lambda c, s: (c, s[:4]), r"expected \(5, 2\) for weight_block_size \[128, 128\]"),
        (
            lambda c, s: (
                c,
                s.index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(math.nan)),
            ),
            r"block \(1, 0\): nan",
        ),
        (
            lambda c, s: (c, s.index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(0.0))),
            r"block \(4, 1\): 0.0",
        ),
        (lambda c, s: (c, -s), "10 of 10 scales are not finite and positive"),
        (lambda c, s: (c.index_fill(0, torch.tensor(3), 0xFF), s), "e4m3 NaN"),
    ],
    ids=[
        "float weight",
        "bf16 scales",
        "short grid",
        "NaN scale",
        "zero scale",
        "negative scales",
        "NaN code",
    ],
)
def test_a_damaged_pair_is_refused_and_a_sound_one_is_not(damage, message):
    codes, scales = _pair()
    check_pair("q", codes, scales, (128, 128))
    with pytest.raises(FormatError, match=message):
        check_pair("q", *damage(codes, scales), (128, 128))


def test_the_largest_code_is_448():
    assert max(MAGNITUDES) == E4M3_MAX == torch.finfo(torch.float8_e4m3fn).max
