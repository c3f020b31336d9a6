"""Megatron-core 0.19.2's optimizers where parameter groups are at different Adam steps, or a sub-optimizer is empty.

Upstream asserts one step for all groups when it writes a state dict and when it aligns chained optimizers, and looks into a stub
optimizer that has no torch optimizer (radixark/miles#2516 meets the same). Where all groups agree, its own code runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_xorl.errors import CheckpointError
from megatron_xorl.parallel.appliers import bind
from megatron_xorl.parallel.literals import resolve

__all__ = ["per_group_steps"]


def per_group_steps(paths: tuple[str, ...]) -> None:
    """Replace ``DistributedOptimizer.state_dict``, its ``load_state_dict`` and ``ChainedOptimizer._synchronize_steps``."""
    state_dict, load_state_dict, synchronize = paths
    bind(_with_steps(resolve(state_dict)))((state_dict,))
    bind(_putting_steps(resolve(load_state_dict)))((load_state_dict,))
    bind(_common_step)((synchronize,))


def _steps(groups: list[dict[str, Any]]) -> set[int]:
    """Steps of the groups that hold something."""
    return {
        int(group["step"])
        for group in groups
        if "step" in group and ("params" not in group or len(group["params"]) > 0)
    }


def _with_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        groups = self.optimizer.param_groups
        if len(_steps(groups)) <= 1:
            return original(self)
        steps = [group.pop("step", None) for group in groups]
        try:
            told = original(self)
        finally:
            _put(groups, steps)
        _put(told["optimizer"]["param_groups"], steps)
        return told

    return state_dict


def _putting_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        told = original(self, state_dict)
        saved = state_dict["optimizer"]["param_groups"] if "optimizer" in state_dict else []
        if len(_steps(saved)) > 1:
            # Upstream matches groups by their settings, in which split groups are alike.
            groups = self.optimizer.param_groups
            if len(groups) != len(saved):
                raise CheckpointError(
                    f"the state dict has {len(saved)} parameter groups at different steps, the optimizer {len(groups)}; "
                    "resume adapters from an adapter checkpoint, which keeps the step of each factor"
                )
            _put(groups, [group.get("step") for group in saved])
        return told

    return load_state_dict


def _put(groups: list[dict[str, Any]], steps: list[Any]) -> None:
    for group, step in zip(groups, steps, strict=True):
        group.pop("step", None)
        if step is not None:
            group["step"] = step


def _common_step(self: Any) -> int | None:
    """The step of all chained optimizers, None where they differ; nothing is changed, since equal steps need no alignment."""
    held = [
        part for part in self.chained_optimizers if not getattr(part, "is_stub_optimizer", False)
    ]
    steps = _steps([group for part in held for group in part.optimizer.param_groups])
    return steps.pop() if len(steps) == 1 else None
