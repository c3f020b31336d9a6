"""Kill a training run again and again, and look at what is left after each kill.

A chain is one checkpoint root whose run is killed, resumed, killed, ... After every kill: whatever was saved before still verifies
(``lost``), ``latest`` leads to a checkpoint that verifies, and every state that a rank has told, resumed ones included, has the bits
that the undisturbed run had at that iteration (``corrupt``). At the end of a chain the tensors of all its checkpoints are compared
with the undisturbed run's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_xorl.errors import CheckpointError
from megatron_xorl.training.resume import checkpoint_directory, latest_iteration
from megatron_xorl.weights.manifest import read_manifest, verify_files
from tests.soak.job import Death, Work, train
from tests.soak.plan import Kill, plan_kills
from tests.worlds import run_world, start_world

WORLD = 2
LAST = 12
"""Iterations of the undisturbed run; a chain that comes near goes on in a new root."""
RESTART = LAST - 4
TIMEOUT = 120.0


@dataclass
class Tally:
    """What a soak found."""

    kills: int = 0
    completed: int = 0
    lost: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"soak: {self.kills} kills ({self.completed} runs ended before theirs), {len(self.lost)} lost checkpoints, "
            f"{len(self.corrupt)} silent corruptions, {self.seconds:.0f} s"
        )


class Reference:
    """The undisturbed run: its states, its checkpoints, and how long steps and saves take."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        (folder / "told").mkdir(parents=True)
        self.root = folder / "root"
        run_world(train, WORLD, Work(model, self.root, folder / "told", LAST, 1, None))
        lines = [told(folder / "told", rank) for rank in range(WORLD)]
        self.states = [
            {line["iteration"]: line["state"] for line in of if "state" in line} for of in lines
        ]
        self.reports = {
            line["iteration"]: line["report"] for line in lines[0] if line["what"] == "trained"
        }
        self.step = _median_time(lines[0], "step", "trained")
        self.save = _median_time(lines[0], "saving", "saved")
        self.calls = [min(line["calls"] for line in of if "calls" in line) for of in lines]

    def faults(self, rank: int, line: dict[str, Any]) -> str | None:
        """Say what a told line has otherwise than the undisturbed run."""
        if "state" not in line:
            return None
        number = line["iteration"]
        same = line["state"] == self.states[rank][number]
        same = same and line.get("report", self.reports.get(number)) == self.reports.get(number)
        return None if same else f"rank {rank} {line['what']} {number} with other bits"


