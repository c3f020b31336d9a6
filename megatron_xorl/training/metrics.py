"""``metrics.jsonl``: one line an iteration, and the progress bar on a terminal.

Keys: ``iteration``, ``loss`` (mean over the trained tokens of the global batch), ``grad_norm``,
``lr``, ``tokens_per_s`` (tokens of the global batch, padding included, over the wall time since the
previous iteration). The rank that knows the loss writes; losses and norms are written with all
their digits, so that two runs can be compared bit for bit.

A run that resumes trains some iterations again: its first line replaces the lines of that iteration
and of all later ones, so that every iteration stands there once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["MetricsLog", "drop_iterations"]


class MetricsLog:
    """Receives every finished iteration from Megatron's loop.

    Args:
        args: Megatron's arguments; ``metrics`` is the file to continue, nothing is written when it is None.
    """

    def __init__(self, args: Namespace) -> None:
        self.path = Path(args.metrics) if args.metrics else None
        self.tokens = args.global_batch_size * args.seq_length
        self.total = args.train_iters
        self.last = time.perf_counter()
        self.bar: Progress | None = None
        self.continued = False

    def on_iteration(
        self, *, iteration: int, losses: dict[str, Any], learning_rate: float | None, grad_norm: Any
    ) -> None:
        """Write one line; called on every rank, written by the last one (Megatron keeps the loss on the last stage)."""
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        if dist.get_rank() != dist.get_world_size() - 1 or "lm loss" not in losses:
            return
        line = {
            "iteration": iteration,
            "loss": _number(losses["lm loss"]),
            "grad_norm": _number(grad_norm),
            "lr": learning_rate,
            "tokens_per_s": round(self.tokens / elapsed, 1),
        }
        if self.path is not None:
            if not self.continued:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                drop_iterations(self.path, iteration)
                self.continued = True
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        self._show(line)

    def _show(self, line: dict[str, Any]) -> None:
        if not sys.stderr.isatty():
            return
        if self.bar is None:
            columns = (
                TextColumn("loss {task.fields[loss]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns)
            self.bar.start()
            self.bar.add_task("train", total=self.total, loss=None)
        shown = "not finite" if line["loss"] is None else f"{line['loss']:.4g}"
        self.bar.update(self.bar.task_ids[0], completed=line["iteration"], loss=shown)
        if line["iteration"] == self.total:
            self.bar.stop()


def _number(value: Any) -> float | None:
    """A finite number as it is; JSON has no other, so anything else is null."""
    return float(value) if value is not None and math.isfinite(value) else None


def drop_iterations(path: Path, first: int) -> None:
    """Leave out the lines of iteration ``first`` and later ones, and a last line that a killed run left unfinished.

    The file changes in one step; a file that does not exist is left alone.
    """
    if not path.is_file():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _before(line, first)]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)


def _before(line: str, first: int) -> bool:
    try:
        return json.loads(line)["iteration"] < first
    except ValueError:
        return False
