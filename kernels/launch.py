"""What the Python side of every kernel shares: argument checks, e4m3 views, and the one place where a kernel is launched.

One idea: a wrapper describes a launch completely (kernel, grid, arguments, block sizes, warps, stages) and hands it to
:func:`launch`. On a GPU, and in Triton's interpreter, that runs it. Under :func:`recording` it is written down instead, so that
wrappers called on ``meta`` tensors say which variants a model needs and the compiler can be asked about exactly those
(:mod:`megatron_xorl.kernels.aot`): what is compiled ahead of time cannot drift from what is launched.

Block sizes are fixed per kernel and never depend on the number of rows: the sum behind an output element has one order whatever
stands beside it in the batch. Kernels take ``weight_block_size`` 128 x 128 only; scales on another grid are refused here, and the
``reference`` backend serves those models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "Launch",
    "cdiv",
    "check_bf16",
    "check_weight",
    "e4m3",
    "launch",
    "padded",
    "recording",
    "require",
    "row_stride",
]

BLOCK = 128
"""Side of a weight block and length of an activation group."""


@dataclass(frozen=True)
class Launch:
    """One launch as a wrapper asked for it; ``config`` holds the constexpr arguments, ``num_warps`` and ``num_stages``."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    config: dict[str, Any]


_record: list[Launch] | None = None


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Write launches down instead of running them, in this thread's ``with`` block."""
    global _record
    before, _record = _record, []
    try:
        yield _record
    finally:
        _record = before


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **config: Any) -> None:
    """Run ``kernel[grid](*args, **config)``, or write it down; a grid without programs is nothing to do."""
    if 0 in grid:
        return
    if _record is not None:
        _record.append(Launch(kernel, grid, args, config))
    else:
        kernel[grid](*args, **config)


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with ``message`` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def padded(n: int, least: int = 16) -> int:
    """The power of two that holds ``n``, at least ``least`` (the shortest side of a matrix instruction)."""
    return max(least, 1 << (n - 1).bit_length())


def e4m3(codes: Tensor, name: str) -> Tensor:
    """``codes`` as float8_e4m3fn, from that or from its uint8 view."""
    known = codes.dtype in (torch.uint8, torch.float8_e4m3fn)
    require(known, f"{name} is {codes.dtype}; expected float8_e4m3fn codes or their uint8 view")
    return codes.view(torch.float8_e4m3fn)


def check_bf16(**tensors: Tensor | None) -> None:
    """Every tensor given is bf16: the matrix instructions used here have no fp32 form."""
    for name, tensor in tensors.items():
        require(
            tensor is None or tensor.dtype == torch.bfloat16,
            f"{name} is {getattr(tensor, 'dtype', None)}; kernels multiply bf16 (fp32 runs use the reference backend)",
        )


def row_stride(tensor: Tensor, name: str) -> int:
    """Elements between rows; the last axis must be dense.

    Raises:
        ValueError: the last axis is strided.
    """
    require(
        tensor.stride(-1) == 1 or tensor.shape[-1] == 1,
        f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}; its last axis must be dense",
    )
    return tensor.stride(-2)


def check_weight(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A weight ``[(E,) N, K]`` with its block scales: codes as e4m3, fp32 scales on the 128 x 128 grid.

    Raises:
        ValueError: dtypes, or a grid that is not the ceiling division by 128.
    """
    grid = (*codes.shape[:-2], cdiv(codes.shape[-2], BLOCK), cdiv(codes.shape[-1], BLOCK))
    require(
        scales.dtype == torch.float32 and tuple(scales.shape) == grid,
        f"weight {tuple(codes.shape)} has scales {scales.dtype} {tuple(scales.shape)}; the kernels take float32 {grid}, "
        f"which is weight_block_size [128, 128]; use the reference backend for other blocks",
    )
    return e4m3(codes, "weight"), scales
