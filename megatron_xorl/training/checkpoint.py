"""Adapter checkpoints: factors, fp32 masters, moments, scheduler, random state and data position; never the base.

Layout of a checkpoint directory ``iter_0000040/``: Megatron's ``torch_dist`` files (torch DCP) and
``manifest.json``. Every tensor is keyed by its logical factor name in its full logical shape
(``lora/…``, ``master/…``, ``exp_avg/…``, ``exp_avg_sq/…``), so that no bucket, optimizer chain or
parallel layout shows in the file and every layout reads it. Everything that is no tensor is JSON in
the manifest.

A checkpoint exists if and only if its manifest verifies: ranks write and fsync their files, then
rank 0 writes the manifest, renames the directory and changes ``latest`` with ``os.replace``. A
killed save leaves the previous checkpoint as it was; a damaged one is refused by file name.

Refused: another base (fingerprint), other adapters (rank, alpha, targets), another scope, another
forward mode, a newer format.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron_xorl.errors import CheckpointError
from megatron_xorl.layers.attach import check_trainability, named_factors
from megatron_xorl.layers.lora import FactorSlice
from megatron_xorl.training.optimizer_state import (
    STATE_KINDS,
    gather_state,
    scatter_state,
    steps_by_parameter,
)
from megatron_xorl.training.resume import (
    FORMAT_VERSION,
    LATEST,
    REPLACED,
    check_agrees,
    checkpoint_directory,
    iteration_directory,
    latest_iteration,
)
from megatron_xorl.training.rng import get_rng_state, set_rng_state
from megatron_xorl.weights.manifest import (
    describe_files,
    read_manifest,
    verify_files,
    write_manifest,
)

__all__ = ["load_checkpoint", "save_checkpoint"]

logger = logging.getLogger(__name__)


def save_checkpoint(
    root: Path,
    iteration: int,
    models: list[nn.Module],
    optimizer: MegatronOptimizer,
    common: dict[str, Any],
    *,
    keep_last: int | None = None,
) -> Path:
    """Save the adapter state of all ranks; collective.

    Args:
        root: checkpoint root, shared by all ranks.
        iteration: finished iterations.
        models: model chunks of this rank, in any wrapping.
        optimizer: Megatron's optimizer.
        common: JSON document that goes into the manifest (see :func:`load_checkpoint` for what is compared).
        keep_last: keep this many newest checkpoints, all when None.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: a factor or its optimizer state is not finite; nothing was written, earlier checkpoints are as they were.
    """
    parameters = _trainable(models)
    tensors = _sharded_for_save(models, optimizer, parameters)
    _refuse_nonfinite(tensors, iteration)
    final = iteration_directory(root, iteration)
    partial = final.with_name(final.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(tensors, str(partial))
    files = _describe_all(partial)
    steps = _merge(steps_by_parameter(optimizer, parameters))
    described = _merge(
        {name: dataclasses.asdict(factor) for name, (factor, _, _) in named_factors(models).items()}
    )
    if dist.get_rank() == 0:
        factors = {name: described[name] | {"step": step} for name, step in sorted(steps.items())}
        write_manifest(
            partial,
            common
            | {
                "format_version": FORMAT_VERSION,
                "iteration": iteration,
                "factors": factors,
                "files": files,
            },
        )
        _publish(root, partial, final, iteration)
        _retain(root, iteration, keep_last)
    dist.barrier()
    return final


def load_checkpoint(
    root: Path,
    models: list[nn.Module],
    optimizer: MegatronOptimizer,
    expected: dict[str, Any],
) -> dict[str, Any] | None:
    """Restore the latest checkpoint under ``root``; collective.

    Args:
        root: checkpoint root.
        models: model chunks of this rank, adapters attached.
        optimizer: Megatron's optimizer, fresh.
        expected: what the checkpoint must agree with: ``base``, ``adapter`` and ``forward`` documents as given to
            :func:`save_checkpoint`, compared value by value, and ``layout``, which decides whether random state is restored.

    Returns:
        The manifest, or None when nothing was ever saved under ``root``.

    Raises:
        CheckpointError: damaged files, or a checkpoint of another run; nothing was changed.
    """
    iteration = latest_iteration(root)
    if iteration is None:
        return None
    directory = checkpoint_directory(root, iteration)
    manifest = read_manifest(directory)
    check_agrees(directory, manifest, expected)
    _verify_share(directory, manifest["files"])
    parameters = _trainable(models)
    _check_factors(directory, manifest, models)
    loaded = dist_checkpointing.load(
        _sharded_for_load(models, manifest, expected),
        str(directory),
        validate_access_integrity=False,
    )
    _restore(models, optimizer, parameters, loaded, manifest)
    if manifest["layout"] == expected["layout"]:
        set_rng_state(
            {
                key.rpartition("/")[2]: value
                for key, value in loaded.items()
                if key.startswith("rng/")
            }
        )
    else:
        logger.warning(
            "the layout changed from %s to %s: random state starts from the seed",
            manifest["layout"],
            expected["layout"],
        )
    return manifest


def _trainable(models: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    return {
        name: param
        for name, (factor, _, param) in named_factors(models).items()
        if factor.trainable
    }


def _sharded_for_save(
    models: list[nn.Module], optimizer: MegatronOptimizer, parameters: dict[str, nn.Parameter]
) -> dict[str, ShardedTensor]:
    slices = {name: piece for name, (_, piece, _) in named_factors(models).items()}
    tensors: dict[str, ShardedTensor] = {}
    for name, state in gather_state(optimizer, parameters):
        if state is None or not _first_replica(slices[name]):
            continue
        tensors[f"lora/{name}"] = _sharded(f"lora/{name}", parameters[name].detach(), slices[name])
        for row, kind in enumerate(STATE_KINDS):
            tensors[f"{kind}/{name}"] = _sharded(f"{kind}/{name}", state[row], slices[name])
    for kind, value in get_rng_state().items():
        key = f"rng/{dist.get_rank()}/{kind}"
        tensors[key] = ShardedTensor.from_rank_offsets(key, value)
    return tensors


def _sharded_for_load(
    models: list[nn.Module], manifest: dict[str, Any], expected: dict[str, Any]
) -> dict[str, ShardedTensor]:
    tensors: dict[str, ShardedTensor] = {}
    for name, (factor, piece, parameter) in named_factors(models).items():
        if not factor.trainable:
            continue
        tensors[f"lora/{name}"] = _sharded(
            f"lora/{name}", torch.empty_like(parameter.detach()), piece
        )
        for kind in STATE_KINDS:
            empty = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            tensors[f"{kind}/{name}"] = _sharded(f"{kind}/{name}", empty, piece)
    if manifest["layout"] == expected["layout"]:
        for kind, value in get_rng_state().items():
            key = f"rng/{dist.get_rank()}/{kind}"
            tensors[key] = ShardedTensor.from_rank_offsets(key, torch.empty_like(value))
    return tensors


def _sharded(key: str, data: Tensor, piece: FactorSlice) -> ShardedTensor:
    offsets = []
    if piece.factor.tp_axis is not None:
        offsets.append((piece.factor.tp_axis, *piece.tp))
    if piece.factor.ep_axis is not None:
        offsets.append((piece.factor.ep_axis, *piece.ep))
    return ShardedTensor.from_rank_offsets(key, data, *offsets)


def _first_replica(piece: FactorSlice) -> bool:
    """Whether this tensor rank writes a factor that the tensor group holds in copies.

    A bank's replicas all lie in the data-parallel group that chose the owner, except that a shared
    factor is also copied over the tensor group.
    """
    if piece.factor.ep_axis is not None or piece.factor.tp_axis is not None:
        return True
    return parallel_state.get_tensor_model_parallel_rank() == 0


def _restore(
    models: list[nn.Module],
    optimizer: MegatronOptimizer,
    parameters: dict[str, nn.Parameter],
    loaded: dict[str, Tensor],
    manifest: dict[str, Any],
) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(loaded[f"lora/{name}"])
    state = {name: {kind: loaded[f"{kind}/{name}"] for kind in STATE_KINDS} for name in parameters}
    steps = {name: manifest["factors"][name]["step"] for name in parameters}
    scatter_state(optimizer, parameters, state, steps)
    check_trainability(models)


def _describe_all(directory: Path) -> dict[str, Any]:
    """Every rank flushes and hashes its own files, rank 0 also the common ones."""
    rank = dist.get_rank()
    own = [path.name for path in directory.iterdir() if _writer_rank(path.name) == rank]
    return _merge(describe_files(directory, own))


def _writer_rank(name: str) -> int:
    """Rank whose file this is: ``__3_0.distcp`` is rank 3's, everything else rank 0's."""
    head = name.removeprefix("__").split("_")[0]
    return int(head) if name.startswith("__") and head.isdigit() else 0


def _merge(document: dict[str, Any]) -> dict[str, Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, document)
    return {key: value for part in gathered for key, value in part.items()}


def _publish(root: Path, partial: Path, final: Path, iteration: int) -> None:
    """Give the finished directory its name and point ``latest`` at it."""
    replaced = final.with_name(final.name + REPLACED)
    # Where there is no final one, an earlier save was killed here, and the one moved aside is all there is.
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(partial, final)
    pointer = root / f"{LATEST}.partial"
    with open(pointer, "w", encoding="utf-8") as stream:
        stream.write(f"{iteration}\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(pointer, root / LATEST)
    handle = os.open(root, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    shutil.rmtree(replaced, ignore_errors=True)


def _retain(root: Path, newest: int, keep_last: int | None) -> None:
    if keep_last is None:
        return
    complete = sorted(path for path in root.glob("iter_*") if path.suffix == "" and path.is_dir())
    older = [path for path in complete if path != iteration_directory(root, newest)]
    for path in older[: max(0, len(complete) - keep_last)]:
        shutil.rmtree(path)


def _verify_share(directory: Path, files: dict[str, Any]) -> None:
    """Ranks share the hashing; a fault found by one stops all with the same message."""
    world, rank = dist.get_world_size(), dist.get_rank()
    fault = None
    try:
        verify_files(directory, {name: files[name] for name in sorted(files)[rank::world]})
    except CheckpointError as error:
        fault = str(error)
    _raise_first(fault)


def _refuse_nonfinite(tensors: dict[str, ShardedTensor], iteration: int) -> None:
    """A state with NaN or infinity is never written, so it can never replace a good checkpoint."""
    bad = [
        key
        for key, tensor in tensors.items()
        if tensor.data.is_floating_point() and not bool(tensor.data.isfinite().all())
    ]
    _raise_first(
        f"iteration {iteration} is not saved: {len(bad)} tensors of its state are not finite, first {bad[0]}; the checkpoints "
        "before it are unchanged: resume from the last one with a lower learning rate, and check the base for NaN"
        if bad
        else None
    )


def _raise_first(fault: str | None) -> None:
    """Raise the first rank's fault on every rank; collective."""
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    if found := [text for text in faults if text]:
        raise CheckpointError(found[0])


def _check_factors(directory: Path, manifest: dict[str, Any], models: list[nn.Module]) -> None:
    """Compare every factor that trains here with its description in the manifest: name, shape, dtype."""
    faults = []
    for name, (factor, _, _) in named_factors(models).items():
        if not factor.trainable:
            continue
        saved = manifest["factors"].get(name)
        if saved is None:
            faults.append(f"{name} is not in it")
        elif (tuple(saved["shape"]), saved["dtype"]) != (factor.shape, factor.dtype):
            faults.append(
                f"{name} is {saved['dtype']} {saved['shape']}, this run has {factor.dtype} {list(factor.shape)}"
            )
    if faults:
        raise CheckpointError(
            f"{directory} does not hold {len(faults)} of the factors that train here, first: {faults[0]}; "
            "resume with the same targets, scope and dtype"
        )
