"""Compare two training states exactly, by logical factor name: checkpoints, live optimizers, or one with the other.

The one idea: whatever a state lies in (files of either form and any layout, Megatron's buckets, a torch optimizer), it is read as
``{factor: full fp32 master, moments, value, step}`` and compared bit by bit. State that was never created and state of zeros at
step 0 are the same state: a first update starts from either alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_xorl.errors import CheckpointError
from megatron_xorl.training.checkpoint_forms import FORMS, read_whole
from megatron_xorl.training.resume import check_version, checkpoint_directory, latest_iteration
from megatron_xorl.weights.manifest import MANIFEST, read_manifest, verify_files

__all__ = ["Difference", "compare_states"]

KINDS = ("lora", "master", "exp_avg", "exp_avg_sq")

type State = dict[str, dict[str, Tensor | int]]


@dataclass(frozen=True)
class Difference:
    """One place where two states differ: ``what`` of factor ``name`` (or of the run, where name is empty)."""

    name: str
    what: str
    detail: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.name or 'run'}: {self.what}: {self.detail}"


def compare_states(one: Any, other: Any) -> tuple[Difference, ...]:
    """Every difference of two training states; none means that both go on to the same bits.

    Args:
        one: a checkpoint (directory, or root: the latest), or ``(model or chunks, optimizer)``, live; the latter is collective.
        other: the same.

    Raises:
        CheckpointError: a checkpoint is missing or damaged, or a live state is partly there.
    """
    (first, run), (second, other_run) = _read(one), _read(other)
    found = [
        Difference("", key, f"{run[key]!r} and {other_run[key]!r}")
        for key in sorted(run.keys() & other_run.keys())
        if run[key] != other_run[key]
    ]
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            found.append(
                Difference(name, "factor", f"only in the {'first' if name in first else 'second'}")
            )
            continue
        found += _differences(name, first[name], second[name])
    return tuple(found)


def _differences(
    name: str, a: dict[str, Tensor | int], b: dict[str, Tensor | int]
) -> Iterable[Difference]:
    if a["step"] != b["step"]:
        yield Difference(name, "step", f"{a['step']} and {b['step']}")
    for kind in KINDS:
        left, right = a.get(kind), b.get(kind)
        if left is None and right is None:
            continue
        present = left if left is not None else right
        assert isinstance(present, Tensor)
        # Absent is zero, for moments; a master that is not kept apart is the factor itself.
        left, right = (_or_default(state, kind, present) for state in (a, b))
        if left.shape != right.shape or left.dtype != right.dtype:
            yield Difference(name, kind, f"{_form(left)} and {_form(right)}")
        elif not torch.equal(left, right):
            gap = (left.double() - right.double()).abs()
            count = int((left != right).sum())
            yield Difference(
                name, kind, f"{count} of {left.numel()} elements, largest {gap.max().item():.3g}"
            )


def _or_default(state: dict[str, Tensor | int], kind: str, like: Tensor) -> Tensor:
    value = state.get(kind)
    if isinstance(value, Tensor):
        return value
    lora = state.get("lora")
    if kind == "master" and isinstance(lora, Tensor):
        return lora.float()
    return torch.zeros_like(like)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _read(source: Any) -> tuple[State, dict[str, Any]]:
    if isinstance(source, str | Path):
        return _read_checkpoint(Path(source))
    model, optimizer = source
    models = [model] if isinstance(model, nn.Module) else list(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _read_plain(models, optimizer), {}
    return _read_live(models, optimizer), {}


def _read_checkpoint(path: Path) -> tuple[State, dict[str, Any]]:
    """Tensors one checkpoint at a time; the run's own numbers from the manifest."""
    if not (path / MANIFEST).exists():
        iteration = latest_iteration(path)
        if iteration is None:
            raise CheckpointError(
                f"{path} holds no checkpoint; give a checkpoint or the root of several"
            )
        path = checkpoint_directory(path, iteration)
    manifest = read_manifest(path)
    check_version(path, manifest)
    verify_files(path, manifest["files"])
    form = manifest.get("form", FORMS[0])
    state: State = {}
    for name, factor in (manifest.get("frozen", {}) | manifest["factors"]).items():
        kinds = KINDS if name in manifest["factors"] else ("lora",)
        shape = tuple(factor["shape"])
        state[name] = {"step": factor.get("step", 0)}
        for kind in kinds:
            dtype = getattr(torch, factor["dtype"]) if kind == "lora" else torch.float32
            state[name][kind] = read_whole(form, path, f"{kind}/{name}", shape, dtype)
    keys = ("iteration", "consumed_train_samples", "scheduler")
    return state, {key: manifest[key] for key in keys if key in manifest}


def _read_plain(models: list[nn.Module], optimizer: torch.optim.Optimizer) -> State:
    """One process and torch's own optimizer; state that is not there is left out."""
    from megatron_xorl.layers.attach import named_factors

    factors = {
        name: p for name, (factor, _, p) in named_factors(models).items() if factor.trainable
    }
    named = factors or {
        name: p for model in models for name, p in model.named_parameters() if p.requires_grad
    }
    state: State = {}
    for name, parameter in named.items():
        held = optimizer.state.get(parameter, {})
        state[name] = {"lora": parameter.detach(), "step": int(held.get("step", 0))}
        state[name] |= {kind: held[kind] for kind in KINDS if kind in held}
    return state


def _read_live(models: list[nn.Module], optimizer: Any) -> State:
    """All ranks' pieces of Megatron's state, put together on every rank; collective."""
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.training.adapter_io import writes_slice
    from megatron_xorl.training.optimizer_state import STATE_KINDS, gather_state, steps_by_parameter

    held = named_factors(models)
    parameters = {name: p for name, (factor, _, p) in held.items() if factor.trainable}
    mine: dict[str, Tensor] = {}
    for name, gathered in gather_state(optimizer, parameters):
        if gathered is not None:
            mine[name] = gathered
    told: list[Any] = [None] * dist.get_world_size()
    shapes = {
        name: (factor.shape, factor.dtype)
        for name, (factor, *_) in held.items()
        if factor.trainable
    }
    # One of the ranks that have a factor's state contributes it; which, all agree on.
    dist.all_gather_object(
        told, (shapes, steps_by_parameter(optimizer, parameters), list(_boxes(held, mine)))
    )
    state: State = {}
    for shapes_of_rank, steps, _ in told:
        for name, described in shapes_of_rank.items():
            state.setdefault(name, {"step": 0, "lora": described})
        for name, step in steps.items():
            state.setdefault(name, {})["step"] = step
    writers = {box: rank for rank, (*_, boxes) in reversed(list(enumerate(told))) for box in boxes}
    for name in sorted(state):
        shape, dtype = state[name]["lora"]
        full = {kind: torch.zeros(shape) for kind in STATE_KINDS} | {
            "lora": torch.zeros(shape, dtype=getattr(torch, dtype))
        }
        if name in held:
            _, piece, parameter = held[name]
            if name in mine and writers[name, piece.ranges] == dist.get_rank():
                for row, kind in enumerate(STATE_KINDS):
                    piece.of(full[kind]).copy_(mine[name][row])
            if writes_slice(piece):
                piece.of(full["lora"]).copy_(parameter.detach())
        for tensor in full.values():
            if dist.get_world_size() > 1:
                dist.all_reduce(tensor.view(torch.uint8))  # one rank contributes each byte
        state[name] |= full
    return state


def _boxes(held: dict[str, Any], mine: dict[str, Tensor]) -> Iterable[tuple[str, Any]]:
    for name in mine:
        yield name, held[name][1].ranges
