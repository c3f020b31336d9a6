"""The cpu backend's products against plain ones on the same weights: one table, one run, medians, one thread.

    python -m tests.bench.fp8_linear
    python -m tests.bench.fp8_linear --rows 256 512 --size 1024 --repeat 7 --no-bank

Forward and forward + dX of a block-FP8 linear ``[N, K]``, and of a bank of ragged experts ``[E, N/2, K]``, in ms, with the
ratio of ours to

* bf16: ``F.linear`` and autograd's own backward ``dY W`` on the weight dequantised beforehand; the bank: ``F.grouped_mm``;
* bf16T: the same where the backward transposes the weight first (``F.linear(dY, W.t().contiguous())``), the bank in a loop over
  its experts. On a CPU with AVX2 alone torch's bf16 GEMM is some 40 times slower on a right operand that is not transposed;
  the forward's already is, so this is what a bf16 model could do at best;
* fp32: ``F.linear`` and its backward in fp32, the bank by ``F.grouped_mm``: the bar of a CPU without bf16 instructions;
* HF: transformers' FP8 path, which PEFT's adapters stand on. The forward of its ``FP8Linear`` is a GPU kernel; what of it runs on
  a CPU is its backward's ``_dequantize_fp8_weight``, the whole weight at each call, multiplied here as in bf16T.

Times are CPU time with one thread (another process on the machine does not count), wall time with more. bf16's own backward is
only timed up to ``--own-rows`` rows, since it takes 30 ms a row at N = K = 2048; it is left out for the bank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_xorl.fp8.cpu import has_native_bf16
from megatron_xorl.fp8.engine import use_fp8
from megatron_xorl.fp8.format import dequantize_blocks
from megatron_xorl.fp8.linear import frozen_grouped_linear, frozen_linear
from megatron_xorl.fp8.weight import FrozenWeight

BLOCK = (128, 128)
COLUMNS = ("ours", "bf16", "bf16T", "fp32", "HF")
Forms = dict[str, Callable[[Tensor], Tensor]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--size", type=int, default=2048, help="N = K")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--own-rows", type=int, default=256, help="most rows of bf16's own backward"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-bank", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = use_fp8(backend="cpu", mode="w8a16")
    print(
        f"backend {found.backend.name}, mode {found.mode}, {args.threads} thread, medians of {args.repeat}, "
        f"bf16 instructions: {'yes' if has_native_bf16() else 'no'}, N = K = {args.size}; ms, then ours / theirs"
    )
    heads = (*COLUMNS, *(f"/{name}" for name in COLUMNS[1:]))
    print(f"{'':<34}" + "".join(f"{name:>9}" for name in heads))
    forms = _linear_forms(_weight((args.size, args.size)))
    for rows in args.rows:
        _row(f"M={rows}, forward", forms, rows, args, without={"bf16T"})
        own = set() if rows <= args.own_rows else {"bf16"}
        _row(f"M={rows}, forward + dX", forms, rows, args, backward=True, without=own)
    if not args.no_bank:
        counts = _ragged(args.experts)
        forms = _bank_forms(_weight((args.experts, args.size // 2, args.size)), counts)
        label = f"{args.experts} experts of {min(counts)}-{max(counts)}"
        _row(f"{label}, forward", forms, sum(counts), args)
        _row(f"{label}, + dX", forms, sum(counts), args, backward=True, without={"bf16"})


def _weight(shape: tuple[int, ...]) -> FrozenWeight:
    weight = FrozenWeight(shape, block=BLOCK, dtype=torch.bfloat16)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    weight.set_quantized(codes, torch.rand(weight.grid) * 1e-3 + 1e-4, BLOCK)
    return weight


def _ragged(experts: int) -> list[int]:
    """Rows of each expert, from 16 up in steps of 16; with 16 experts 16 to 256, 2,176 in all."""
    return [16 * (1 + (7 * expert) % experts) for expert in range(experts)]


def _whole(weight: FrozenWeight, dtype: torch.dtype) -> Tensor:
    assert weight.codes is not None and weight.scales is not None
    return dequantize_blocks(weight.codes, weight.scales, BLOCK, dtype)


def _hf_dequantized(weight: FrozenWeight) -> Callable[[], Tensor]:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    assert weight.codes is not None
    codes = weight.codes.view(torch.float8_e4m3fn)
    return lambda: _dequantize_fp8_weight(codes, weight.scales, list(BLOCK), torch.bfloat16)


def _linear_forms(weight: FrozenWeight) -> Forms:
    narrow, wide = _whole(weight, torch.bfloat16), _whole(weight, torch.float32)
    again = _hf_dequantized(weight)
    return {
        "ours": lambda x: frozen_linear(x, weight),
        "bf16": lambda x: F.linear(x, narrow),
        "bf16T": lambda x: _Transposing.apply(x, lambda: narrow[None], [x.shape[0]]),
        "fp32": lambda x: F.linear(x, wide),
        "HF": lambda x: _Transposing.apply(x, lambda: again()[None], [x.shape[0]]),
    }


def _bank_forms(bank: FrozenWeight, counts: list[int]) -> Forms:
    narrow, wide = _whole(bank, torch.bfloat16), _whole(bank, torch.float32)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    again = _hf_dequantized(bank)
    return {
        "ours": lambda x: frozen_grouped_linear(x, bank, counts),
        "bf16": lambda x: F.grouped_mm(x, narrow.transpose(-2, -1), offs=ends),
        "bf16T": lambda x: _Transposing.apply(x, lambda: narrow, counts),
        "fp32": lambda x: F.grouped_mm(x, wide.transpose(-2, -1), offs=ends),
        "HF": lambda x: _Transposing.apply(x, again, counts),
    }


class _Transposing(torch.autograd.Function):
    """``x_e W_e^T`` in a loop over ``weights()``, which is called again in the backward; dX by a transposed copy."""

    @staticmethod
    def forward(ctx, x, weights, counts):  # type: ignore[no-untyped-def]
        ctx.weights, ctx.counts = weights, counts
        parts = zip(x.split(counts), weights(), strict=True)
        return torch.cat([F.linear(part, w) for part, w in parts])

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        parts = zip(dy.split(ctx.counts), ctx.weights(), strict=True)
        return torch.cat([F.linear(part, w.t().contiguous()) for part, w in parts]), None, None


def _row(
    label: str, forms: Forms, rows: int, args: argparse.Namespace, *, backward: bool = False, without: Collection[str] = ()
) -> None:  # fmt: skip
    wide = torch.randn(rows, args.size)
    taken: dict[str, float] = {}
    for name in COLUMNS:
        if name in without:
            continue
        x = wide.to(torch.float32 if name == "fp32" else torch.bfloat16).requires_grad_(backward)
        taken[name] = _median(lambda x=x, product=forms[name]: _run(product, x), args)
    cells = [f"{taken[name]:>9.1f}" if name in taken else f"{'-':>9}" for name in COLUMNS]
    cells += [
        f"{taken['ours'] / taken[name]:>9.2f}" if name in taken else f"{'-':>9}"
        for name in COLUMNS[1:]
    ]
    print(f"{label:<34}" + "".join(cells), flush=True)


def _run(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    y = product(x)
    if x.requires_grad:
        y.backward(torch.ones_like(y))
        x.grad = None


def _median(run: Callable[[], None], args: argparse.Namespace) -> float:
    """Milliseconds of a call, after one that does not count."""
    clock = time.process_time if args.threads == 1 else time.perf_counter
    run()
    taken = []
    for _ in range(args.repeat):
        start = clock()
        run()
        taken.append(clock() - start)
    return statistics.median(taken) * 1e3


if __name__ == "__main__":
    main()
