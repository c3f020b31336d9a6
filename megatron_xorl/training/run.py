"""``megatron-xorl train``: check a run before it starts, then launch its ranks.

Everything that can be known to be wrong without training is found here, in one process and in
seconds: the configs, the layout, the base's files, the targets, the data. Then the arguments of
:mod:`megatron_xorl.training.pretrain` are composed and torchrun starts the ranks. A run whose
checkpoint directory has a checkpoint resumes from it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from megatron_xorl.adapters.available import check_available
from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.config.layout import ParallelLayout, check_layout, sequence_problem
from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.config.run import RunConfig
from megatron_xorl.config.stages import interleaving_problem, pipeline_problem
from megatron_xorl.errors import CheckpointError, ConfigError, LayoutError, nearest
from megatron_xorl.fp8.engine import use_fp8
from megatron_xorl.parallel.cpu import use_cpu
from megatron_xorl.training.chat import ChatTokenizer
from megatron_xorl.training.data import ChatDataset, TrainingSamples, check_batches
from megatron_xorl.training.resume import (
    ANY_FORWARD,
    check_agrees,
    checkpoint_directory,
    latest_iteration,
    run_identity,
)
from megatron_xorl.weights.fingerprint import fingerprint
from megatron_xorl.weights.manifest import read_manifest, verify_files
from megatron_xorl.weights.opening import Checkpoint, open_checkpoint

__all__ = ["check_run", "launch_command", "pretrain_arguments", "train"]

METRICS = "metrics.jsonl"


def check_run(run: RunConfig, nproc: int) -> None:
    """Refuse what cannot train.

    Raises:
        MegatronXorlError: the first thing that is wrong; nothing was written.
    """
    glm = load_glm_config(run.model.path)
    sizes = run.parallel
    layout = ParallelLayout(
        tp=sizes.tp, pp=sizes.pp, ep=sizes.ep, etp=sizes.etp, cp=sizes.cp, world=nproc
    )
    check_layout(glm, layout)
    if problem := sequence_problem(run.data.seq_length, tp=sizes.tp, cp=sizes.cp):
        raise LayoutError(f"data.{problem}")
    _check_cuts(run, glm, layout.dp)
    check_extra_arguments(run, glm.num_hidden_layers)
    for path in (Path(run.output), run.checkpoint_dir):
        _check_writable(path)
    check_available(run.adapter)
    build_inventory(glm, run.adapter)
    check_batches(micro=run.batch.micro, global_batch=run.batch.global_, data_parallel=layout.dp)
    base = open_checkpoint(run.model.path)
    base.validate(glm)
    data = ChatDataset(
        run.data.train,
        ChatTokenizer(run.model.path),
        seq_length=run.data.seq_length,
        truncate=run.data.truncate,
    )
    TrainingSamples(
        data, steps=run.schedule.steps, global_batch=run.batch.global_, repeat=run.data.repeat
    )
    _check_resume(run, glm, base)


def _check_cuts(run: RunConfig, glm: GlmConfig, dp: int) -> None:
    """Refuse too many virtual stages, and a layout of the user's that parts layers from the selection that they share."""
    sizes = run.parallel
    microbatches = run.batch.global_ // (run.batch.micro * dp)
    problem = pipeline_problem(glm, sizes.pp, sizes.vpp)
    if problem := problem or interleaving_problem(microbatches, sizes.pp, sizes.vpp):
        raise LayoutError(problem)
    layout = run.megatron_args.get("pipeline_model_parallel_layout")
    if layout is None:
        return
    if sizes.vpp > 1:
        raise LayoutError(
            f"parallel.vpp is {sizes.vpp} and megatron_args.pipeline_model_parallel_layout says the cut; a layout has its own "
            "number of stages: keep one of the two"
        )
    if not torch.cuda.is_available():
        use_cpu()
    from megatron_xorl.parallel.pipeline import check_pipeline_layout

    check_pipeline_layout(glm, str(layout), run.parallel.pp)


