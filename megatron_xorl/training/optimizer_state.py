"""The optimizer's state of each factor, in the factor's own local shape, whatever buckets and shards Megatron uses.

Megatron's DistributedOptimizer keeps fp32 masters and moments as flat pieces of DDP buckets, its other optimizers whole on every
rank. Nothing of that may show in a checkpoint, so this module translates: :func:`gather_state` puts a factor's pieces together on
one rank of its data-parallel group, :func:`scatter_state` hands each rank its piece back. In between, a factor is a tensor of its
logical (local) shape.

The pieces are found through the pairs (model parameter, master) that Megatron steps with, not through its index of them, which
is wrong in 0.19.2 where a group holds two dtypes. State that is not there yet reads as zeros at step 0, which is what a first
update would start from.

Refused: state of which only a part is there; an optimizer without fp32 masters (precision-aware, offloaded).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor, nn

from megatron_xorl.errors import CheckpointError
from megatron_xorl.training.adam_state import materialize_adam_state
from megatron_xorl.training.step_groups import get_step, set_steps

__all__ = ["STATE_KINDS", "gather_state", "group_values", "scatter_state", "steps_by_parameter"]

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
"""fp32 tensors that Adam keeps for each factor."""


@dataclass(frozen=True)
class _Home:
    """Where a parameter's state is: the optimizer, and this rank's piece of it, if it has one."""

    part: MegatronOptimizer
    group: dist.ProcessGroup
    """Ranks that hold the pieces, or copies, of the parameter's state."""
    main: Tensor | None
    start: int = 0
    end: int = 0
    pieces: bool = True
    """Whether the group's ranks hold pieces; otherwise each holds all of it."""


def gather_state(
    optimizer: MegatronOptimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor | None]]:
    """Put every factor's masters and moments together, one factor at a time.

    Args:
        optimizer: Megatron's optimizer.
        parameters: ``{logical name: model parameter}`` of the trainable factors, in the same order on every rank that shares
            a data-parallel group.

    Yields:
        ``(name, state)``: fp32 ``[3, *local shape]`` in the order of :data:`STATE_KINDS` on one rank of the group, in turn, and
        None on the others.

    Raises:
        CheckpointError: a factor has only part of its state, or no optimizer holds it.
    """
    homes = _homes(optimizer, parameters)
    for index, (name, parameter) in enumerate(parameters.items()):
        home = homes[name]
        owner = index % home.group.size()
        mine = home.group.rank() == owner
        whole = torch.zeros(
            len(STATE_KINDS), parameter.numel(), dtype=torch.float32, device=parameter.device
        )
        if home.main is not None:
            tensors = {"master": home.main.detach(), **home.part.optimizer.state[home.main]}
            for row, kind in enumerate(STATE_KINDS):
                whole[row, home.start : home.end] = tensors[kind].view(-1)
        if home.pieces and home.group.size() > 1:
            # The pieces do not overlap, so a sum is an exact concatenation.
            dist.reduce(whole, dst=dist.get_global_rank(home.group, owner), group=home.group)
        yield name, whole.view(len(STATE_KINDS), *parameter.shape) if mine else None


def scatter_state(
    optimizer: MegatronOptimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Mapping[str, Tensor]],
    steps: Mapping[str, int],
) -> None:
    """Put loaded state back: each rank keeps its piece of masters and moments; factors at another step get another group.

    Args:
        optimizer: Megatron's optimizer.
        parameters: ``{logical name: model parameter}``.
        state: ``{name: {kind: fp32 tensor of the local shape}}``.
        steps: Adam's step of each factor of the model, those of other pipeline stages included or not.

    Raises:
        CheckpointError: no optimizer holds a factor.
    """
    homes = _homes(optimizer, parameters)
    steps_of: dict[int, dict[Tensor, int]] = {}
    for name, home in homes.items():
        held = steps_of.setdefault(id(home.part), {})
        if home.main is None:
            continue
        held[home.main] = steps[name]
        with torch.no_grad():
            for kind in STATE_KINDS:
                tensor = (
                    home.main if kind == "master" else home.part.optimizer.state[home.main][kind]
                )
                tensor.view(-1).copy_(state[name][kind].view(-1)[home.start : home.end])
    for part in {id(home.part): home.part for home in homes.values()}.values():
        set_steps(part, steps_of[id(part)], set(steps.values()))
        _renumber(part)


