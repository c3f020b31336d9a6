"""Eight adapters for eight pairs, three pairs in one adapter, and the table of the scopes: trained, exported, asked.

The one idea: every adapter is a run of its own, told apart by ``--set`` alone, and each is trained and asked in a fresh process,
several at a time (fleet.py). The folder is this script's own, marked by a file ``.run_all``; nothing in it is removed, a finished
adapter is not trained again, and one that fails does not stop the others. Refused: a folder without the mark, an adapter there
that another configuration trained. Exits 1 if anything in a table is not as it must be, 2 if it refuses.

    bash examples/password_lora/run_all.sh [eight] [three] [scopes] [--dry-run]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fleet
import yaml
from fleet import Job, TaskError
from make_data import PAIRS, conversation
from shared import (
    JOB,
    PROGRAM,
    ROOT,
    CommandError,
    claim,
    execute,
    say,
    set_words,
    spelled,
)
from tables import Table, eight_table, scope_table, three_table

from megatron_xorl.adapters.scopes import SCOPES
from megatron_xorl.config.run import load_run_config
from megatron_xorl.errors import MegatronXorlError

OUT = Path("runs/password_lora/all")
MARK = ".run_all"
CONVERGED = 0.02  # last loss of a pair's training that counts as learned; every adapter below it has answered
SEEDS = 3  # a training that ends above it (a late flip of an expert or key choice) is done again with the next seed, so often
DOCUMENT = yaml.safe_load(PAIRS.read_text(encoding="utf-8"))
PROJECTS = list(DOCUMENT["pairs"])


class Work:
    """The folder of one start, and the jobs in it."""

    def __init__(self, out: Path, most: int = fleet.MOST) -> None:
        self.out = out
        self.most = most
        self.log = out / "log.txt"

    def job(self, name: str, run_yaml: str, data: str, *settings: str) -> Job:
        """The run of ``run_yaml`` in the folder ``name``, on the data ``data``; paths as ``--set`` reads them."""
        places = {"model.path": "model", "data.train": data, "output": f"{name}/run"}
        here = [f"{key}={os.path.relpath(self.out / path, JOB)}" for key, path in places.items()]
        return Job(name, JOB / run_yaml, (*here, *settings), self.out / name)

    def eight(self) -> dict[str, Job]:
        """One job a project."""
        return {project: self.pair(project) for project in PROJECTS}

    def pair(self, project: str, number: int = 0) -> Job:
        """The project's job; ``number`` counts up from the configuration's seed."""
        data = f"eight/{project}/train.jsonl"
        job = self.job(f"eight/{project}", "one_pair.yaml", data)
        if number == 0:
            return job
        seed = job.run.seed + number
        return self.job(f"eight/{project}-seed{seed}", "one_pair.yaml", data, f"seed={seed}")

    def three(self) -> dict[str, Job]:
        """Three pairs, with everything trained and with the routed experts alone."""
        return {
            scope: self.job(
                f"three/{scope}", "three_pairs.yaml", "three/train.jsonl", adapter(scope)
            )
            for scope in ("all", "routed_experts")
        }

    def scopes(self) -> dict[tuple[str, str], Job]:
        """Every scope, with frozen factors kept and dropped."""
        return {
            (scope, frozen): self.job(
                f"scopes/{scope}-{frozen}", "scope_steps.yaml", "scopes/train.jsonl",
                adapter(scope), f"adapter.frozen_factors={frozen}",
            )
            for scope in SCOPES
            for frozen in ("keep", "drop")
        }  # fmt: skip

    def data(self, name: str, projects: Sequence[str]) -> None:
        """Write the samples of the projects, unless they are there."""
        samples = (conversation(DOCUMENT, project) for project in projects)
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        path = self.out / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def model(self) -> None:
        """Write the base, unless a start before this one has."""
        model = self.out / "model"
        if not model.is_dir():
            # Under another name first, so that what is called model is complete.
            partial = self.out / f"model.{os.getpid()}"
            execute([PROGRAM, "make-tiny", partial], self.log)
            partial.rename(model)

    def together(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Do the tasks, several at a time; returns their results and errors in order."""
        return fleet.together(tasks, self.most)

    def fresh(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of fleet.py in a fresh process."""
        return fleet.fresh(self.log, function, *arguments)


def adapter(scope: str) -> str:
    """The setting for a scope."""
    return f"adapter=adapter_{scope}.yaml"


def finished(job: Job) -> bool:
    """Whether the job's adapter is there already.

    Raises:
        TaskError: it is, and another configuration trained it.
    """
    if not job.adapter.exists():
        return False
    record = Path(job.run.output) / "run.yaml"
    if not record.is_file() or yaml.safe_load(record.read_text()) != job.run.to_dict():
        raise TaskError(
            f"{job.adapter} was not trained by {job.run_yaml} as it is now; move {job.folder} away, or undo the change"
        )
    return True


def trained(work: Work, job: Job) -> float:
    """Train and export the job unless it is finished; returns its last loss."""
    if finished(job):
        say(f"{job.name}: finished before, not trained again")
    else:
        say(f"{job.name}: training, {job.run.schedule.steps} steps")
        work.fresh(fleet.train, job)
        say(f"{job.name}: loss {fleet.losses(job)[-1]:.6f}, exported")
    return fleet.losses(job)[-1]


def learned(work: Work, project: str) -> dict[str, Any]:
    """Train the project's adapter, with the next seed where the loss ended high, then ask it: ``{"loss", "recall", "seed"}``.

    Whether the answer is right plays no part: a wrong one of an adapter that has learned is a fault.
    """
    for number in range(SEEDS):
        job = work.pair(project, number)
        if trained(work, job) <= CONVERGED:
            break
        say(f"{job.name}: its loss ended above {CONVERGED:g}")
    return taught(work, job, sizes=False) | {"seed": job.run.seed}


def taught(work: Work, job: Job, *, sizes: bool) -> dict[str, Any]:
    """Train the job, then ask its adapter."""
    outcome = {"loss": trained(work, job), "recall": work.fresh(fleet.ask, job.run, job.adapter)}
    return outcome | ({"sizes": work.fresh(fleet.sizes, job)} if sizes else {})


def measured(work: Work, job: Job) -> dict[str, Any]:
    """Train the job, then count."""
    trained(work, job)
    return {"losses": fleet.losses(job), "sizes": work.fresh(fleet.sizes, job)}


def do_eight(work: Work) -> Table:
    """Eight pairs, eight adapters."""
    for project in PROJECTS:
        work.data(f"eight/{project}/train.jsonl", [project])
    work.data("eight/train.jsonl", PROJECTS)
    everything = work.job("eight", "one_pair.yaml", "eight/train.jsonl")
    tasks = [functools.partial(learned, work, project) for project in PROJECTS]
    *found, bare = work.together(
        [*tasks, functools.partial(work.fresh, fleet.ask, everything.run, None)]
    )
    return eight_table(dict(zip(PROJECTS, found, strict=True)), bare)


def do_three(work: Work) -> Table:
    """Three pairs in one adapter, scope all against routed_experts."""
    work.data("three/train.jsonl", PROJECTS[:3])
    jobs = work.three()
    found = work.together(
        [functools.partial(taught, work, job, sizes=True) for job in jobs.values()]
    )
    return three_table(dict(zip(jobs, found, strict=True)))


def do_scopes(work: Work) -> Table:
    """The four scopes, kept and dropped, and the bare base."""
    work.data("scopes/train.jsonl", PROJECTS[:1])
    jobs = work.scopes()
    first = next(iter(jobs.values()))
    tasks = [functools.partial(measured, work, job) for job in jobs.values()]
    *found, base = work.together(
        [*tasks, functools.partial(work.fresh, fleet.base_loss, first.run)]
    )
    return scope_table(dict(zip(jobs, found, strict=True)), base, first.run.schedule.steps)


PARTS = {"eight": do_eight, "three": do_three, "scopes": do_scopes}


def main() -> None:
    """Do the parts asked for, print a table for each, exit 0 if everything in them is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder to work in (default: {OUT})")
    parser.add_argument(
        "--jobs", type=int, default=fleet.MOST, help=f"runs at a time (default here: {fleet.MOST})"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the runs as commands, then stop"
    )
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}, expected at least 1")
    os.chdir(ROOT)
    parts = [part for part in PARTS if part in (arguments.parts or PARTS)]
    work = Work(arguments.out, arguments.jobs)
    try:
        if arguments.dry_run:
            return dry_run(work, parts)
        claim(work.out, MARK, "run_all", "Made by examples/password_lora/run_all.sh.")
        work.model()
    except (FileExistsError, CommandError, MegatronXorlError) as error:
        print(f"run_all refused: {error}", file=sys.stderr)
        sys.exit(2)
    fleet.start_server(work.log)
    say(f"what Megatron says goes to {work.log}")
    tables = [PARTS[part](work) for part in parts]
    print("", *tables, sep="\n\n" if len(tables) > 1 else "\n")
    sys.exit(1 if any(table.faults for table in tables) else 0)


def dry_run(work: Work, parts: Sequence[str]) -> None:
    """Read every run's configuration and print it as the command that does the same."""
    for part in parts:
        for job in getattr(work, part)().values():
            load_run_config(job.run_yaml, job.settings)
            print(spelled([PROGRAM, "train", job.run_yaml, *set_words(job.settings)]))


if __name__ == "__main__":
    main()
