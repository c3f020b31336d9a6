"""Trained parameters and Adam state of a plain torch optimizer, to and from a torch distributed checkpoint.

For the library user whose loop has ``torch.optim.AdamW`` and no Megatron optimizer. Both of torch's forms are written and read:
the native one (parameter groups as a list) and the flattened one (``optim.param_groups.<name>.lr``), which other users of torch's
distributed checkpoint read with ``StateDictOptions(flatten_optimizer_state_dict=True)``.

The one idea: :func:`~megatron_xorl.training.adam_state.materialize_adam_state` comes before every save and before every load, so
that both sides hold the same keys; what a file of before that lacks entirely is zeros, what it lacks in part is damage.

Refused: a parameter of which the checkpoint has only a part of the state; a trained parameter that it does not hold.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_xorl.errors import CheckpointError
from megatron_xorl.training.adam_state import materialize_adam_state

__all__ = ["load_torch_state", "save_torch_state"]

logger = logging.getLogger(__name__)


def save_torch_state(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, flatten: bool = False
) -> None:
    """Save what trains of ``model`` and the optimizer's state; collective where a process group is up.

    Args:
        path: directory to write, ``model.<parameter>`` and ``optim.…`` inside.
        model: its parameters that require a gradient are written, nothing of the frozen base.
        optimizer: ``torch.optim.Adam`` or ``AdamW``; state that is missing is created, of zeros at step 0.
        flatten: write the flattened form.

    Raises:
        CheckpointError: a parameter has only part of its state.
    """
    materialize_adam_state(optimizer, _names(model))
    dcp.save(_state(model, optimizer, flatten), checkpoint_id=str(path))


def load_torch_state(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[str, ...]:
    """Load what :func:`save_torch_state`, or torch itself, saved in either form, into a model and an optimizer of any age.

    Returns:
        Names of the parameters whose state the checkpoint lacks entirely: they have zeros at step 0, and a log line says so.

    Raises:
        CheckpointError: the checkpoint lacks a trained parameter, or has only a part of a parameter's state. Nothing was changed.
    """
    materialize_adam_state(optimizer, _names(model))
    present = set(dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata)
    state = _state(model, optimizer, flatten="optim.param_groups.0.lr" not in present)
    absent = _absent(Path(path), state, present)
    _keep_present(state, absent, present)
    dcp.load(state, checkpoint_id=str(path))
    _restore(model, optimizer, state["optim"], absent)
    if absent:
        logger.warning(
            "%s has no Adam state of %d parameters, first %s: they start with zeros at step 0",
            path, len(absent), absent[0],
        )  # fmt: skip
    return absent


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, flatten: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, ignore_frozen_params=True)
    return {
        # Parameters alone: the codes and scales of a frozen FP8 base are buffers, and torch's own function would include them.
        "model": {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        },
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }


def _is_flat(optim: dict[str, Any]) -> bool:
    return "param_groups" not in optim


def _keys_of(optim: dict[str, Any], name: str) -> set[str]:
    """State keys of a parameter, as they are called in a checkpoint."""
    if _is_flat(optim):
        return {f"optim.{key}" for key in optim if _owner(key) == name}
    return {f"optim.state.{name}.{key}" for key in optim["state"].get(name, {})}


def _owner(key: str) -> str | None:
    return key.removeprefix("state.").rpartition(".")[0] if key.startswith("state.") else None


def _absent(path: Path, state: dict[str, Any], present: set[str]) -> tuple[str, ...]:
    """Parameters of which the checkpoint has no state at all."""
    absent, faults = [], []
    for name in state["model"]:
        if f"model.{name}" not in present:
            faults.append(f"{name} is not in it")
        wanted = _keys_of(state["optim"], name)
        if missing := sorted(wanted - present):
            if len(missing) == len(wanted):
                absent.append(name)
            else:
                short = ", ".join(key.rpartition(".")[2] for key in missing)
                faults.append(f"part of the Adam state of {name} is missing: {short}")
    if faults:
        raise CheckpointError(
            f"{path} does not hold this model: {'; '.join(faults[:5])}; use the checkpoint of the same model and optimizer, "
            "undamaged"
        )
    return tuple(absent)


def _keep_present(state: dict[str, Any], absent: tuple[str, ...], present: set[str]) -> None:
    """Ask only for what the checkpoint has; the names in the groups are the optimizer's own."""
    optim = state["optim"]
    for name in absent:
        if _is_flat(optim):
            for key in [key for key in optim if _owner(key) == name]:
                del optim[key]
        else:
            del optim["state"][name]
    if _is_flat(optim):
        for key in [key for key in optim if f"optim.{key}" not in present]:
            del optim[key]
    else:
        for group in optim["param_groups"]:
            group.pop("params")


def _restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loaded: dict[str, Any],
    absent: tuple[str, ...],
) -> None:
    """Fill the gaps of the loaded state with zeros and give it to the optimizer."""
    by_name = dict(model.named_parameters())
    for name in absent:
        optimizer.state.pop(by_name[name], None)
    materialize_adam_state(optimizer)
    flat = _is_flat(loaded)
    whole = _state(model, optimizer, flat)["optim"]
    if flat:
        whole |= loaded
    else:
        whole["state"] |= loaded["state"]
        for group, values in zip(whole["param_groups"], loaded["param_groups"], strict=True):
            group |= values
    set_optimizer_state_dict(
        model, optimizer, whole, options=StateDictOptions(ignore_frozen_params=True,
                                                          flatten_optimizer_state_dict=flat)
    )  # fmt: skip
