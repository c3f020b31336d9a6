"""Many small runs on one machine: each in a process of its own, none of which imports anything.

The one idea: starting torch and Megatron costs as much as training a miniature. One server process imports them once, runs
nothing, and is forked for every task, so each task starts in milliseconds and shares nothing. A task does what one command does:
``train`` what ``megatron-xorl train`` and ``adapter export`` do on one process, ``ask`` what ``megatron-xorl recall`` does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from shared import folder_bytes

from megatron_xorl.config.run import RunConfig, load_run_config

IMPORTED = ["megatron.core.models.gpt", "megatron.training", "megatron_xorl.training.recall"]
MOST = min(4, len(os.sched_getaffinity(0)))  # processes at a time; each takes about 1 GB


class Job(NamedTuple):
    """One adapter: the run that trains it, and the folder that holds ``run/`` and ``adapter/``."""

    name: str
    run_yaml: Path
    settings: tuple[str, ...]
    folder: Path

    @property
    def run(self) -> RunConfig:
        """The run as configured."""
        return load_run_config(self.run_yaml, self.settings)

    @property
    def adapter(self) -> Path:
        """The exported adapter."""
        return self.folder / "adapter"


class TaskError(Exception):
    """A task did not end as it must; says why in a line."""


def start_server(log: Path) -> None:
    """Start the process that is forked, once; what its imports say goes to the log, not to the terminal."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    terminal = os.dup(2)
    try:
        with open(log, "ab", buffering=0) as stream:
            os.dup2(stream.fileno(), 2)
        forkserver.ensure_running()
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def together(tasks: Sequence[Callable[[], Any]], most: int) -> list[Any]:
    """Results of the tasks in their order, at most so many at a time; a :class:`TaskError` is a result too."""
    with ThreadPoolExecutor(most) as pool:
        return list(pool.map(_outcome, tasks))


def _outcome(task: Callable[[], Any]) -> Any:
    try:
        return task()
    except TaskError as error:
        return error


def fresh(log: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this module in a fresh process that writes to ``log`` and return its result.

    Raises:
        TaskError: it raised, or its process was killed.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, log, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        result, fault = receiver.recv()
    except EOFError:
        process.join()
        result, fault = None, f"its process ended with exit code {process.exitcode}"
    process.join()
    if fault is not None:
        raise TaskError(f"{fault}; see {log}")
    return result


def _child(
    sender: Connection, log: Path, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Run one task, as long as the process that asked for it lives; what it and Megatron say goes to the log."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(log, "ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        sender.send((function(*arguments), None))
    except BaseException as error:
        traceback.print_exc()
        sender.send((None, f"{type(error).__name__}: {error}".splitlines()[0]))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # nobody waits for the result, and Megatron would go on for minutes


def train(job: Job) -> None:
    """Train and export one adapter on one process; goes on from what an interrupted start has left."""
    import torch.distributed as dist
    import yaml

    from megatron_xorl.training.checkpoint_export import export_checkpoint
    from megatron_xorl.training.pretrain import pretrain
    from megatron_xorl.training.resume import latest_iteration
    from megatron_xorl.training.run import check_run, pretrain_arguments

    run, output = job.run, Path(job.run.output)
    check_run(run, 1)
    output.mkdir(parents=True, exist_ok=True)
    document = run.to_dict()
    for name, content in (("run.yaml", document), ("adapter.yaml", document["adapter"])):
        (output / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    if latest_iteration(run.checkpoint_dir) != run.schedule.steps:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        pretrain(pretrain_arguments(run))
    export_checkpoint(run.checkpoint_dir, job.adapter)


def ask(run: RunConfig, adapter: Path | None) -> dict[str, Any]:
    """Greedy answers to the questions of the run's data; without an adapter it is the bare base that answers."""
    _one_process()
    from megatron_xorl.training.recall import recall

    return recall(run, adapter)


def base_loss(run: RunConfig) -> float:
    """Loss of the bare base on the run's first global batch, computed as training computes it."""
    _one_process()
    import scopes
    from megatron.core import parallel_state

    import megatron_xorl as mx

    model = mx.load_model(run.model.path, dtype=scopes.DTYPES[run.model.dtype])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return scopes.training_loss(model, scopes.first_batch(run, 0, 1), group)


def _one_process() -> None:
    import torch

    import megatron_xorl as mx

    if not torch.cuda.is_available():
        mx.use_cpu()
    mx.initialize()


def sizes(job: Job) -> dict[str, int]:
    """Factors, parameters and bytes of a trained adapter, counted in its checkpoint, its export and its inventory."""
    from torch.distributed.checkpoint import FileSystemReader

    import megatron_xorl as mx
    from megatron_xorl.weights.manifest import read_manifest

    run = job.run
    checkpoint = run.checkpoint_dir / f"iter_{run.schedule.steps:07d}"
    trained = read_manifest(checkpoint)["order"]
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    numbers = {
        key: (entry.size.numel(), entry.properties.dtype.itemsize)
        for key, entry in stored.items()
        if hasattr(entry, "size")
    }
    moments = [numbers[f"{kind}/{name}"] for kind in ("exp_avg", "exp_avg_sq") for name in trained]
    inventory = mx.build_inventory(mx.load_glm_config(run.model.path), run.adapter)
    return {
        "built": len(inventory.factors),
        "trained": len(trained),
        "parameters": sum(numbers[f"lora/{name}"][0] for name in trained),
        "optimizer": sum(count * width for count, width in moments),
        "checkpoint": folder_bytes(checkpoint),
        "adapter": folder_bytes(job.adapter),
    }


def losses(job: Job) -> list[float]:
    """Loss of each step that the run has recorded."""
    path = Path(job.run.output) / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in path.read_text(encoding="utf-8").splitlines()]
