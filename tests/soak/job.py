"""One rank of a soak run: resume, train, save, and tell the parent what it does and what state it has.

``told.<rank>`` gets a JSON line for everything: ``started`` with the process id, ``resumed`` and ``trained`` with an iteration and a
hash of all that this rank trains with (factors, masters, moments, groups, schedule, random state), ``step``, ``saving`` and ``saved``.
The parent kills by the clock; a rank that is to die at a file call kills itself there.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.workers.adapter_job import Job

CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


@dataclass(frozen=True)
class Work:
    """What every rank of a run does."""

    model: Path
    root: Path
    told: Path
    last: int
    interval: int
    keep_last: int | None


@dataclass(frozen=True)
class Death:
    """Kill -9 of ``rank`` before its ``call``-th file call (from 0) in the ``save``-th save of the run (from 0)."""

    rank: int
    save: int
    call: int


class FileCalls:
    """Counts what a rank does to the files of a root, and kills the rank before a given one."""

    def __init__(self, root: Path) -> None:
        self.root, self.count, self.deadly = str(root), 0, None
        sys.addaudithook(self._audit)
        flush = os.fsync

        def counted(handle: int) -> None:
            self.seen()
            flush(handle)

        os.fsync = counted

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CALLS and str(arguments[0]).startswith(self.root):
            self.seen()

    def seen(self) -> None:
        """Count one call."""
        if self.count == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def begin(self, deadly: int | None) -> None:
        """Count from 0 again; die before the call of this number."""
        self.count, self.deadly = 0, deadly


def train(work: Work, death: Death | None = None) -> None:
    """Resume from the root and train to ``work.last``."""
    rank = int(os.environ["RANK"])
    with open(work.told / f"told.{rank}", "a", encoding="utf-8", buffering=1) as told:

        def tell(what: str, **values: Any) -> None:
            told.write(json.dumps({"what": what, "at": time.monotonic(), **values}) + "\n")

        tell("started", pid=os.getpid())
        job = Job(work.model, bf16=True)
        for seed in (random.seed, np.random.seed, torch.manual_seed):  # as Megatron's launch does
            seed(1234)
        calls = FileCalls(work.root)
        iteration = job.load(work.root) or 0
        tell("resumed", iteration=iteration, state=state_hash(job))
        saves = 0
        for number in range(iteration + 1, work.last + 1):
            tell("step", iteration=number)
            report = job.step(number)
            tell("trained", iteration=number, state=state_hash(job), report=repr(report))
            if number % work.interval:
                continue
            mine = death is not None and (rank, saves) == (death.rank, death.save)
            tell("saving", iteration=number)
            calls.begin(death.call if mine else None)
            job.save(work.root, number, keep_last=work.keep_last)
            tell("saved", iteration=number, calls=calls.count)
            saves += 1


def state_hash(job: Job) -> str:
    """Hash of the bits of everything this rank trains with."""
    return hashlib.sha256(json.dumps(job.state(), sort_keys=True).encode()).hexdigest()


def main() -> None:
    """Entry under torchrun: ``python -m tests.soak.job '<Work as JSON>'``."""
    import torch.distributed as dist

    from megatron_xorl.training.pretrain import die_with_launcher

    die_with_launcher()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    given = json.loads(sys.argv[1])
    paths = {name: Path(given.pop(name)) for name in ("model", "root", "told")}
    train(Work(**paths, **given))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
