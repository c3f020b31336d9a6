"""The optimizer's state of each factor, in the factor's own local shape, whatever buckets and shards Megatron uses.

Megatron's DistributedOptimizer keeps fp32 masters and moments as flat pieces of DDP buckets. Nothing of that may show in a
checkpoint, so this module translates: :func:`gather_state` puts a factor's pieces together on one rank of its data-parallel
group, :func:`scatter_state` hands each rank its piece back. In between, a factor is a tensor of its logical (local) shape.

An optimizer that never stepped has no moments yet; they read as zeros with step 0, which is what a first update would start
from (zero state is inert under Adam).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor, nn

from megatron_xorl.errors import CheckpointError

__all__ = ["STATE_KINDS", "gather_state", "scatter_state", "steps_by_parameter"]

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
"""fp32 tensors that Adam keeps for each factor."""


def distributed_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The DistributedOptimizers inside Megatron's optimizer, stubs of empty parameter sets left out.

    Raises:
        CheckpointError: another kind of optimizer is in use.
    """
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    found = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
    for part in found:
        if not isinstance(part, DistributedOptimizer):
            raise CheckpointError(
                f"the optimizer is {type(part).__name__}; adapter checkpoints need Megatron's DistributedOptimizer: "
                "pass --use-distributed-optimizer"
            )
    return found


def gather_state(
    optimizer: MegatronOptimizer, parameters: dict[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor | None]]:
    """Put every factor's masters and moments together, one factor at a time.

    Args:
        optimizer: Megatron's optimizer.
        parameters: ``{logical name: model parameter}`` of the trainable factors, in the same order on every rank that shares
            a data-parallel group.

    Yields:
        ``(name, state)``: fp32 ``[3, *local shape]`` in the order of :data:`STATE_KINDS` on one rank of the group, in turn, and
        None on the others.
    """
    homes = _homes(optimizer)
    for index, (name, parameter) in enumerate(parameters.items()):
        home = homes.get(parameter)
        if home is None:
            raise CheckpointError(
                f"{name} trains but no optimizer holds it; build the optimizer after attaching adapters"
            )
        group = home.data_parallel_group
        owner = index % group.size()
        whole = torch.zeros(
            len(STATE_KINDS), parameter.numel(), dtype=torch.float32, device=parameter.device
        )
        if (piece := _piece(home, parameter)) is not None:
            start, end, tensors = piece
            for row, kind in enumerate(STATE_KINDS):
                if kind in tensors:
                    whole[row, start:end] = tensors[kind]
        if group.size() > 1:
            # The pieces do not overlap, so a sum is an exact concatenation.
            dist.reduce(whole, dst=dist.get_global_rank(group, owner), group=group)
        mine = group.rank() == owner
        yield name, whole.view(len(STATE_KINDS), *parameter.shape) if mine else None


def scatter_state(
    optimizer: MegatronOptimizer,
    parameters: dict[str, nn.Parameter],
    state: dict[str, dict[str, Tensor]],
    steps: dict[str, int],
) -> None:
    """Put loaded state back: each rank keeps its piece of masters and moments, and the group's step.

    Args:
        optimizer: Megatron's optimizer.
        parameters: ``{logical name: model parameter}``.
        state: ``{name: {kind: fp32 tensor of the local shape}}``.
        steps: Adam's step of each factor.

    Raises:
        CheckpointError: factors of one parameter group were saved at different steps.
    """
    homes = _homes(optimizer)
    for name, parameter in parameters.items():
        home = homes[parameter]
        if parameter not in home.model_param_gbuf_map:
            continue
        start, end = _range(home, parameter)
        pieces = {kind: state[name][kind].view(-1)[start:end] for kind in STATE_KINDS}
        group_index, order = home.model_param_group_index_map[parameter]
        main = home.optimizer.param_groups[group_index]["params"][order]
        with torch.no_grad():
            main.copy_(pieces["master"])
        home.optimizer.state[main] = {kind: pieces[kind].clone() for kind in STATE_KINDS[1:]}
    for home in homes.values():
        _set_steps(home, parameters, steps)


def steps_by_parameter(
    optimizer: MegatronOptimizer, parameters: dict[str, nn.Parameter]
) -> dict[str, int]:
    """Adam's step of every factor; 0 before the first update."""
    homes = _homes(optimizer)
    out = {}
    for name, parameter in parameters.items():
        group_index, _ = homes[parameter].model_param_group_index_map.get(parameter, (None, None))
        groups = homes[parameter].optimizer.param_groups
        # A rank that holds no piece of the factor reports its group's step, the same on every rank.
        group = groups[group_index] if group_index is not None else groups[0]
        out[name] = int(group.get("step", 0))
    return out


def _homes(optimizer: MegatronOptimizer) -> dict[nn.Parameter, DistributedOptimizer]:
    """Which DistributedOptimizer each model parameter belongs to, on every rank of its group."""
    return {
        parameter: part
        for part in distributed_optimizers(optimizer)
        for buffer in part.buffers
        for parameter in buffer.params
    }


def _range(home: DistributedOptimizer, parameter: nn.Parameter) -> tuple[int, int]:
    where = home._get_model_param_range_map(parameter)["param"]
    return where.start, where.end


def _piece(
    home: DistributedOptimizer, parameter: nn.Parameter
) -> tuple[int, int, dict[str, Tensor]] | None:
    if parameter not in home.model_param_gbuf_map:
        return None
    tensors = home._get_main_param_and_optimizer_states(parameter)
    tensors = {"master": tensors.pop("param"), **tensors}
    return (
        *_range(home, parameter),
        {kind: tensors[kind].detach().view(-1) for kind in STATE_KINDS if kind in tensors},
    )


def _set_steps(
    home: DistributedOptimizer, parameters: dict[str, nn.Parameter], steps: dict[str, int]
) -> None:
    by_group: dict[int, set[int]] = {}
    for name, parameter in parameters.items():
        if parameter in home.model_param_group_index_map:
            by_group.setdefault(home.model_param_group_index_map[parameter][0], set()).add(
                steps[name]
            )
    for index, group in enumerate(home.optimizer.param_groups):
        found = by_group.get(index, set(steps.values()))
        if len(found) > 1:
            raise CheckpointError(
                f"factors of one parameter group were saved at steps {sorted(found)}; they must agree to resume in one group"
            )
        if found:
            group["step"] = found.pop()