def soak(count: int, model: Path, folder: Path, seed: int = 0, torchrun: int = 0) -> Tally:
    """Do ``count`` kills, ``torchrun`` of them under torchrun; print a line for each that went wrong."""
    begun, tally = time.monotonic(), Tally()
    reference = Reference(model, folder / "undisturbed")
    chain: Chain | None = None
    for kill in plan_kills(count, seed, torchrun):
        if chain is None or chain.latest() >= RESTART:
            if chain is not None:
                chain.finish()
            keep = (None, 2)[kill.number // 3 % 2]
            chain = Chain(reference, folder / f"chain {kill.number}", tally, keep)
        chain.run(kill)
    if chain is not None:
        chain.finish()
    tally.seconds = time.monotonic() - begun
    return tally


class Chain:
    """One root, and the runs that are killed on it."""

    def __init__(self, reference: Reference, folder: Path, tally: Tally, keep: int | None) -> None:
        self.reference, self.folder, self.tally, self.keep = reference, folder, tally, keep
        self.root = folder / "root"

    def latest(self) -> int:
        """Iteration that a run would resume from, 0 for none."""
        return latest_iteration(self.root) or 0

    def run(self, kill: Kill) -> None:
        """Start a run, kill it, look."""
        t0 = time.monotonic()
        before = self.whole()
        told_in = self.folder / f"told {kill.number}"
        told_in.mkdir(parents=True)
        interval = 1 if kill.phase == "saving" else 2
        work = Work(self.reference.model, self.root, told_in, LAST, interval, self.keep)
        start = _torchrun if kill.torchrun else _forked
        with start(work, self._death(kill)) as ranks:
            if kill.by == "clock" and _wait_for_moment(kill, told_in, self.reference, ranks):
                ranks.kill(kill.victim)
            codes = ranks.wait()
        self.tally.kills += 1
        print("T", kill.number, kill.by, time.monotonic()-t0, file=sys.stderr)
        self.tally.completed += not any(codes)
        self.inspect(f"kill {kill}", before, told_in)

    def finish(self) -> None:
        """Let the chain's run go on undisturbed for an iteration, and compare all of its checkpoints."""
        before, told_in = self.whole(), self.folder / "told at last"
        told_in.mkdir(parents=True)
        last = self.latest() + 1
        run_world(
            train, WORLD, Work(self.reference.model, self.root, told_in, last, 1, self.keep)
        )
        self.inspect("last run", before, told_in)
        for iteration in sorted(self.whole()):
            one = checkpoint_directory(self.root, iteration)
            if different := differing(one, self.reference.root / one.name.removesuffix(".replaced")):
                self.note(self.tally.corrupt, f"{one}: {len(different)} tensors, {different[0]}")
        shutil.rmtree(self.folder)

    def inspect(self, what: str, before: set[int], told_in: Path) -> None:
        """Compare what is left with what was there, and what was told with the undisturbed run."""
        lines = [told(told_in, rank) for rank in range(WORLD)]
        existed = before | {line["iteration"] for line in lines[0] if line["what"] == "saved"}
        # A save that was under way may have come as far as removing older ones.
        begun = {line["iteration"] for line in lines[0] if line["what"] == "saving"}
        kept = sorted(existed | begun)[-self.keep :] if self.keep else existed
        after = self.whole()
        self.note(self.tally.lost, *(f"{what}: {n} is gone" for n in sorted(existed & set(kept) - after)))
        try:
            latest = latest_iteration(self.root)
        except CheckpointError as error:
            self.note(self.tally.lost, f"{what}: {error}")
            return
        if existed and (latest not in after or latest < max(existed)):
            self.note(self.tally.lost, f"{what}: latest is {latest} of {sorted(after)}")
        faults = [self.reference.faults(rank, line) for rank, of in enumerate(lines) for line in of]
        self.note(self.tally.corrupt, *(f"{what}: {fault}" for fault in faults if fault))

    def whole(self) -> set[int]:
        """Iterations whose checkpoint verifies, to the last hash."""
        found = set()
        for name in {path.name.split(".")[0] for path in self.root.glob("iter_*")}:
            iteration = int(name.removeprefix("iter_"))
            directory = checkpoint_directory(self.root, iteration)
            with suppress(CheckpointError):
                verify_files(directory, read_manifest(directory)["files"])
                found.add(iteration)
        return found

    @staticmethod
    def note(where: list[str], *faults: str) -> None:
        """Keep and print what went wrong."""
        for fault in faults:
            where.append(fault)
            print(fault, file=sys.stderr)

    def _death(self, kill: Kill) -> Death | None:
        if kill.by != "call" or kill.victim is None:
            return None
        calls = self.reference.calls[kill.victim]
        return Death(kill.victim, kill.place, int(kill.moment * calls))


class _Forked:
    """Ranks from the forkserver."""

    def __init__(self, world: Any) -> None:
        self.world = world

    def kill(self, victim: int | None) -> None:
        for rank in range(WORLD) if victim is None else (victim,):
            with suppress(ProcessLookupError):
                self.world.kill(rank)

    def alive(self) -> bool:
        return all(process.exitcode is None for process in self.world.processes)

    def wait(self) -> list[int]:
        return self.world.wait(TIMEOUT)


@contextmanager
def _forked(work: Work, death: Death | None) -> Iterator[_Forked]:
    with start_world(train, WORLD, work, death) as world:
        yield _Forked(world)


class _Launched:
    """Ranks of torchrun; to kill all is to kill the launcher, whose ranks end with it."""

    def __init__(self, work: Work, process: subprocess.Popen[bytes]) -> None:
        self.work, self.process = work, process

    def pids(self) -> list[int]:
        return [told(self.work.told, rank)[0]["pid"] for rank in range(WORLD)]

    def kill(self, victim: int | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid if victim is None else self.pids()[victim], signal.SIGKILL)

    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> list[int]:
        code = self.process.wait(TIMEOUT)
        deadline = time.monotonic() + TIMEOUT
        for pid in self.pids():
            while Path(f"/proc/{pid}").exists():  # an orphan would go on writing
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank process {pid} outlives its launcher")
                time.sleep(0.05)
        return [code]


@contextmanager
def _torchrun(work: Work, death: Death | None) -> Iterator[_Launched]:
    assert death is None
    given = json.dumps(asdict(work), default=str)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(WORLD), "-m", "tests.soak.job", given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    root = Path(__file__).resolve().parents[2]
    with open(work.told / "log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield _Launched(work, process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for_moment(kill: Kill, told_in: Path, reference: Reference, ranks: Any) -> bool:
    """Wait for the kill's moment; False when the run ended before it."""
    what, span = ("step", reference.step) if kill.phase == "training" else ("saving", reference.save)
    deadline = time.monotonic() + TIMEOUT
    while len([line for line in told(told_in, 0) if line["what"] == what]) <= kill.place:
        if not ranks.alive():
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} number {kill.place} within {TIMEOUT} s")
        time.sleep(0.002)
    time.sleep(kill.moment * span)
    return True


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has told so far, whole lines only."""
    path = folder / f"told.{rank}"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def differing(one: Path, other: Path) -> list[str]:
    """Keys of the tensors of two checkpoints that are not the same bytes."""
    from tests.training.test_checkpoint import read_tensors

    first, second = read_tensors(one), read_tensors(other)
    return [
        key
        for key in sorted(first.keys() | second.keys())
        if key not in first or key not in second or not torch.equal(first[key], second[key])
    ]


def _median_time(lines: list[dict[str, Any]], start: str, end: str) -> float:
    begun = [line["at"] for line in lines if line["what"] == start]
    ended = [line["at"] for line in lines if line["what"] == end]
    spans = sorted(b - a for a, b in zip(begun, ended, strict=True))
    return spans[len(spans) // 2]

