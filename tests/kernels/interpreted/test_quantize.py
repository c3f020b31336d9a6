"""Quantising kernels: the bytes of the torch reference, which are those of the package's own format."""

from __future__ import annotations

import pytest
import torch

from megatron_xorl.fp8 import format as fp8
from megatron_xorl.kernels import quantize_blocks, quantize_rows
from megatron_xorl.kernels.quantize_rows import COLUMN, DEEPGEMM, ROW, Profile


def values(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different size, a row of zeros, one of subnormals."""
    x = torch.randn(rows, columns) * torch.logspace(-6, 4, rows)[:, None]
    x[1] = 0.0
    x[2] *= 1e-38
    return x.to(dtype)


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    codes = torch.equal(a[0].view(torch.uint8), b[0].view(torch.uint8))
    return codes and torch.equal(a[1], b[1])


@pytest.mark.parametrize("profile", [COLUMN, ROW, DEEPGEMM])
@pytest.mark.parametrize(("rows", "columns"), [(70, 512), (5, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_have_the_references_bytes(rows: int, columns: int, dtype: torch.dtype, profile: Profile) -> None:  # fmt: skip
    x = values(rows, columns, dtype)
    assert same(quantize_rows.quantize_rows(x, profile), quantize_rows.reference(x, profile))


def test_the_default_profile_is_the_packages_own_rule() -> None:
    x = values(33, 300, torch.bfloat16)
    assert same(quantize_rows.quantize_rows(x), fp8.quantize_activations(x))


def test_the_two_forms_of_the_division_differ_so_that_the_profile_matters() -> None:
    x = torch.randn(2000, 512).bfloat16()
    assert not same(quantize_rows.reference(x, COLUMN), quantize_rows.reference(x, ROW))


def test_strided_rows_are_read_in_place() -> None:
    x = values(20, 512, torch.bfloat16)[:, 128:384]
    assert same(quantize_rows.quantize_rows(x), quantize_rows.reference(x.contiguous()))


def test_a_row_does_not_depend_on_the_batch() -> None:
    x = values(40, 256, torch.bfloat16)
    whole, one = quantize_rows.quantize_rows(x), quantize_rows.quantize_rows(x[17:18])
    assert same((whole[0][17:18], whole[1][17:18]), one)


def test_no_rows_are_no_work() -> None:
    codes, scales = quantize_rows.quantize_rows(torch.empty(0, 256))
    assert codes.shape == (0, 256) and scales.shape == (0, 2)


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (576, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_have_the_references_bytes(rows: int, columns: int, dtype: torch.dtype) -> None:
    w = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
    w[:128, :128] = 0.0
    found = quantize_blocks.quantize_blocks(w.to(dtype))
    assert same(found, quantize_blocks.reference(w.to(dtype)))
    assert same(found, fp8.quantize_blocks(w.to(dtype), (128, 128)))


def test_what_is_no_matrix_is_refused() -> None:
    for x in (torch.ones(4, 4, dtype=torch.float16), torch.ones(2, 2, 2)):
        with pytest.raises(ValueError, match="expected a bf16 or fp32 matrix"):
            quantize_rows.quantize_rows(x)
    with pytest.raises(ValueError, match="last axis must be dense"):
        quantize_rows.quantize_rows(torch.ones(8, 128).t())
