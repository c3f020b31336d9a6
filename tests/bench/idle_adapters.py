"""Time of a training step with idle adapters beside the one that trains.

    python -m tests.bench.idle_adapters
    python -m tests.bench.idle_adapters --idle 0 1 8 --repeat 15

The tiny model (or ``--model DIR``), forward and backward of one microbatch, processor time of this process, which other work on
the machine disturbs least. The settings alternate within one run, so that they share its conditions, each after an uncounted
step; medians, and ratios to the first setting. Idle adapters have the rank of the active one and stand on every projection.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Build the model once, add and remove idle adapters between measurements, print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face directory; the tiny model if none")
    parser.add_argument("--idle", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(args, args.model or tiny(Path(folder)))
    first = statistics.median(seconds[args.idle[0]])
    print(f"{args.tokens} tokens, rank {args.rank}, median of {args.repeat}, processor time")
    print(f"{'idle':>5} {'ms a step':>10} {'ratio':>6}")
    for idle, times in seconds.items():
        middle = statistics.median(times)
        print(f"{idle:>5} {1e3 * middle:>10.1f} {middle / first:>6.3f}")


def tiny(folder: Path) -> Path:
    """The tiny checkpoint."""
    from megatron_xorl.convert.tiny import make_tiny

    return make_tiny(folder / "model", seed=0)


def measure(args: argparse.Namespace, directory: Path) -> dict[int, list[float]]:
    """Processor seconds of every repeat, by number of idle adapters."""
    import torch

    import megatron_xorl as mx
    from tests.training.harness import randomise, use_one_process

    use_one_process()
    torch.set_num_threads(1)
    adapter = mx.AdapterConfig(rank=args.rank, alpha=args.rank)
    model = mx.load_model(directory, adapter).train()
    randomise(model)
    ids = torch.arange(args.tokens).unsqueeze(0) % model.glm_config.vocab_size
    seconds: dict[int, list[float]] = {idle: [] for idle in args.idle}
    for _ in range(args.repeat):
        for idle, times in seconds.items():
            for number in range(idle):
                mx.add_adapter(model, str(number), adapter)
            step(model, ids)  # memory has just been given out and taken back
            gc.collect()
            times.append(step(model, ids))
            for number in range(idle):
                mx.remove_adapter(model, str(number))
    return seconds


def step(model: Any, ids: Any) -> float:
    """Processor seconds of one forward and backward."""
    import torch

    model.zero_grad(set_to_none=True)
    start = time.process_time()
    model(ids, torch.arange(ids.shape[1]).unsqueeze(0), None, labels=ids).mean().backward()
    return time.process_time() - start


if __name__ == "__main__":
    main()