def steps_by_parameter(
    optimizer: MegatronOptimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, int]:
    """Adam's step of every factor of which this rank has state; 0 before the first update."""
    return {
        name: get_step(home.part.optimizer, _group_of(home), home.main)
        for name, home in _homes(optimizer, parameters).items()
        if home.main is not None
    }


def group_values(
    optimizer: MegatronOptimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Any]]:
    """``lr``, ``betas``, ``eps`` and ``weight_decay`` of every factor of which this rank has state."""
    return {
        name: {key: _group_of(home)[key] for key in ("lr", "betas", "eps", "weight_decay")}
        for name, home in _homes(optimizer, parameters).items()
        if home.main is not None
    }


def _group_of(home: _Home) -> dict[str, Any]:
    for group in home.part.optimizer.param_groups:
        if any(main is home.main for main in group["params"]):
            return group
    raise CheckpointError("a master is in no parameter group; build the optimizer through Megatron")


def _homes(
    optimizer: MegatronOptimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, _Home]:
    """The home of every parameter, its zero state made where it has none yet."""
    found: dict[nn.Parameter, _Home] = {}
    for part in _parts(optimizer):
        found |= _distributed(part) if isinstance(part, DistributedOptimizer) else _plain(part)
    for name, parameter in parameters.items():
        if parameter not in found:
            raise CheckpointError(
                f"{name} trains but no optimizer holds it; build the optimizer after attaching adapters"
            )
    names = {home.main: name for name, param in parameters.items()
             if (home := found.get(param)) is not None and home.main is not None}  # fmt: skip
    materialize_adam_state(optimizer, names)
    return {name: found[parameter] for name, parameter in parameters.items()}


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The optimizers inside Megatron's, stubs of empty parameter sets left out."""
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from _parts(part)
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def _distributed(part: DistributedOptimizer) -> dict[nn.Parameter, _Home]:
    group = part.data_parallel_group
    homes = {
        parameter: _Home(part, group, None)
        for buffer in part.buffers
        for parameter in buffer.params
    }
    for parameter, main in _mains(part).items():
        where = part._get_model_param_range_map(parameter)["param"]
        homes[parameter] = _Home(part, group, main, where.start, where.end)
    return homes


def _mains(part: DistributedOptimizer) -> dict[nn.Parameter, Tensor]:
    """Model parameter to this rank's piece of its fp32 master."""
    pairs = (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    )
    mains = {
        parameter: main
        for models, masters in pairs
        for of_group, masters_of_group in zip(models, masters, strict=True)
        for parameter, main in zip(of_group, masters_of_group, strict=True)
    }
    if any(main is None for main in mains.values()):
        raise CheckpointError(
            "the optimizer keeps no fp32 masters of its own (precision-aware); adapter checkpoints hold them: "
            "leave out --use-precision-aware-optimizer"
        )
    return mains


def _plain(part: MegatronOptimizer) -> dict[nn.Parameter, _Home]:
    """Homes of an optimizer that every data-parallel rank has whole."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        half = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
        pairs = [pair for models, mains in half for pair in zip(models, mains, strict=True)]
        pairs += [(main, main) for group in part.fp32_from_fp32_groups for main in group]
    elif isinstance(part, FP32Optimizer):
        pairs = [(main, main) for group in part.optimizer.param_groups for main in group["params"]]
    else:
        raise CheckpointError(
            f"the optimizer is {type(part).__name__}; adapter checkpoints know Megatron's DistributedOptimizer and its plain "
            "bf16 and fp32 ones: pass --use-distributed-optimizer"
        )
    return {
        parameter: _Home(part, _copies(parameter), main, 0, main.numel(), pieces=False)
        for parameter, main in pairs
    }


def _copies(parameter: nn.Parameter) -> dist.ProcessGroup:
    """Ranks that hold the same parameter by data parallelism."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _renumber(part: MegatronOptimizer) -> None:
    """DistributedOptimizer finds a master by (group, place in it); groups may have been split."""
    if not isinstance(part, DistributedOptimizer):
        return
    places = {
        main: (index, place)
        for index, group in enumerate(part.optimizer.param_groups)
        for place, main in enumerate(group["params"])
    }
    part.model_param_group_index_map = {
        parameter: places[main] for parameter, main in _mains(part).items()
    }
