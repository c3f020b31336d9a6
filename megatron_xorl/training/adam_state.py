"""Zero Adam state for every parameter that was never stepped, so that a checkpoint holds the state of all.

Adam creates a parameter's state when it first sees a gradient. A trainable parameter that was unused so far is therefore in the
optimizer's groups and not in its state, and torch's distributed checkpoint, whose template of a fresh optimizer holds every
parameter, refuses to load what was saved (``Missing key in checkpoint state_dict: ... .step``; pytorch issues 192224, 192202).

The one idea: Adam skips a parameter without a gradient, so state of zeros at step 0 is exactly what its first update would
start from; writing it down early changes no bit of the training that follows.

Refused: state of which only a part is there, which is damage and not laziness; optimizers that are not Adam.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.errors import CheckpointError

__all__ = ["adam_optimizers", "materialize_adam_state", "state_keys"]


def materialize_adam_state(optimizer: Any, names: Mapping[Tensor, str] | None = None) -> int:
    """Give every parameter that trains and was never stepped zero Adam state; a second call changes nothing.

    Call it before a state dict is taken, to save it or as the template of a load. ``step`` is 0, moments are zero, of the dtype,
    device and memory format that the optimizer itself would choose at the first update (``amsgrad``'s maximum too).

    Args:
        optimizer: ``torch.optim.Adam`` or ``AdamW``; Transformer Engine's or apex's FusedAdam, or one with their interface (step
            in the parameter group); or Megatron's wrapper around one, several (ChainedOptimizer) or none.
        names: of parameters, for messages.

    Returns:
        How many parameters were given state.

    Raises:
        CheckpointError: a parameter has only part of its state (named), or the optimizer is not Adam.
    """
    # Megatron's masters never require a gradient; all of them train.
    masters = not isinstance(optimizer, torch.optim.Optimizer)
    made = 0
    for inner in adam_optimizers(optimizer):
        for number, group in enumerate(inner.param_groups):
            expected = state_keys(inner, group)
            for place, parameter in enumerate(group["params"]):
                if not (parameter.requires_grad or masters):
                    continue
                label = (names or {}).get(parameter, f"parameter {place} of group {number}")
                made += _materialize(inner, group, parameter, expected, label)
            if group["params"] and not _is_torch_adam(inner):
                group.setdefault("step", 0)
    return made


def adam_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizers inside ``optimizer``, itself included; stubs of empty parameter sets are passed over.

    Raises:
        CheckpointError: one is not Adam.
    """
    if hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from adam_optimizers(part)
        return
    if optimizer is None or getattr(optimizer, "is_stub_optimizer", False):
        return
    if not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
        yield from adam_optimizers(optimizer.optimizer)
        return
    if not _is_torch_adam(optimizer) and not _is_fused_adam(optimizer):
        raise CheckpointError(
            f"the optimizer is {type(optimizer).__name__}; expected torch's Adam or AdamW, or one with FusedAdam's interface "
            "(step and bias_correction in the parameter group); use one of these"
        )
    yield optimizer


def state_keys(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of a stepped parameter's state."""
    if _is_torch_adam(optimizer):
        return (
            "step",
            "exp_avg",
            "exp_avg_sq",
            *(("max_exp_avg_sq",) if group["amsgrad"] else ()),
        )
    # Transformer Engine's keeps masters in the state when it owns them.
    return ("exp_avg", "exp_avg_sq", *(("master_param",) if _owns_masters(optimizer) else ()))


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _is_fused_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Optimizer) and all(
        "bias_correction" in group and "betas" in group for group in optimizer.param_groups
    )


def _owns_masters(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "master_weights", False)) and hasattr(
        optimizer, "initialize_state"
    )


def _materialize(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    expected: tuple[str, ...],
    label: str,
) -> bool:
    state = optimizer.state.get(parameter, {})
    absent = [key for key in expected if key not in state]
    if not absent:
        return False
    if state:
        raise CheckpointError(
            f"{label} has {', '.join(sorted(state))} and no {', '.join(absent)}: part of its Adam state is missing; a state "
            "is complete or absent: load it again from a checkpoint that has all of it"
        )
    if _is_torch_adam(optimizer):
        optimizer.state[parameter] = _torch_state(group, parameter, expected)
    elif hasattr(optimizer, "initialize_state"):
        _fused_state(optimizer, parameter)
    else:
        # apex: fp32 moments whatever the parameter's dtype.
        optimizer.state[parameter] = {
            key: torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            for key in expected
        }
    return True


def _torch_state(
    group: Mapping[str, Any], parameter: Tensor, expected: tuple[str, ...]
) -> dict[str, Tensor]:
    """As ``torch.optim.Adam`` itself does at a first update.

    ``step`` lives on the CPU, unless a kernel reads it (``capturable``, ``fused``), and is double where that is the default
    dtype, unless the kernel is the fused one.
    """
    on_device = group["capturable"] or group["fused"]
    double = torch.get_default_dtype() == torch.float64 and not group["fused"]
    state = {
        "step": torch.zeros(
            (),
            dtype=torch.float64 if double else torch.float32,
            device=parameter.device if on_device else "cpu",
        )
    }
    for key in expected[1:]:
        state[key] = torch.zeros_like(
            parameter, memory_format=torch.preserve_format, requires_grad=False
        )
    return state


def _fused_state(optimizer: Any, parameter: Tensor) -> None:
    """Transformer Engine's own initialisation; it takes ``store_param_remainders`` since 2.1."""
    wanted = inspect.signature(optimizer.initialize_state).parameters
    extra = (
        (getattr(optimizer, "store_param_remainders", False),)
        if "store_param_remainders" in wanted
        else ()
    )
    optimizer.initialize_state(parameter, *extra)
