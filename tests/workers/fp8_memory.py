"""One process that measures how far its resident memory rises while FP8 products run; prints JSON.

    python -m tests.workers.fp8_memory {linear|bank} {bf16|fp32}

Native allocations count, since it is the process's own high-water mark that is read (``VmHWM``, reset through
``/proc/self/clear_refs``). A small product before warms the libraries up; the scratch is touched from end to end by it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_xorl.fp8 import cpu
from megatron_xorl.fp8.engine import use_fp8
from megatron_xorl.fp8.linear import LoraOperand, adapted_linear, frozen_grouped_linear
from megatron_xorl.fp8.weight import FrozenWeight

SIZE, ROWS, EXPERTS, RANK, BLOCK = 4096, 512, 64, 16, (128, 128)


def main(which: str, dtype: torch.dtype) -> None:
    """Measure forward and backward, and print what each may and did take, in bytes."""
    torch.set_num_threads(1)
    use_fp8(backend="cpu")
    product = {"linear": _linear, "bank": _bank, "whole weight": _whole_weight}[which](dtype)
    x = torch.randn(ROWS, SIZE).to(dtype).requires_grad_()
    dy = torch.ones(ROWS, SIZE, dtype=dtype)
    small = torch.randn(64, SIZE).to(dtype).requires_grad_()
    product(small).backward(dy[:64])
    cpu._scratch.pool.fill_(0)
    before = _peak()
    y = product(x)
    middle = _peak(reset=False)
    start = _peak()
    y.backward(dy)
    print(
        json.dumps(
            {
                "forward": middle - before,
                "backward": _peak(reset=False) - start,
                "output": y.nbytes,
                "scratch": cpu._scratch.pool.nbytes,
            }
        )
    )


def _peak(*, reset: bool = True) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _codes(shape: tuple[int, ...], dtype: torch.dtype) -> FrozenWeight:
    weight = FrozenWeight(shape, block=BLOCK, dtype=dtype)
    codes = torch.empty(shape, dtype=torch.uint8).random_(0, 127)
    weight.set_quantized(codes, torch.full(weight.grid, 1e-3), BLOCK)
    return weight


def _linear(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight = _codes((SIZE, SIZE), dtype)
    factors = [torch.randn(RANK, SIZE), torch.randn(SIZE, RANK)]
    a, b = (factor.to(dtype).requires_grad_() for factor in factors)
    return lambda x: adapted_linear(x, weight, [LoraOperand(a, b, 2.0, slice(0, SIZE))])


def _bank(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight = _codes((EXPERTS, SIZE, SIZE), dtype)
    return lambda x: frozen_grouped_linear(x, weight, [x.shape[0] // EXPERTS] * EXPERTS)


def _whole_weight(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What is not to happen: the weight is dequantised at once."""
    weight = _codes((SIZE, SIZE), dtype)
    everything = slice(0, SIZE)
    return lambda x: x @ weight.tile(dtype, rows=everything, cols=everything).t()


if __name__ == "__main__":
    main(sys.argv[1], {"bf16": torch.bfloat16, "fp32": torch.float32}[sys.argv[2]])
