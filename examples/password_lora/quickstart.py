"""The main job, start to finish: train, kill, resume, export, recall; then one table of what was seen.

The one idea: every step is a command that you can type yourself; each is printed before it runs,
word for word. What Megatron says meanwhile goes to one log file. ``runs/quickstart`` is the quick
start's own folder, marked by a file ``.quickstart``, and is emptied at every start; run.yaml on its
own works elsewhere. Refused: a folder of that name without the mark. Exits 1 if anything in the
table is not as it must be, 2 if it refuses.

    bash examples/quickstart.sh
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import shared
from shared import (
    JOB,
    PROGRAM,
    PYTHON,
    ROOT,
    START,
    TORCHRUN,
    CommandError,
    announce,
    folder_bytes,
    say,
    set_words,
)

from megatron_xorl.config.run import RunConfig, load_run_config

RUN = JOB / "run.yaml"
OUT = Path("runs/quickstart")
MARK = ".quickstart"
LOG = OUT / "log.txt"
PROJECT = "argon"
LOSS_BELOW = 0.01
STEPS_PAST_SAVE = 15  # how long after a checkpoint a rank is killed


class Row(NamedTuple):
    """One line of the table."""

    label: str
    value: str
    passed: bool = True


def main() -> None:
    """Run the job in ``runs/quickstart``, print the table, exit 0 if everything in it is as it must be."""
    os.chdir(ROOT)
    try:
        take_folder(OUT)
    except FileExistsError as error:
        print(f"quick start refused: {error}", file=sys.stderr)
        sys.exit(2)
    say(f"{OUT} is the quick start's own folder, emptied at every start")
    say(f"what Megatron says goes to {LOG}")
    announce(["cd", ROOT])
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        if name in os.environ:
            announce(["export", f"{name}={os.environ[name]}"])
    try:
        rows = job()
    except CommandError as error:
        print(
            f"quick start failed: {error}\nthe end of {LOG}:\n{shared.log_end(LOG)}",
            file=sys.stderr,
        )
        sys.exit(1)
    width = max(len(row.label) for row in rows)
    print()
    for row in rows:
        print(f"{row.label:<{width}}  {row.value}{'' if row.passed else '   <- NOT AS IT MUST BE'}")
    sys.exit(0 if all(row.passed for row in rows) else 1)


def take_folder(folder: Path) -> None:
    """Make the folder empty but for the mark; one with content and without the mark is left as it is."""
    note = "bash examples/quickstart.sh removes everything in this folder."
    shared.claim(folder, MARK, "the quick start", note)
    for path in folder.iterdir():  # the mark stays, so that a start cut short can be repeated
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != folder / MARK:
            path.unlink()


def job() -> list[Row]:
    """Every step in order; returns the table."""
    command("make-tiny", OUT / "model")
    python(JOB / "make_data.py", PROJECT, "--out", OUT / "train.jsonl")
    scopes = measure_scopes()
    uninterrupted = run_config("uninterrupted")
    train(uninterrupted)
    interrupted = run_config("interrupted")
    train(interrupted, kill_after=interrupted.checkpoint.interval + STEPS_PAST_SAVE)
    killed = set_aside(interrupted)
    train(interrupted)
    adapter = OUT / "adapter"
    command("adapter", "export", OUT / "interrupted" / "checkpoints", adapter)
    with ThreadPoolExecutor() as pool:  # two processes that share nothing
        with_adapter, without = pool.map(lambda given: recall(*given), [("--adapter", adapter), ()])
    return [
        *scope_rows(scopes, uninterrupted),
        *training_rows(uninterrupted, interrupted, killed),
        recall_row(with_adapter, without),
        *size_rows(adapter, interrupted.schedule.steps),
        Row("time", f"{time.monotonic() - START:.0f} s"),
    ]


def measure_scopes() -> dict[str, Any]:
    """Losses of the bare base and of each scope at step one, in one process group of two."""
    words = [TORCHRUN, "--standalone", "--nproc-per-node", 2, JOB / "scopes.py", RUN]
    text = execute([*words, *set_words(INPUTS)], (0, 1))
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


def setting(key: str, name: str) -> str:
    """``key=path`` for ``runs/quickstart/<name>``, relative to the folder of run.yaml as ``--set`` reads it."""
    return f"{key}={os.path.relpath(OUT / name, JOB)}"


INPUTS = [setting("model.path", "model"), setting("data.train", "train.jsonl")]


def run_config(name: str) -> RunConfig:
    """The run as configured, with everything in ``runs/quickstart``, its output in ``<name>`` there."""
    return load_run_config(RUN, [*INPUTS, setting("output", name)])


def train(run: RunConfig, *, kill_after: int | None = None) -> None:
    """Train to the end, or kill -9 one rank after iteration ``kill_after``."""
    output = setting("output", Path(run.output).name)
    words = [PROGRAM, "train", RUN, *set_words([*INPUTS, output])]
    announce(words)
    with open(LOG, "a") as log:
        process = subprocess.Popen(list(map(str, words)), stdout=log, stderr=log)
    try:
        follow(run, process, kill_after)
    finally:
        kill_tree(process)
    code, wanted = process.returncode, 0 if kill_after is None else 1
    if code != wanted:
        raise CommandError(f"training ended with exit code {code}, expected {wanted}")


def follow(run: RunConfig, process: subprocess.Popen[bytes], kill_after: int | None) -> None:
    """Print a line every 20 iterations until the process ends; kill a rank when its time has come."""
    said, killed = 0, False
    while process.poll() is None:
        time.sleep(0.02)
        line = (metrics(run) or [{"iteration": 0}])[-1]
        if line["iteration"] // 20 > said // 20:
            said = line["iteration"]
            loss, speed = f"{line['loss']:.4g}", f"{line['tokens_per_s']:.0f}"
            say(f"  step {said}/{run.schedule.steps}  loss {loss}  {speed} tokens/s")
        if kill_after is not None and not killed and line["iteration"] >= kill_after:
            rank = descendants(process.pid)[-1]
            os.kill(rank, signal.SIGKILL)
            killed = True
            say(f"  kill -9 {rank}: one of the two ranks, after step {line['iteration']}")


def metrics(run: RunConfig, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Complete lines of the run's metrics, in the order of writing."""
    path = Path(run.output) / name
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def set_aside(run: RunConfig) -> dict[int, float]:
    """Keep the killed run's metrics under another name, so that the resumed run's stand alone; returns its losses."""
    os.rename(Path(run.output) / "metrics.jsonl", Path(run.output) / "metrics.killed.jsonl")
    return losses(run, "metrics.killed.jsonl")


