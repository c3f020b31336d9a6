"""Adam's step of each parameter inside Megatron's optimizers, where parameters may be at different steps.

FusedAdam keeps one ``step`` for a parameter group, torch's Adam one for each parameter. After a scope is widened the factors that
joined are at step 0 and the others are not; they then live in groups of their own, so that a factor's first update is a fresh
Adam's, whatever the run's iteration.

The one idea: a split group is a copy of the group it came from (learning rate and weight decay follow the same schedule) and
remembers which; :func:`set_steps` undoes earlier splits first, so that it can be called again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.training.adam_state import state_keys

__all__ = ["SPLIT_FROM", "get_step", "set_steps"]

SPLIT_FROM = "split_from"
"""Key of a split group: the index of the group that it was a part of."""


def get_step(inner: torch.optim.Optimizer, group: Mapping[str, Any], main: Tensor) -> int:
    """Adam's step of one parameter of a torch optimizer; 0 before its first update."""
    own = "step" in state_keys(inner, group)
    return int((inner.state.get(main, {}) if own else group).get("step", 0))


def set_steps(part: Any, steps: Mapping[Tensor, int], all_steps: set[int]) -> None:
    """Give every parameter of a Megatron optimizer its step, in groups of their own where they differ.

    Args:
        part: Megatron's optimizer around one torch optimizer.
        steps: of the parameters that the torch optimizer holds on this rank; each has its Adam state.
        all_steps: that occur on any rank, so that all ranks have the same groups.
    """
    inner = part.optimizer
    if any("step" in state_keys(inner, group) for group in inner.param_groups):
        for main, step in steps.items():
            # A tensor of its own: Megatron 0.19.2 gives all parameters one, which then counts every parameter's update.
            inner.state[main]["step"] = torch.full_like(inner.state[main]["step"], step)
        return
    _merge(inner)
    main_step, *others = sorted(all_steps, reverse=True)
    for index, group in enumerate(list(inner.param_groups)):
        everything = group["params"]
        group["params"] = [m for m in everything if steps.get(m, main_step) == main_step]
        for step in others:
            members = [m for m in everything if steps.get(m) == step]
            inner.param_groups.append(group | {"params": members, SPLIT_FROM: index})
            _set_step(inner.param_groups[-1], step)
        _set_step(group, main_step)


def _set_step(group: dict[str, Any], step: int) -> None:
    """Step 0 of a group that holds nothing is left out, as FusedAdam leaves it."""
    group.pop("step", None)
    if group["params"]:
        group["step"] = step


def _merge(inner: torch.optim.Optimizer) -> None:
    for group in inner.param_groups:
        if SPLIT_FROM in group:
            inner.param_groups[group[SPLIT_FROM]]["params"] += group["params"]
    inner.param_groups[:] = [group for group in inner.param_groups if SPLIT_FROM not in group]
