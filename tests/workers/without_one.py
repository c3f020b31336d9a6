"""Run the stock Megatron jobs with one substitution left out; each function fails where the table says it does."""

from __future__ import annotations

import multiprocessing.context
import sys
from typing import Any

from tests.workers.megatron_core_job import train_save_load


def core_job(skip: frozenset[str]) -> dict[str, Any]:
    """Train, save and load with megatron.core alone."""
    return train_save_load(skip)


def core_job_with_groups_at_two_steps(skip: frozenset[str]) -> list[int]:
    """Split the groups of a stepped optimizer, pass its state dict to another; return the steps there after one more update."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from tests.workers.megatron_core_job import build, step

    use_cpu(skip=skip)
    initialize()
    from megatron_xorl.training.step_groups import set_steps

    jobs = [build(bf16=False) for _ in range(2)]
    for model, optimizer in jobs:
        step(model, optimizer, 0)
        (part,) = getattr(optimizer, "chained_optimizers", [optimizer])
        mains = [main for group in part.optimizer.param_groups for main in group["params"]]
        at = {main: 100 * (place % 2) for place, main in enumerate(mains)}
        set_steps(part, at, {0, 100})
    (_, saved), (model, optimizer) = jobs
    for group in optimizer.param_groups:
        group["step"] = 7
    optimizer.load_state_dict(saved.state_dict())
    step(model, optimizer, 1)
    return sorted({group["step"] for group in optimizer.param_groups if group["params"]})


def core_job_that_may_not_spawn(skip: frozenset[str]) -> dict[str, Any]:
    """Train, save and load where starting a spawned server process is an error at once (it would take seconds)."""

    def refuse(self: Any) -> None:
        raise ChildProcessError("a server process was about to be spawned")

    multiprocessing.context.BaseContext.Manager = refuse
    return train_save_load(skip)


def core_job_with_kernels_that_refuse(skip: frozenset[str]) -> dict[str, Any]:
    """Train, save and load with norm and copy kernels bound as Transformer Engine's are: they take no CPU tensor."""
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.optimizer as optimizer

    def kernel(*_: Any) -> None:
        raise NotImplementedError("this kernel takes CUDA tensors")

    clip_grads.multi_tensor_applier = optimizer.multi_tensor_applier = kernel
    return train_save_load(skip, bf16=True)


def fused_swiglu_without_a_compiler(skip: frozenset[str]) -> list[float]:
    """Call a function that Megatron compiles, where torch's compiler cannot be loaded."""
    import torch

    from megatron_xorl.parallel.cpu import use_cpu

    use_cpu(skip=skip)
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    for name in [name for name in sys.modules if name.startswith("torch._inductor.")]:
        del sys.modules[name]
    sys.modules["torch._inductor.compile_fx"] = None
    return swiglu(torch.tensor([[1.0, 2.0]])).flatten().tolist()


def context_parallel_positions(skip: frozenset[str]) -> list[float]:
    """Return rank 1's share of eight positions at CP 2: chunks 1 and 2 of four."""
    import torch

    from megatron_xorl.parallel.cpu import use_cpu

    use_cpu(skip=skip)
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    class SecondOfTwo:
        """Stands in for a process group of two, seen from rank 1."""

        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    positions = torch.arange(8.0).reshape(8, 1)
    return (
        rotary_pos_embedding.get_pos_emb_on_this_cp_rank(positions, 0, SecondOfTwo())
        .flatten()
        .tolist()
    )


def tokens_of_two_expert_tensor_ranks(skip: frozenset[str]) -> list[float]:
    """Gather one row of rank 0 and three of rank 1, as the dispatcher does; backward scatters the gradients back."""
    import torch
    import torch.distributed as dist

    from megatron_xorl.parallel.cpu import use_cpu

    use_cpu(skip=skip)
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    sizes, rank = [1, 3], dist.get_rank()
    mine = torch.full((sizes[rank], 2), 1.0 + rank, requires_grad=True)
    group = dist.group.WORLD
    whole = gather_from_sequence_parallel_region(mine, group=group, output_split_sizes=sizes)
    (whole * torch.arange(1.0, 5.0).unsqueeze(-1)).sum().backward()
    assert mine.grad is not None
    told = [*whole[:, 0].tolist(), *mine.grad[:, 0].tolist()]
    nothing = gather_from_sequence_parallel_region(mine[:0], group=group, output_split_sizes=[0, 0])
    assert nothing.shape == (0, 2)
    return told