def losses(run: RunConfig, name: str = "metrics.jsonl") -> dict[int, float]:
    """Loss of each iteration."""
    return {line["iteration"]: line["loss"] for line in metrics(run, name)}


def recall(*arguments: object) -> dict[str, Any]:
    """Ask in a fresh process; a miss (exit 1) is an answer too."""
    words = [PROGRAM, "recall", RUN, *set_words(INPUTS), *arguments, "--json"]
    return json.loads(execute(words, (0, 1)))


def scope_rows(scopes: dict[str, Any], run: RunConfig) -> list[Row]:
    """Base loss and the loss at step one under each scope: five equal numbers, and training's own first."""
    found = dict(scopes["losses"])
    base = found.pop("base")
    first = metrics(run)[0]["loss"]
    rows = [Row("base loss", repr(base))]
    rows += [
        Row(
            f"step-one loss, {scope}",
            f"{loss!r}  ({scopes['trainable_factors'][scope]} factors train)",
            loss == base,
        )
        for scope, loss in found.items()
    ]
    equal = scopes["equal"] and first == base
    return [
        *rows,
        Row(
            "equal bit for bit",
            f"{'yes' if equal else 'no'}, training's own first loss included",
            equal,
        ),
    ]


def training_rows(
    uninterrupted: RunConfig, interrupted: RunConfig, killed: dict[int, float]
) -> list[Row]:
    """Where the loss went, and what the kill changed: nothing, before it and after."""
    steps, saved = uninterrupted.schedule.steps, interrupted.checkpoint.interval
    whole, resumed, last = losses(uninterrupted), losses(interrupted), max(killed)
    complete = saved < last < steps and list(resumed) == list(range(saved + 1, steps + 1))
    pairs = [(whole[step], loss) for half in (killed, resumed) for step, loss in half.items()]
    difference = max(abs(left - right) for left, right in pairs)
    span = (
        f"resumed vs uninterrupted, steps {min(resumed)}-{max(resumed)}; killed run, steps 1-{last}"
    )
    return [
        Row("final loss", f"{whole[steps]:.6f} after {steps} steps", whole[steps] < LOSS_BELOW),
        Row("killed", f"after step {last}, resumed from step {min(resumed) - 1}", complete),
        Row("largest loss difference", f"{difference} ({span})", difference == 0.0),
    ]


def recall_row(with_adapter: dict[str, Any], without: dict[str, Any]) -> Row:
    """Exact answers with the adapter and without."""
    score = [f"{report['exact']}/{report['total']}" for report in (with_adapter, without)]
    passed = with_adapter["exact"] == with_adapter["total"] and without["exact"] == 0
    return Row("recall", f"{score[0]} exact with the adapter, {score[1]} without", passed)


def size_rows(adapter: Path, steps: int) -> list[Row]:
    """Bytes on disk; neither checkpoint nor adapter may hold a copy of the base."""
    checkpoint = OUT / "interrupted" / "checkpoints" / f"iter_{steps:07d}"
    sizes = {
        "bytes of the base": folder_bytes(OUT / "model", "*.safetensors"),
        "bytes of a checkpoint": folder_bytes(checkpoint, "*"),
        "bytes of the adapter": folder_bytes(adapter, "*"),
    }
    return [Row(name, f"{size:,}", size > 0) for name, size in sizes.items()]


def command(*words: object) -> None:
    """Run a verb of megatron-xorl."""
    execute([PROGRAM, *words])


def python(*words: object) -> None:
    """Run a script with this Python."""
    execute([PYTHON, *words])


def execute(words: list[object], codes: tuple[int, ...] = (0,)) -> str:
    """Run a command, its stderr to the log; returns its stdout."""
    return shared.execute(words, LOG, codes)


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid`` whose parents are below it too, from /proc, oldest first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent ...: the name may hold spaces and brackets
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    below = [pid]
    for found in below:
        below += sorted(child for child, parent in parents.items() if parent == found)
    return below[1:]


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing running, whatever happened."""
    for pid in [*descendants(process.pid), process.pid] if process.poll() is None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
