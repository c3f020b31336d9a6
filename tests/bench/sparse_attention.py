"""Attention over selected keys against the dense form: time, peak memory and growth, side by side in one run.

    python -m tests.bench.sparse_attention
    python -m tests.bench.sparse_attention --lengths 512 1024 --topk 64 --repeat 3

One layer's attention, forward and backward, without the indexer's scoring. Every measurement is a process of its own, so that
its peak memory is its own: the highest resident size less what was there before the first call. Times are medians. The growth
exponent is the slope of log(time) over log(length) by least squares.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

FORMS = ("attend_selected", "attend_masked")


def main() -> None:
    """Measure, or, with ``--one``, be one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--topk", type=int, default=256)
    parser.add_argument("--heads", type=int, default=16, help="GLM-5.2 has 64: 16 a rank at TP 4")
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--rope", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=1, help="more contend with whatever else runs"
    )
    parser.add_argument("--one", nargs=2, metavar=("FORM", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(_measure(args, args.one[0], int(args.one[1]))))
        return
    found = {
        (form, length): _in_a_process(args, form, length)
        for length in args.lengths
        for form in FORMS
    }
    _print(args, found)


def _in_a_process(args: argparse.Namespace, form: str, length: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.sparse_attention", "--one", form, str(length)]
    for name in ("topk", "heads", "latent", "rope", "repeat", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measure(args: argparse.Namespace, form: str, length: int) -> dict[str, Any]:
    """Median seconds, peak bytes, and (for comparing the forms) a few numbers of each result."""
    import torch

    from megatron_xorl.layers import sparse

    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(length)
    width = args.latent + args.rope
    query = torch.randn(length, 1, args.heads, width, generator=generator).requires_grad_()
    key = torch.randn(length, 1, width, generator=generator).requires_grad_()
    selected = _selection(length, args.topk, generator)
    weight = torch.randn(length, 1, args.heads, args.latent, generator=generator)
    attend = getattr(sparse, form)
    before = _peak()
    times = []
    for _ in range(args.repeat):
        query.grad = key.grad = None
        start = time.perf_counter()
        output = attend(query, key, selected, width**-0.5, args.latent)
        output.backward(weight)
        times.append(time.perf_counter() - start)
    results = {"output": output, "query": query.grad, "key": key.grad}
    probe = {
        name: value.detach().flatten()[:: min(9973, max(1, value.numel() // 100))].tolist()
        for name, value in results.items()
    }
    return {"seconds": statistics.median(times), "bytes": _peak() - before, "probe": probe}


def _selection(length: int, topk: int, generator: Any) -> Any:
    """int32 ``[length, 1, topk]``: a random choice of earlier keys, as of an indexer that knows nothing."""
    import torch

    rows = []
    for begin in range(0, length, 256):
        last = torch.arange(begin, min(begin + 256, length)).unsqueeze(1)
        scores = torch.rand(len(last), length, generator=generator)
        best = scores.masked_fill(torch.arange(length) > last, -1.0).topk(min(topk, length))
        rows.append(best.indices.masked_fill(best.values < 0, -1).int())
    return torch.cat(rows).unsqueeze(1)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _print(args: argparse.Namespace, found: dict[tuple[str, int], dict[str, Any]]) -> None:
    print(
        f"{args.heads} heads, keys of {args.latent} + {args.rope}, topk {args.topk}, fp32, forward and backward, "
        f"{args.threads} thread, median of {args.repeat}"
    )
    print(
        f"{'S':>6} {'selected s':>11} {'masked s':>9} {'ratio':>6} {'selected MiB':>13} {'masked MiB':>11} {'difference':>11}"
    )
    for length in args.lengths:
        ours, dense = (found[form, length] for form in FORMS)
        apart = max(
            math.dist(ours["probe"][name], dense["probe"][name]) / math.hypot(*dense["probe"][name])
            for name in ours["probe"]
        )
        print(
            f"{length:>6} {ours['seconds']:>11.2f} {dense['seconds']:>9.2f} {ours['seconds'] / dense['seconds']:>6.2f} "
            f"{ours['bytes'] / 2**20:>13.0f} {dense['bytes'] / 2**20:>11.0f} {apart:>11.1e}"
        )
    for form in FORMS:
        x = [math.log(length) for length in args.lengths]
        for what in ("seconds", "bytes"):
            y = [math.log(max(1, found[form, length][what])) for length in args.lengths]
            slope = statistics.linear_regression(x, y).slope if len(x) > 1 else math.nan
            print(f"{form}: {what} grow with S^{slope:.2f}")


if __name__ == "__main__":
    main()