def _check_writable(path: Path) -> None:
    """Refuse a folder that cannot be made: something on the way is a file or cannot be written to."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"{path} cannot be a folder: {existing} is a file; choose another output")
    if not os.access(existing, os.W_OK):
        raise ConfigError(
            f"{path} cannot be written: {existing} is read-only; choose another output"
        )


def _check_resume(run: RunConfig, glm: GlmConfig, base: Checkpoint) -> None:
    """Refuse a checkpoint of another run before any rank is started; the ranks verify its content when they load it."""
    iteration = latest_iteration(run.checkpoint_dir)
    if iteration is None:
        return
    directory = checkpoint_directory(run.checkpoint_dir, iteration)
    manifest = read_manifest(directory)
    use_fp8(backend=run.model.fp8_backend, mode=run.model.fp8_mode)
    expected = run_identity(fingerprint(glm, base), run.adapter, run.seed)
    if run.megatron_args.get("allow_forward_change"):
        expected |= {"forward": ANY_FORWARD}
    check_agrees(directory, manifest, expected)
    verify_files(directory, manifest["files"], hashes=False)
    _check_schedule(run, directory, manifest.get("scheduler", {}))


def _check_schedule(run: RunConfig, directory: Path, saved: Mapping[str, Any]) -> None:
    """Refuse another schedule than the checkpoint's, in the run's own words; Megatron counts in samples."""
    if run.megatron_args.get("override_opt_param_scheduler"):
        return
    samples = run.batch.global_
    if absent := {"max_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"} - saved.keys():
        raise CheckpointError(
            f"{directory} records no {min(absent)}; it is damaged: use another iteration"
        )
    wanted = {
        "optimizer.lr": (saved["max_lr"], run.optimizer.lr),
        "schedule.warmup": (saved["lr_warmup_steps"] / samples, run.schedule.warmup),
        "schedule.steps": (saved["lr_decay_steps"] / samples, run.schedule.steps),
        "schedule.decay": (saved["lr_decay_style"], run.schedule.decay),
    }
    if run.megatron_args.get("override_lr"):
        del wanted["optimizer.lr"]
    faults = [
        f"{key}: checkpoint {before:g}, this run {now:g}"
        if not isinstance(now, str)
        else f"{key}: checkpoint {before}, this run {now}"
        for key, (before, now) in wanted.items()
        if before != now
    ]
    if faults:
        raise CheckpointError(
            f"{directory} was trained on another schedule ({'; '.join(faults)}; steps are in batches of {samples}); "
            "resume with the same one, or set megatron_args: {override_lr: true} to go on with this run's rate alone, "
            "{override_opt_param_scheduler: true} with all of its schedule"
        )


def pretrain_arguments(run: RunConfig) -> list[str]:
    """Arguments of ``python -m megatron_xorl.pretrain`` for a run."""
    return _spell(_own_arguments(run)) + _spell(_dashed(run.megatron_args))


def check_extra_arguments(run: RunConfig, layers: int) -> None:
    """Check ``megatron_args``: each is an argument of Megatron's, allowed with adapters, and not one that a run key sets.

    Raises:
        ConfigError: names the argument and, if there is one, the run key or the nearest argument; or what Megatron's parser
            says of its value.
    """
    given = run.megatron_args
    if not 1 <= run.seed < 2**31:
        raise ConfigError(f"seed is {run.seed}; Megatron takes 1 to {2**31 - 1}")
    own = {name.replace("-", "_") for name in _own_arguments(run)} - {"log_interval"}
    for name in given:
        if name in own:
            raise ConfigError(
                f"megatron_args.{name} is set by a key of the run configuration; set it there"
            )
    if not given:
        return
    if not torch.cuda.is_available():
        use_cpu()
    from megatron.training.arguments import add_megatron_arguments

    from megatron_xorl.training.arguments import RULES
    from megatron_xorl.training.pretrain import add_engine_arguments
    from megatron_xorl.training.recompute_arguments import recompute_faults

    parser = add_megatron_arguments(_Parser(add_help=False))
    add_engine_arguments(parser)
    known = {option.lstrip("-").replace("-", "_") for option in parser._option_string_actions}
    for name, value in given.items():
        if name not in known:
            close = nearest(name, known)
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise ConfigError(f"megatron_args.{name} is no argument of Megatron's{hint}")
        for rule in RULES:
            if rule.name == name and value not in rule.allowed:
                raise ConfigError(f"megatron_args.{name} is {value!r}: {rule.reason}; leave it out")
    parsed = parser.parse_args(_spell(_dashed(given)))
    if faults := recompute_faults(parsed, layers):
        raise ConfigError(f"megatron_args: {'; '.join(faults)}")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument's value in our own form."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"megatron_args: {message}")


def _dashed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in values.items()}


def _own_arguments(run: RunConfig) -> dict[str, Any]:
    """Arguments that the run's keys set, by Megatron's names."""
    sizes, optimizer, schedule = run.parallel, run.optimizer, run.schedule
    checkpoints = str(run.checkpoint_dir)
    values: dict[str, Any] = {
        "hf-model": run.model.path,
        "adapter-config": adapter_path(run),
        "chat-data": run.data.train,
        "chat-truncate": run.data.truncate,
        "chat-repeat": run.data.repeat,
        "seq-length": run.data.seq_length,
        "bf16": run.model.dtype == "bf16",
        "fp8-backend": run.model.fp8_backend,
        "fp8-mode": run.model.fp8_mode,
        "tensor-model-parallel-size": sizes.tp,
        "sequence-parallel": sizes.tp > 1,
        "pipeline-model-parallel-size": sizes.pp,
        "expert-model-parallel-size": sizes.ep,
        "expert-tensor-parallel-size": sizes.etp,
        "context-parallel-size": sizes.cp,
        "check-replicas": sizes.check_replicas,
        "num-virtual-stages-per-pipeline-rank": sizes.vpp if sizes.vpp > 1 else None,
        "micro-batch-size": run.batch.micro,
        "global-batch-size": run.batch.global_,
        "train-iters": schedule.steps,
        "lr": optimizer.lr,
        "min-lr": optimizer.lr * schedule.final,
        "lr-decay-style": schedule.decay,
        "lr-decay-iters": schedule.steps,
        "lr-warmup-iters": schedule.warmup,
        # Megatron's first step has the warm-up's initial rate; zero would waste it.
        "lr-warmup-init": optimizer.lr / schedule.warmup if schedule.warmup else 0.0,
        "weight-decay": optimizer.weight_decay,
        "adam-beta1": optimizer.betas[0],
        "adam-beta2": optimizer.betas[1],
        "clip-grad": optimizer.clip,
        "seed": run.seed,
        "save": checkpoints,
        "load": checkpoints,
        "save-interval": run.checkpoint.interval or schedule.steps,
        "keep-last": run.checkpoint.keep_last,
        "keep-every": run.checkpoint.keep_every,
        "ckpt-form": run.checkpoint.format,
        "metrics": str(Path(run.output) / METRICS),
        "log-interval": 10,
    }
    return values


def _spell(values: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def adapter_path(run: RunConfig) -> str:
    """Where the run directory holds the resolved adapter config."""
    return str(Path(run.output) / "adapter.yaml")


def launch_command(run: RunConfig, nproc: int) -> list[str]:
    """torchrun's arguments for the run on this machine."""
    return [
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        "-m",
        "megatron_xorl.pretrain",
        *pretrain_arguments(run),
    ]


def train(run: RunConfig, nproc: int) -> int:
    """Check, write the run directory, launch, wait; returns 0, or 1 when a rank failed (it has printed why).

    Raises:
        MegatronXorlError: see :func:`check_run`.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    check_run(run, nproc)
    output = Path(run.output)
    output.mkdir(parents=True, exist_ok=True)
    document = run.to_dict()
    (output / "run.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    (output / "adapter.yaml").write_text(
        yaml.safe_dump(document["adapter"], sort_keys=False), encoding="utf-8"
    )
    try:
        torchrun(launch_command(run, nproc))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(
            f"megatron-xorl: rank {rank} failed with exit code {failure.exitcode}; what it said is above",
            file=sys.stderr,
        )
        return 1
    return 0
