"""The parallel layout that is active, read from Megatron's process groups, whoever started them."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_xorl.config.layout import ParallelLayout

__all__ = ["current_layout"]


def current_layout() -> ParallelLayout:
    """Sizes of the groups that Megatron has initialised."""
    return ParallelLayout(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        world=dist.get_world_size(),
    )
