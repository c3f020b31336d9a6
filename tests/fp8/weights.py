"""Frozen weights whose exact values are known, for the tests of the FP8 engine."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_xorl.fp8.format import quantize_blocks
from megatron_xorl.fp8.weight import FrozenWeight


def frozen(
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    parts: int = 1,
) -> tuple[FrozenWeight, Tensor]:
    """Return a weight whose neighbouring block scales differ by 4 or more, and its exact value in fp64."""
    draw = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=draw) / shape[-1] ** 0.5
    weight = FrozenWeight(shape, block=block, dtype=dtype, parts=parts)
    if block is None:
        weight.set_dense(value)
        return weight, value.to(dtype).double()
    height = shape[-2] // parts
    rows = torch.arange(shape[-2])[:, None] % height // block[0]
    columns = torch.arange(shape[-1])[None, :] // block[1]
    value = value * torch.where((rows + columns) % 2 == 0, 8.0, 1.0)
    pieces = value.view(-1, height, shape[-1])
    pairs = [quantize_blocks(part, block, name="w") for part in pieces]
    codes = torch.stack([c for c, _ in pairs])
    scales = torch.stack([s for _, s in pairs])
    weight.set_quantized(codes.view(shape), scales.view(weight.grid), block)
    spread = scales.double()[:, rows[:height], columns].view(shape)
    return weight, codes.view(shape).view(torch.float8_e4m3fn).double() * spread


def inputs(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Standard normal values that want a gradient."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(dtype).requires_grad_()


def relative(found: Tensor, expected: Tensor) -> float:
    """rel-L2 of the difference, in fp64."""
    return ((found.detach().double() - expected.double()).norm() / expected.double().norm()).item()
