"""The real model of any rank of any layout, on meta tensors, in one process without a network.

    from megatron_xorl.training.meta_model import build_on_meta, model_tensors
    model = build_on_meta(glm, ParallelLayout(tp=2, ep=8, world=16), rank=3)
    model_tensors(model)["decoder.layers.0.self_attention.linear_proj.weight"]["codes"].shape

The one idea: :func:`~megatron_xorl.training.model.build_model` itself builds it, under torch's fake process group (every
collective is a no-op, so that a world of any size fits in one process) and with meta as the default device, which
``specs.transformer_config`` takes over. What is counted is what a training run would allocate. Nothing but shapes exists: the
model cannot be run or loaded.

A weight that the config leaves unconverted is made dense afterwards, as the loader makes it on finding no scales in the file.

Refused: a process that already has process groups, since the model would be built for those; a world that takes minutes.

CPU command: ``megatron-xorl inspect glm-5.2 --build --tp 2 --ep 8``
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_xorl.config.layout import (
    MOST_BUILT,
    ParallelLayout,
    check_layout,
    rank_coordinates,
)
from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import LayoutError
from megatron_xorl.fp8.weight import FrozenWeight
from megatron_xorl.layers.base import megatron_modules
from megatron_xorl.layers.host import AdapterHost
from megatron_xorl.parallel.cpu import use_cpu
from megatron_xorl.training.model import build_model
from megatron_xorl.weights.names import hf_tensors

__all__ = ["build_on_meta", "fake_world", "model_tensors"]


@contextlib.contextmanager
def fake_world(layout: ParallelLayout, rank: int) -> Iterator[None]:
    """Make this process ``rank`` of ``layout`` for Megatron, meanwhile; collectives do nothing.

    Raises:
        LayoutError: there is no such rank, the world is too large, or process groups exist in this process.
    """
    rank_coordinates(layout, rank)
    if layout.world > MOST_BUILT:
        raise LayoutError(
            f"a world of {layout.world} takes too long to build, expected at most {MOST_BUILT} processes; "
            "every data-parallel replica holds the same, so build a smaller world"
        )
    if dist.is_initialized():
        raise LayoutError(
            "this process has process groups already, and a model on meta needs groups of its own; "
            "call megatron_xorl.shutdown() first, or use another process"
        )
    if not torch.cuda.is_available():
        use_cpu()
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_on_meta(
    glm: GlmConfig, layout: ParallelLayout, rank: int = 0, *, dtype: torch.dtype = torch.bfloat16
) -> GPTModel:
    """Build the stage of ``rank`` on meta tensors and leave no process group behind.

    Args:
        glm: the model, of any size.
        layout: sizes of the groups and the world.
        rank: global rank, in Megatron's order.
        dtype: ``torch.float32`` or ``torch.bfloat16``, of what is not FP8.

    Raises:
        LayoutError: the model cannot be cut so, there is no such rank, the world is too large, or process groups exist in this
            process.
    """
    check_layout(glm, layout)
    with fake_world(layout, rank), _quiet(), torch.device("meta"):
        model = build_model(glm, dtype=dtype)
    _leave_unconverted(model, glm)
    return model


def _leave_unconverted(model: nn.Module, glm: GlmConfig) -> None:
    """Make dense what the name table says an FP8 checkpoint of ``glm`` holds without scales."""
    modules = megatron_modules(model)
    for row in hf_tensors(glm) if glm.modules_to_not_convert else ():
        host = None if row.megatron is None else modules.get(row.megatron.removesuffix(".weight"))
        if not row.quantized and isinstance(host, AdapterHost) and host.base.quantized:
            host.base.set_dense(torch.empty(host.base.shape, dtype=host.base.dtype, device="meta"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Megatron's notice about GPTModel, which is no news to somebody who counts bytes."""
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def model_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return every tensor of a built model under its *local* Megatron name.

    Returns:
        ``{parameter: {form: tensor}}``; the forms of a frozen weight are ``codes`` and ``scales``, or ``dense``; that of any
        other parameter or buffer is ``dense``.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, AdapterHost):
            found[f"{name}.weight"] = dict(module.base.named_buffers())
        elif not isinstance(module, FrozenWeight):
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found |= {f"{name}.{leaf}" if name else leaf: {"dense": tensor} for leaf, tensor in own}
    return found
