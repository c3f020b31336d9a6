"""A training checkpoint from one form into the other, in one process and without a model.

``torch_dist`` is written by Megatron's dist_checkpointing, ``dcp`` by torch alone (see ``training.checkpoint_forms``). Every
tensor is whole in both, so conversion is a change of names; values are the same bytes, and the layout, random state and
schedule in the manifest stay those of the run, which resumes exactly from either.

Refused: an existing output, a damaged source. The adapter state is held in memory whole: 14 bytes a parameter in bf16.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megatron_xorl.errors import CheckpointError
from megatron_xorl.training.checkpoint_forms import (
    FORMS,
    Box,
    form_key,
    torch_groups,
    write_boxes,
)
from megatron_xorl.training.resume import check_version, checkpoint_directory, latest_iteration
from megatron_xorl.weights.manifest import (
    MANIFEST,
    describe_files,
    read_manifest,
    verify_files,
    write_manifest,
)

__all__ = ["convert_checkpoint"]

KINDS = ("lora", "master", "exp_avg", "exp_avg_sq")


def convert_checkpoint(source: str | Path, out: str | Path, form: str) -> Path:
    """Write a checkpoint again in another form; one process, with or without an initialised process group of one.

    Args:
        source: a checkpoint directory, or its root (the latest is taken).
        out: directory to make: the checkpoint itself, ``iter_0000040`` under a root to resume from.
        form: ``torch_dist`` or ``dcp``.

    Returns:
        ``out``.

    Raises:
        CheckpointError: the source is missing or damaged, the output exists, there is no such form, or several processes run.
    """
    directory, target = Path(source), Path(out)
    if not (directory / MANIFEST).exists() and (newest := latest_iteration(directory)) is not None:
        directory = checkpoint_directory(directory, newest)
    manifest = read_manifest(directory)
    check_version(directory, manifest)
    _refuse(target, form)
    verify_files(directory, manifest["files"])
    boxes = _read(directory, manifest, form)
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True)
    groups = torch_groups(_group_values(manifest)) if form == "dcp" else {}
    write_boxes(form, partial, boxes, groups)
    names = sorted(path.name for path in partial.iterdir())
    write_manifest(partial, manifest | {"form": form, "files": describe_files(partial, names)})
    os.rename(partial, target)
    return target


def _refuse(target: Path, form: str) -> None:
    if form not in FORMS:
        raise CheckpointError(f"no checkpoint form {form!r}; choose from {', '.join(FORMS)}")
    if target.exists():
        raise CheckpointError(f"{target} exists; choose another output or remove it")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError("conversion runs in one process; call it outside torchrun")
    if form == "torch_dist" and not dist.is_initialized():
        raise CheckpointError(
            "Megatron's own form needs a process group of one; call mx.initialize() first (without a GPU, mx.use_cpu() before it)"
        )


def _read(directory: Path, manifest: dict[str, Any], form: str) -> dict[str, Box]:
    """Every tensor, whole: factors with their state, what is carried frozen, random state of every rank."""
    old = manifest.get("form", FORMS[0])
    reader = dcp.FileSystemReader(directory)
    stored = reader.read_metadata().state_dict_metadata
    keys = [f"{kind}/{name}" for name in manifest["factors"] for kind in KINDS]
    keys += [f"lora/{name}" for name in manifest.get("frozen", {})]
    keys += _rng_keys(stored)
    state = {}
    for key in keys:
        described = stored[form_key(old, key)]
        state[key] = torch.empty(described.size, dtype=described.properties.dtype)
    dcp.load(
        {form_key(old, key): value for key, value in state.items()},
        storage_reader=reader,
        no_dist=True,
    )
    boxes = {key: Box(value) for key, value in state.items()}
    if form == "dcp":
        for name, factor in manifest["factors"].items():
            boxes[f"step/{name}"] = Box(torch.tensor(float(factor["step"])))
    return boxes


def _rng_keys(stored: dict[str, Any]) -> list[str]:
    """``rng/<rank>/<kind>`` of either spelling; a kind may have dots."""
    return [
        "/".join(key.replace("/", ".").split(".", 2)) for key in stored if key.startswith("rng")
    ]


def _group_values(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """As they were; JSON has lists for tuples."""
    return {
        name: values | {"betas": tuple(values["betas"])}
        for name, values in manifest["adam"].items()
    }
