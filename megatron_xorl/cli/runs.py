"""Verbs of a fine-tuning job: ``make-tiny``, ``train``, ``recall``.

megatron-xorl make-tiny glm-tiny && megatron-xorl train run.yaml && megatron-xorl recall run.yaml
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_xorl.cli.root import JsonOption, app, print_json, stdout_to_stderr

if TYPE_CHECKING:
    from megatron_xorl.config.run import RunConfig

__all__ = ["make_tiny", "recall", "train"]

RunArgument = Annotated[str, typer.Argument(metavar="RUN.yaml", help="Run configuration.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key, e.g. schedule.steps=40; repeat."
    ),
]
NoHashOption = Annotated[
    bool,
    typer.Option(
        "--no-hash",
        help="Do not compare the base's weights with the hashes of its manifest (MEGATRON_XORL_NO_HASH=1); sizes stay.",
    ),
]


@app.command()
def make_tiny(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New or empty directory.")],
    seed: Annotated[int, typer.Option(help="Of the weights; the same seed, the same bytes.")] = 0,
    block: Annotated[int, typer.Option(help="FP8 block size: 16, 32, 64 or 128.")] = 32,
    size: Annotated[
        str | None,
        typer.Option(help="A larger model of the same structure, of random bytes: 4GiB, 500MB."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a tiny GLM-5.2-FP8 checkpoint in Hugging Face format: config, tokenizer, safetensors."""
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.convert import tiny
    from megatron_xorl.convert.sized import parse_size
    from megatron_xorl.display import print_checkpoint
    from megatron_xorl.plan.checkpoint_bytes import checkpoint_bytes
    from megatron_xorl.weights.names import hf_tensors

    wanted = None if size is None else parse_size(size)
    tiny.make_tiny(out, seed=seed, block=block, size=wanted)
    glm = load_glm_config(out)
    report = checkpoint_bytes(hf_tensors(glm)) | {"path": str(out.resolve()), "seed": seed}
    if as_json:
        print_json(report)
    else:
        print_checkpoint(str(out), glm, report)


@app.command()
def train(
    config: RunArgument,
    nproc: Annotated[
        int | None,
        typer.Option(help="Processes on this machine (default: the fewest the layout needs)."),
    ] = None,
    overrides: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the torchrun command, stop.")
    ] = False,
    no_hash: NoHashOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune adapters; a run whose checkpoint directory has a checkpoint resumes from it."""
    from megatron_xorl.config.run import load_run_config
    from megatron_xorl.weights.hashed_load import VARIABLE

    run = load_run_config(config, overrides or ())
    world = _fewest_processes(run) if nproc is None else nproc
    with _hashes(not no_hash), stdout_to_stderr():
        from megatron_xorl.training.run import check_run, launch_command
        from megatron_xorl.training.run import train as launch

        named = ["env", f"{VARIABLE}=1"] if no_hash else []
        command = [*named, "torchrun", *launch_command(run, world)]
        if dry_run:
            check_run(run, world)
        else:
            code = launch(run, world)
    if dry_run:
        _print_command(run, command, as_json)
        return
    if as_json:
        print_json({"command": command, "output": run.output, "exit": code})
    elif code == 0:
        print(f"trained: {run.checkpoint_dir}")
    if code:
        raise typer.Exit(1)


@app.command()
def recall(
    config: RunArgument,
    adapter: Annotated[
        Path | None,
        typer.Option(help="Exported adapter; without it the bare base is asked: the control."),
    ] = None,
    overrides: SetOption = None,
    no_hash: NoHashOption = False,
    as_json: JsonOption = False,
) -> None:
    """Generate the answer to every prompt of the run's data and compare it exactly; exit 1 on a miss."""
    from megatron_xorl.config.run import load_run_config
    from megatron_xorl.display import print_recall

    run = load_run_config(config, overrides or ())
    with _hashes(not no_hash), stdout_to_stderr():
        report = _recall(run, adapter)
    if as_json:
        print_json(report)
    else:
        print_recall(report)
    if report["exact"] != report["total"]:
        raise typer.Exit(1)


def _recall(run: RunConfig, adapter: Path | None) -> dict[str, Any]:
    """One process, on the CPU platform where there is no GPU."""
    import torch

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize, shutdown

    if not torch.cuda.is_available():
        use_cpu()
    from megatron_xorl.training.recall import recall as ask

    initialize()
    try:
        return ask(run, adapter)
    finally:
        shutdown()


@contextlib.contextmanager
def _hashes(wanted: bool) -> Iterator[None]:
    """Hand ``--no-hash`` to whatever loads the base meanwhile, in this process or in the ranks that it starts."""
    from megatron_xorl.weights.hashed_load import VARIABLE

    before = os.environ.get(VARIABLE)
    if not wanted:
        os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if not wanted:
            os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})


def _fewest_processes(run: RunConfig) -> int:
    """The smallest world that both the dense and the expert layout divide."""
    sizes = run.parallel
    return math.lcm(sizes.tp * sizes.pp * sizes.cp, sizes.etp * sizes.ep * sizes.pp)


def _print_command(run: RunConfig, command: list[str], as_json: bool) -> None:
    if as_json:
        print_json({"command": command, "output": run.output})
        return
    print(shlex.join(command))
    print(
        f"checked; nothing was written, train writes {run.output}/adapter.yaml first",
        file=sys.stderr,
    )
