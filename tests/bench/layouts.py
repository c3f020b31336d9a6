"""Tokens a second of the miniature at EP 2 beside one process with as many threads in all.

    python -m tests.bench.layouts
    python -m tests.bench.layouts --rounds 3 --seq 96 --profile

Twenty optimizer steps of Megatron's own loop parts (DDP, distributed optimizer, schedule), the same samples. The one process
computes with two threads, each of the two processes with one. The settings alternate within one run, so that they share its
conditions; each is a fresh world whose first two steps are not counted. The ratio is of the median step. ``--profile`` prints
where rank 0 of the two processes spends its time, waiting for the other included.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.training.harness import Job, Trainer
from tests.worlds import run_world

ADAPTER = {"rank": 4, "alpha": 8}
UNCOUNTED = 2
SETTINGS: dict[str, tuple[dict[str, int], int, int]] = {
    "one process": ({}, 1, 2),
    "ep2": ({"ep": 2}, 2, 1),
}
"""Layout, processes, threads of each."""


def main() -> None:
    """Measure both settings in turn and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seq", type=int, default=96)
    parser.add_argument("--batch", type=int, default=4, help="samples a step, each a microbatch")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    steps: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        directory = tiny(Path(folder))
        for _ in range(args.rounds):
            for name, times in steps.items():
                seconds, profile = run(name, directory, args)
                times += seconds
                if args.profile and name == "ep2":
                    print(profile)
    tokens = args.batch * args.seq
    first = statistics.median(steps["one process"])
    print(f"{args.rounds} rounds of {args.steps} steps of {tokens} tokens, two threads in all")
    print(f"{'layout':12s} {'ms a step':>10} {'tokens/s':>9} {'ratio':>6}")
    for name, times in steps.items():
        middle = statistics.median(times)
        print(f"{name:12s} {1e3 * middle:>10.1f} {tokens / middle:>9.0f} {first / middle:>6.2f}")


def tiny(folder: Path) -> Path:
    """The tiny checkpoint."""
    from megatron_xorl.convert.tiny import make_tiny

    return make_tiny(folder / "model", seed=0)


def run(name: str, directory: Path, args: argparse.Namespace) -> tuple[list[float], str]:
    """Seconds of every counted step, the slowest rank's, and rank 0's profile."""
    layout, world, threads = SETTINGS[name]
    job = Job(
        str(directory), ADAPTER, steps=args.steps, seq=args.seq, global_batch=args.batch,
        layout=layout, world=world,
    )  # fmt: skip
    ranks = run_world(timed, world, job, threads, args.profile, timeout=600)
    return [max(step) for step in zip(*(times for times, _ in ranks), strict=True)], ranks[0][1]


def timed(job: Job, threads: int, profiled: bool) -> tuple[list[float], str]:
    """One rank: seconds of each counted step, and its profile."""
    import torch

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    torch.set_num_threads(threads)
    use_cpu()
    initialize(**job.layout)
    trainer = Trainer(job)
    profile = cProfile.Profile()
    times: list[float] = []
    for step in range(1, job.steps + UNCOUNTED + 1):
        if profiled and step == UNCOUNTED + 1:
            profile.enable()
        start = time.perf_counter()
        trainer.forward_backward(step)
        trainer.update(step)
        times.append(time.perf_counter() - start)
    profile.disable()
    return times[UNCOUNTED:], report(profile) if profiled else ""


def report(profile: Any) -> str:
    """The twenty functions that took longest."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(20)
    return text.getvalue()


if __name__ == "__main__":
    main()
