"""Mistakes that public trainers make, made here on purpose: each is called on every rank before the model is built.

The one idea: a fault changes one seam of a right run, in its own processes, and ``test_faults.py`` names the check of the matrix
that must see it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

SHARED = "model.layers.1.mlp.experts.gate_proj.lora_A"


def shared_factor_not_reduced() -> None:
    """A bank's shared factor goes with the experts' own, which no reduction takes across EP."""
    from megatron_xorl.layers import attach

    mark = attach.mark_ownership

    def marked(parameter: Any, factor: Any, **sizes: int) -> None:
        mark(parameter, factor, **sizes)
        if factor.name == SHARED:
            parameter.allreduce = False

    attach.mark_ownership = marked


def shared_factor_reduced_twice() -> None:
    """The sum over EP that a hook or a coalesced all-reduce adds, on top of DDP's, which covers the expert ranks already."""
    from megatron.core import parallel_state

    from megatron_xorl.layers.attach import named_factors

    # By its path: the package has a function of the module's name.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalize = module.finalize_model_grads

    def twice(model: list[Any], *args: Any, **named: Any) -> None:
        group = parallel_state.get_expert_model_parallel_group()
        for factor, _, parameter in named_factors([part.module for part in model]).values():
            if factor.shared:
                dist.all_reduce(parameter.main_grad, group=group)
        finalize(model, *args, **named)

    module.finalize_model_grads = twice


def a_drawn_per_shard() -> None:
    """A rank draws its part of lora_A over the part's own fan-in: sqrt(TP) too wide, and other values in every layout."""
    from megatron_xorl.layers import lora

    whole = lora.draw_lora_A

    def of_shard(piece: Any, seed: int) -> Tensor:
        if piece.shape == piece.factor.shape:
            return whole(piece, seed)
        bound, name = piece.shape[-1] ** -0.5, f"{piece.factor.name}.{piece.ranges}"
        return lora._uniform(piece.shape, bound, seed, name)

    lora.draw_lora_A = of_shard


def adapter_added_before_the_reduction() -> None:
    """The whole adapter output joins the base's partial output: summed over the tensor ranks, it counts TP times."""
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

    from megatron_xorl.fp8.linear import frozen_linear
    from megatron_xorl.layers.linear import RowParallelLinear

    def forward(self: Any, x: Tensor) -> tuple[Tensor, None]:
        y = frozen_linear(x, self.base)

        def whole(t: Tensor) -> Tensor:
            return reduce_from_tensor_model_parallel_region(t, group=self.tp_group)

        return self._reduce(self._add_adapters(y, x, whole)), None

    RowParallelLinear.forward = forward


def selection_left_on_the_module() -> None:
    """A full layer leaves its selection behind and its followers take what was left last: another microbatch's, by then."""
    from megatron_xorl.layers.attention import SparseLatentAttention

    right = SparseLatentAttention.forward
    left: list[Tensor] = []

    def forward(self: Any, hidden: Tensor, *, selected: Tensor | None, **named: Any) -> Any:
        own = self.core_attention.indexer is not None
        output, selection = right(self, hidden, selected=selected if own else left[-1], **named)
        if own:
            left.append(selection)
        return output, selection

    SparseLatentAttention.forward = forward


def experts_counted_for_every_tensor_rank() -> None:
    """Per-expert factors are summed over the tensor group, which holds other experts there."""
    from megatron_xorl.layers import attach

    mark = attach.mark_ownership

    def marked(parameter: Any, factor: Any, **sizes: int) -> None:
        mark(parameter, factor, **sizes)
        if factor.ep_axis is not None:
            parameter.sequence_parallel = True

    attach.mark_ownership = marked


def norm_counts_copies() -> None:
    """The gradient norm takes every rank's copy of a replicated factor."""
    from megatron.core.optimizer import optimizer

    optimizer.tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *_, **__: True


__all__ = [
    "SHARED",
    "a_drawn_per_shard",
    "adapter_added_before_the_reduction",
    "experts_counted_for_every_tensor_rank",
    "norm_counts_copies",
    "selection_left_on_the_module",
    "shared_factor_not_reduced",
    "shared_factor_reduced_twice",
]
