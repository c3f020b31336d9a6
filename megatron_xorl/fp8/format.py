"""What the bytes of a block-FP8 weight mean.

A weight ``[N, K]`` is stored as e4m3 codes of the same shape and one fp32 scale per block of
``weight_block_size``; the last block of an axis may be ragged, so the grid is the ceiling division
(576 rows of 128 -> 5). The one rule:

    value[i, j] = code[i, j] * scale[i // block_n, j // block_k]        fp32 product, then ONE cast

The scale is multiplied, whatever its stored name ``weight_scale_inv`` suggests. Leading axes (an
expert bank) are carried along. Codes travel as ``uint8`` views of the ``float8_e4m3fn`` bytes: a
module-wide ``.bfloat16()`` converts floating-point buffers and would ruin raw float8 tensors
without a word.

Refused, by the name of the tensor: inf/NaN in a weight, a scale that is missing, not fp32, not
finite or not positive, a grid that is not the ceiling division by the *configured* block (the block
is never guessed from the grid: 576 rows on 5 scale rows would be taken for blocks of 116).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_xorl.errors import FormatError

__all__ = [
    "ACTIVATION_AMAX_FLOOR",
    "ACTIVATION_GROUP",
    "AMAX_FLOOR",
    "E4M3_MAX",
    "block_grid",
    "check_pair",
    "dequantize_activations",
    "dequantize_blocks",
    "quantize_activations",
    "quantize_blocks",
]

Block = tuple[int, int]

E4M3_MAX = 448.0
"""Largest finite ``float8_e4m3fn`` value (OCP 8-bit floating point specification 1.0, table 1: S.1111.110)."""

AMAX_FLOOR = 1e-12
"""Smallest block maximum a scale is made from: an all-zero block gets zeros and a finite scale, not 0/0."""

ACTIVATION_GROUP = 128
"""Consecutive values of a row that share a scale when activations are quantised."""

ACTIVATION_AMAX_FLOOR = 1e-10
"""Smallest group maximum an activation's scale is made from, as SGLang's per-token-group quantisation has it."""

_CODE_DTYPES = (torch.uint8, torch.float8_e4m3fn)


def block_grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return the shape of the scale tensor of a weight: ``shape`` with its last two axes ceil-divided by ``block``.

    Raises:
        FormatError: fewer than two axes, or a block side below 1.
    """
    if len(shape) < 2:
        raise FormatError(
            f"block-FP8 needs a matrix, found shape {tuple(shape)}; keep vectors in bf16"
        )
    if min(block) < 1:
        raise FormatError(f"weight_block_size {tuple(block)} is not two positive integers")
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def quantize_blocks(w: Tensor, block: Block, *, name: str = "weight") -> tuple[Tensor, Tensor]:
    """Quantise ``w`` to e4m3 codes and fp32 block scales.

    ``scale = max(amax over block, AMAX_FLOOR) / 448``; codes are rounded to nearest even and saturate at +-448.

    Args:
        w: floating-point ``[..., N, K]``.
        block: rows and columns of a block, ``weight_block_size`` of the model's config.
        name: named in the error message.

    Returns:
        ``uint8 [..., N, K]`` codes and ``float32 [..., ceil(N/bn), ceil(K/bk)]`` scales.

    Raises:
        FormatError: ``w`` holds inf or NaN, or is no matrix.
    """
    grid = block_grid(tuple(w.shape), block)
    x = w.detach().float()
    if not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x)).sum())
        raise FormatError(
            f"{name} has {bad} inf or NaN values of {x.numel()}; repair the source tensor before quantising"
        )
    amax = _block_amax(x, grid, block)
    scales = amax.clamp(min=AMAX_FLOOR) / E4M3_MAX
    codes = (x / _expand(scales, x.shape, block)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def dequantize_blocks(
    codes: Tensor, scales: Tensor, block: Block, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``code * scale`` as ``dtype``: the product is taken in fp32 and cast once.

    Args:
        codes: ``uint8`` or ``float8_e4m3fn`` ``[..., N, K]``.
        scales: ``float32`` of shape ``block_grid(codes.shape, block)``.
        block: ``weight_block_size`` of the model's config.
        dtype: of the result.

    Raises:
        FormatError: wrong dtypes or a grid that is not the ceiling division of the shape by the block.
    """
    _check_shapes("weight", codes, scales, block)
    return (_as_e4m3(codes).float() * _expand(scales, codes.shape, block)).to(dtype)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each 1 x 128 group of a row: ``scale = max(amax, floor) / 448``, ``code = x / scale`` to nearest even.

    Args:
        x: floating-point ``[M, K]``, read as fp32; the last group of a row may be shorter than 128.

    Returns:
        ``uint8 [M, K]`` codes and ``float32 [M, ceil(K/128)]`` scales; a group of zeros has zeros and a finite scale.
    """
    block = (1, ACTIVATION_GROUP)
    wide = x.detach().float()
    amax = _block_amax(wide, block_grid(tuple(x.shape), block), block)
    scales = amax.clamp(min=ACTIVATION_AMAX_FLOOR) / E4M3_MAX
    codes = (wide / _expand(scales, x.shape, block)).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantize_activations(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``code * scale`` of :func:`quantize_activations`, the product taken in ``dtype`` (fp32 or fp64)."""
    block = (1, ACTIVATION_GROUP)
    return _as_e4m3(codes).to(dtype) * _expand(scales, codes.shape, block).to(dtype)


def check_pair(name: str, codes: Tensor, scales: Tensor, block: Block) -> None:
    """Check that a weight and its scale can be what the format says, without computing the weight.

    Raises:
        FormatError: codes are not e4m3, scales are not fp32, the grid does not fit, or a scale is not finite and positive.
    """
    _check_shapes(name, codes, scales, block)
    bad = ~(torch.isfinite(scales) & (scales > 0))
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise FormatError(
            f"{name}: {int(bad.sum())} of {scales.numel()} scales are not finite and positive, first at block {where}: "
            f"{float(scales[where])}; the scale tensor is damaged, fetch the shard again"
        )
    if (codes.view(torch.uint8) & 0x7F == 0x7F).any():
        raise FormatError(
            f"{name}: the codes hold e4m3 NaN (0x7F or 0xFF); the weight is damaged, fetch the shard again"
        )


def _check_shapes(name: str, codes: Tensor, scales: Tensor, block: Block) -> None:
    if codes.dtype not in _CODE_DTYPES:
        raise FormatError(
            f"{name} is {codes.dtype}, expected float8_e4m3fn (or its uint8 view); it is not an FP8 weight"
        )
    if scales.dtype != torch.float32:
        raise FormatError(
            f"{name}: scales are {scales.dtype}, expected float32; a narrower scale has lost the values"
        )
    grid = block_grid(tuple(codes.shape), block)
    if tuple(scales.shape) != grid:
        raise FormatError(
            f"{name} {tuple(codes.shape)} has scales {tuple(scales.shape)}, expected {grid} for weight_block_size "
            f"{list(block)}; check quantization_config.weight_block_size against the file"
        )


def _as_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes


def _expand(scales: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """Repeat each scale over its block, cut to the ragged edge: ``[..., gn, gk] -> [..., N, K]``."""
    rows = scales.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]


def _block_amax(x: Tensor, grid: tuple[int, ...], block: Block) -> Tensor:
    """Maximum magnitude of each block; the ragged edge is padded with zeros, which never win."""
    pad = (0, grid[-1] * block[1] - x.shape[-1], 0, grid[-2] * block[0] - x.shape[-2])
    padded = torch.nn.functional.pad(x.abs(), pad)
    return padded.reshape(*grid[:-2], grid[-2], block[0], grid[-1], block[1]).amax(dim=(-3, -1))
