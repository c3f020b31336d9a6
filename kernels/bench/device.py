"""Kernels on a GPU: right first, then how fast, as ratios to what this GPU does in a copy and in a bf16 product.

One idea: everything a GPU run does can be done in miniature without one. ``--dry-run`` goes through every case, correctness,
timing loop, table and file, in Triton's interpreter at small shapes, so that
nothing is run for the first time where time costs money.

On a GPU: every kernel at ``medium`` shapes against its fp64 reference and twice for equal bits, then at ``full`` shapes (those of
GLM-5.2) the median time with a cold L2, TFLOP/s, bytes/s, and the ratio of each to the measured ceilings. Kernels are timed until
``--seconds`` are spent; what did not fit is listed. Refuses a machine without a GPU unless ``--dry-run`` is given.

    bash kernels/bench/device.sh [--dry-run] [--out FILE.json] [--only PATTERN] [--seconds N]
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from megatron_xorl.kernels.shapes import Case, cases
from megatron_xorl.kernels.subjects import Subject, difference, relative, subjects

__all__ = ["main"]

# Outputs of atomic sums, whose last bits may differ from call to call; the ordered form of each is held to equal bits.
UNORDERED = {("sparse_mla_backward", "dkv"), ("indexer_backward", "dk")}
REPEATS = 10
FLUSH_BYTES = 256 << 20
"""Written between two timed calls, so that none finds its operands in L2."""


def correctness(case: Case, subject: Subject, device: str) -> list[dict[str, Any]]:
    """Errors of one case in every output dtype, and whether a second call gives the same bits."""
    torch.manual_seed(0)
    inputs = subject.make(case.dims, device)
    expected = subject.expect(inputs)
    rows = []
    for dtype in subject.dtypes:
        with poisoned_memory():
            found, again = subject.run(inputs, dtype), subject.run(inputs, dtype)
        for name, limit in subject.limits.items():
            metric, allowed = limit.gpu
            if device == "cpu":
                metric, allowed = "relative", limit.fp32 if dtype == torch.float32 else limit.bf16
            if case.dims.get("separate"):
                allowed *= 2  # the base is rounded before the adapter is added: two roundings
            measure = relative if metric == "relative" else difference
            error = measure(found[name], expected[name])
            same = torch.equal(found[name], again[name]) or (case.kernel, name) in UNORDERED
            rows.append({
                "kernel": case.kernel, "case": case.label, "output": name, "dtype": str(dtype).removeprefix("torch."),
                "metric": metric, "error": error, "limit": allowed, "repeats": same,
                "passed": error <= allowed and same,
            })  # fmt: skip
    return rows


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, so that an element no program writes is seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    torch.use_deterministic_algorithms(False)


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Median time of a call, after two warm-ups."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(2):
        call()
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def ceilings(device: str) -> dict[str, float]:
    """Bytes per second of a copy, FLOP per second of a bf16 product, on this device now."""
    size, side = (1 << 30, 8192) if device == "cuda" else (1 << 24, 256)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return {
        "copy": 2 * size / seconds_of(lambda: target.copy_(source), device),
        "bf16": 2 * side**3 / seconds_of(lambda: a @ b, device),
    }


def timing(case: Case, subject: Subject, device: str, limits: dict[str, float]) -> dict[str, Any]:
    """Time of one case and its ratio to the nearer ceiling; fp8 products are counted against twice the bf16 one."""
    torch.manual_seed(0)
    inputs = subject.make(case.dims, device)
    seconds = seconds_of(lambda: subject.run(inputs, subject.dtypes[0]), device)
    flop, traffic = subject.flop(case.dims), subject.traffic(case.dims)
    peak = limits["bf16"] * (2 if subject.rate == "fp8" else 1)
    least = max(flop / peak, traffic / limits["copy"])
    return {
        "kernel": case.kernel, "case": case.label, "seconds": seconds, "tflops": flop / seconds / 1e12,
        "gbytes": traffic / seconds / 1e9, "bound": "compute" if flop / peak > traffic / limits["copy"] else "memory",
        "ratio": least / seconds,
    }  # fmt: skip


def guarded(work: Callable[[], Any], case: Case) -> tuple[Any, str]:
    """A case's result, or why it has none: one broken kernel must not cost the others their run."""
    try:
        return work(), ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(f"FAILED  {case.kernel} / {case.label}: {text}", flush=True)
        return None, text


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """The whole report; each case is printed as soon as it is known."""
    begin = time.perf_counter()
    device = "cpu" if asked.dry_run else "cuda"
    known = subjects()
    checked, timed, broken, left = [], [], [], []
    first, second = ("small", "small") if asked.dry_run else ("medium", "full")
    for case in chosen(first, asked.only):
        rows, why = guarded(lambda c=case: correctness(c, known[c.kernel], device), case)
        checked += rows or []
        broken += [{"kernel": case.kernel, "case": case.label, "why": why}] if why else []
        for row in rows or []:
            print(line_of_check(row), flush=True)
    limits = ceilings(device)
    for case in chosen(second, asked.only):
        if time.perf_counter() - begin > asked.seconds:
            left.append(f"{case.kernel} / {case.label}")
            continue
        row, why = guarded(lambda c=case: timing(c, known[c.kernel], device, limits), case)
        timed += [row] if row else []
        broken += [{"kernel": case.kernel, "case": case.label, "why": why}] if why else []
        if row:
            print(line_of_time(row), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter"
    return {
        "device": name, "torch": torch.__version__, "triton": triton.__version__, "ceilings": limits,
        "checks": checked, "times": timed, "broken": broken, "left": left,
        "passed": not broken and bool(checked) and all(row["passed"] for row in checked),
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def chosen(scale: str, pattern: str) -> list[Case]:
    """The cases of a scale whose kernel matches."""
    return [case for case in cases(scale) if fnmatch.fnmatchcase(case.kernel, pattern)]


def line_of_check(row: dict[str, Any]) -> str:
    """One output of one case."""
    verdict = "ok    " if row["passed"] else "WRONG "
    bits = "" if row["repeats"] else "  differs from call to call"
    place = f"{row['kernel']} / {row['case']} / {row['output']} {row['dtype']}"
    return f"{verdict} {row['error']:9.2e} of {row['limit']:7.1e} {row['metric']:8}  {place}{bits}"


def line_of_time(row: dict[str, Any]) -> str:
    """One timed case."""
    figures = (
        f"{row['seconds'] * 1e3:9.3f} ms {row['tflops']:8.1f} TFLOP/s {row['gbytes']:8.1f} GB/s"
    )
    return f"{figures}  {row['ratio']:6.1%} of {row['bound']:7}  {row['kernel']} / {row['case']}"


def summary(report: dict[str, Any]) -> str:
    """The last line."""
    wrong = sum(not row["passed"] for row in report["checks"])
    counts = {"outputs checked": len(report["checks"]), "wrong": wrong}
    counts |= {"broken": len(report["broken"]), "timed": len(report["times"])}
    counts |= {"left for lack of time": len(report["left"])}
    figures = ", ".join(f"{count} {name}" for name, count in counts.items())
    versions = f"{report['device']}, torch {report['torch']}, triton {report['triton']}"
    return f"{versions}: {figures}; {report['seconds']:.0f} s"


def main() -> int:
    """Run, print, write; 1 if a kernel is wrong or broken, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="Kernels on a GPU: correctness and speed.")
    parser.add_argument(
        "--dry-run", action="store_true", help="small shapes in Triton's interpreter"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the report as JSON")
    parser.add_argument("--only", default="*", help="kernels by name, with wildcards")
    parser.add_argument("--seconds", type=float, default=420, help="start no timing after this")
    asked = parser.parse_args()
    if asked.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--dry-run needs TRITON_INTERPRET=1 from the start; run it through device.sh")
    if not asked.dry_run and not torch.cuda.is_available():
        print("no GPU is visible to torch; use --dry-run to go through every case without one")
        return 2
    report = run(asked)
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(summary(report))
    return int(not report["passed"])


if __name__ == "__main__":
    raise SystemExit(main())
