"""Adapter checkpoints: factors, fp32 masters, moments, scheduler, random state and data position; never the base.

Layout of a checkpoint directory ``iter_0000040/``: torch DCP files (by Megatron's ``torch_dist`` strategy, or torch alone)
and ``manifest.json``. Every tensor is keyed by its logical factor name in its full logical shape (``lora``, ``master``,
``exp_avg``, ``exp_avg_sq``; spelled by ``training.checkpoint_forms``), so that no bucket, optimizer chain or parallel layout
shows in the file and every layout reads it. Everything that is no tensor is JSON in the manifest.

A checkpoint exists if and only if its manifest verifies: ranks write and fsync their files, then rank 0 writes the manifest,
renames the directory and changes ``latest`` with ``os.replace``. A killed save leaves the previous checkpoint as it was; a
damaged one is refused by file name.

Refused: another base (fingerprint), other adapters (rank, alpha, targets), another forward mode, a newer format, and a scope that
leaves out factors which contribute (``training.scope_change``).
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron_xorl.errors import CheckpointError
from megatron_xorl.layers.attach import check_trainability, named_factors
from megatron_xorl.layers.lora import FactorSlice
from megatron_xorl.training.checkpoint_forms import (
    FORMS,
    Box,
    read_boxes,
    torch_groups,
    write_boxes,
)
from megatron_xorl.training.optimizer_state import (
    STATE_KINDS,
    gather_state,
    group_values,
    scatter_state,
    steps_by_parameter,
)
from megatron_xorl.training.publish import publish, retain
from megatron_xorl.training.resume import (
    FORMAT_VERSION,
    check_agrees,
    checkpoint_directory,
    iteration_directory,
    latest_iteration,
)
from megatron_xorl.training.rng import get_rng_state, set_rng_state
from megatron_xorl.training.scope_change import (
    ScopeChange,
    carried_factors,
    raise_first,
    scope_change,
)
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
    keep_every: int | None = None,
    form: str = "torch_dist",
) -> Path:
    """Save the adapter state of all ranks; collective.

    Args:
        root: checkpoint root, shared by all ranks.
        iteration: finished iterations.
        models: model chunks of this rank, in any wrapping.
        optimizer: Megatron's optimizer.
        common: JSON document that goes into the manifest (see :func:`load_checkpoint` for what is compared).
        keep_last: keep this many newest checkpoints, all when None.
        keep_every: iterations that are multiples of it are kept too.
        form: ``torch_dist``, or ``dcp`` for files that torch's distributed checkpoint reads without Megatron.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: a factor or its optimizer state is not finite, or only partly there; nothing was written, earlier
            checkpoints are as they were.
    """
    if form not in FORMS:
        raise CheckpointError(f"no checkpoint form {form!r}; choose from {', '.join(FORMS)}")
    parameters = _trainable(models)
    described = {
        name: dataclasses.asdict(factor) for name, (factor, *_) in named_factors(models).items()
    }
    carried = carried_factors(models)
    steps = _merge(_own_steps(optimizer, parameters))
    boxes = _boxes_to_save(models, optimizer, parameters, carried, steps if form == "dcp" else {})
    _refuse_nonfinite(boxes, iteration)
    final = iteration_directory(root, iteration)
    partial = final.with_name(final.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    adam = _merge(group_values(optimizer, parameters))
    write_boxes(form, partial, boxes, torch_groups(adam) if form == "dcp" else {})
    files = _describe_all(partial)
    described = _merge(described)
    if dist.get_rank() == 0:
        document = {
            "format_version": FORMAT_VERSION,
            "form": form,
            "iteration": iteration,
            "factors": {
                name: described[name] | {"step": step} for name, step in sorted(steps.items())
            },
            "adam": adam,
            "frozen": {name: described[name] for name in sorted(carried)},
            "files": files,
        }
        write_manifest(partial, common | document)
        publish(root, partial, final, iteration)
        retain(root, iteration, keep_last, keep_every)
    dist.barrier()
    return final


def load_checkpoint(
    root: Path,
    models: list[nn.Module],
    optimizer: MegatronOptimizer,
    expected: dict[str, Any],
) -> dict[str, Any] | None:
    """Restore the latest checkpoint under ``root``, of either form; collective.

    Factors that joined since (a wider scope) start with zero state and step 0, in parameter groups of their own.

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
    change = scope_change(directory, manifest, models, expected["adapter"])
    parameters = _trainable(models)
    boxes = _boxes_to_load(models, change)
    same_layout = manifest["layout"] == expected["layout"]
    if same_layout:
        boxes |= {key: Box(torch.empty_like(box.data)) for key, box in _rng_boxes().items()}
    loaded = read_boxes(manifest.get("form", FORMS[0]), directory, boxes)
    _restore(models, optimizer, parameters, loaded, manifest, change)
    check_trainability(
        models, allow_nonzero_frozen=bool(expected["adapter"].get("allow_nonzero_frozen"))
    )
    if same_layout:
        set_rng_state({key.rpartition("/")[2]: loaded[key] for key in _rng_boxes()})
    else:
        logger.warning(
            "the layout changed from %s to %s: random state starts from the seed",
            manifest["layout"],
            expected["layout"],
        )
    return manifest


def _own_steps(optimizer: MegatronOptimizer, parameters: dict[str, nn.Parameter]) -> dict[str, int]:
    """Steps of what this rank holds; what one rank finds wrong with its state stops all."""
    steps, fault = {}, None
    try:
        steps = steps_by_parameter(optimizer, parameters)
    except CheckpointError as error:
        fault = str(error)
    raise_first(fault)
    return steps


def _trainable(models: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    return {
        name: param
        for name, (factor, _, param) in named_factors(models).items()
        if factor.trainable
    }


def _boxes_to_save(
    models: list[nn.Module],
    optimizer: MegatronOptimizer,
    parameters: dict[str, nn.Parameter],
    carried: Mapping[str, nn.Parameter | None],
    steps: dict[str, int],
) -> dict[str, Box]:
    slices = {name: piece for name, (_, piece, _) in named_factors(models).items()}
    boxes: dict[str, Box] = {}
    for name, state in gather_state(optimizer, parameters):
        if state is None or not _first_replica(slices[name]):
            continue
        boxes[f"lora/{name}"] = _box(parameters[name].detach(), slices[name])
        for row, kind in enumerate(STATE_KINDS):
            boxes[f"{kind}/{name}"] = _box(state[row], slices[name])
        if steps:
            boxes[f"step/{name}"] = Box(torch.tensor(float(steps[name])))
    boxes |= {
        f"lora/{name}": _box(p.detach(), slices[name])
        for name, p in carried.items()
        if p is not None
    }
    return boxes | _rng_boxes()


def _boxes_to_load(models: list[nn.Module], change: ScopeChange) -> dict[str, Box]:
    boxes: dict[str, Box] = {}
    for name, (_, piece, parameter) in named_factors(models).items():
        if name in change.valued:
            boxes[f"lora/{name}"] = _box(torch.empty_like(parameter.detach()), piece)
        for kind in STATE_KINDS if name in change.kept else ():
            empty = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            boxes[f"{kind}/{name}"] = _box(empty, piece)
    return boxes


def _rng_boxes() -> dict[str, Box]:
    return {f"rng/{dist.get_rank()}/{kind}": Box(value) for kind, value in get_rng_state().items()}


def _box(data: Tensor, piece: FactorSlice) -> Box:
    cuts = []
    if piece.factor.tp_axis is not None:
        cuts.append((piece.factor.tp_axis, *piece.tp))
    if piece.factor.ep_axis is not None:
        cuts.append((piece.factor.ep_axis, *piece.ep))
    return Box(data, tuple(cuts))


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
    change: ScopeChange,
) -> None:
    with torch.no_grad():
        for name, (_, _, parameter) in named_factors(models).items():
            if name in change.valued:
                parameter.copy_(loaded[f"lora/{name}"])
    state = {}
    for name, parameter in parameters.items():
        if name in change.kept:
            state[name] = {kind: loaded[f"{kind}/{name}"] for kind in STATE_KINDS}
        else:
            zero = torch.zeros(parameter.shape, device=parameter.device)
            state[name] = {
                "master": parameter.detach().float(),
                "exp_avg": zero,
                "exp_avg_sq": zero,
            }
    # Steps of all stages, so that every rank makes the same parameter groups.
    steps = {
        name: factor["step"]
        for name, factor in manifest["factors"].items()
        if name in change.training
    }
    scatter_state(optimizer, parameters, state, steps | dict.fromkeys(change.joined, 0))


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


def _verify_share(directory: Path, files: dict[str, Any]) -> None:
    """Ranks share the hashing; a fault found by one stops all with the same message."""
    world, rank = dist.get_world_size(), dist.get_rank()
    fault = None
    try:
        verify_files(directory, {name: files[name] for name in sorted(files)[rank::world]})
    except CheckpointError as error:
        fault = str(error)
    raise_first(fault)


def _refuse_nonfinite(boxes: dict[str, Box], iteration: int) -> None:
    """A state with NaN or infinity is never written, so it can never replace a good checkpoint."""
    bad = [
        key
        for key, box in boxes.items()
        if box.data.is_floating_point() and not bool(box.data.isfinite().all())
    ]
    raise_first(
        f"iteration {iteration} is not saved: {len(bad)} tensors of its state are not finite, first {bad[0]}; the checkpoints "
        "before it are unchanged: resume from the last one with a lower learning rate, and check the base for NaN"
        if bad
        else None
    )
