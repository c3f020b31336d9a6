"""A live model's adapters to and from files.

The file does not know layouts: whatever the ranks hold is put together factor by factor on rank 0
and written once; loading gives each rank its slice. Bytes are the same whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.errors import AdapterError
from megatron_xorl.layers.attach import check_trainability, named_factors
from megatron_xorl.layers.lora import FactorSlice
from megatron_xorl.training.model import attach_adapters
from megatron_xorl.weights.adapter_files import AdapterFile, write_adapter

__all__ = ["export_adapter", "iter_adapter", "load_adapter"]


def iter_adapter(model: nn.Module) -> Iterator[tuple[Factor, Tensor | None]]:
    """Every trained factor of the model in inventory order: its full tensor on rank 0, None on the other ranks; collective."""
    held = named_factors(model)
    for factor in model.inventory.trainable:
        full = torch.zeros(factor.shape, dtype=model.config.params_dtype)
        if factor.name in held and _writes(held[factor.name][1]):
            _, piece, parameter = held[factor.name]
            piece.of(full).copy_(parameter.detach())
        if dist.get_world_size() > 1:
            # Exactly one rank contributes each element; adding bytes to zeros moves them unchanged, the sign of -0.0 included.
            dist.reduce(full.view(torch.uint8), dst=0)
        yield factor, full if dist.get_rank() == 0 else None


def _writes(piece: FactorSlice) -> bool:
    """Whether this rank contributes its slice: one of the ranks that hold the same one."""
    bank, per_expert = len(piece.factor.shape) == 3, piece.factor.ep_axis is not None
    if per_expert:
        return parallel_state.get_expert_data_parallel_rank() == 0
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    cut = piece.factor.tp_axis is not None and not bank
    return replica and (cut or parallel_state.get_tensor_model_parallel_rank() == 0)


def export_adapter(model: nn.Module, path: str | Path, format: str = "sglang_shared_outer") -> None:
    """Write the trained factors of a live model to a directory; collective, rank 0 writes.

    Raises:
        AdapterError: the format is not known, the output exists, or the model has no trained adapters.
    """
    if format != "sglang_shared_outer":
        raise AdapterError(f"format {format!r} is not available; use sglang_shared_outer")
    if not hasattr(model, "inventory"):
        raise AdapterError("the model carries no adapters; call attach_adapters first")
    tensors = {factor.name: tensor for factor, tensor in iter_adapter(model) if tensor is not None}
    if dist.get_rank() == 0:
        write_adapter(
            Path(path),
            model.inventory.trainable,
            tensors,
            model.adapter_config,
            base_model=str(model.base_directory),
            base_fingerprint=model.base_fingerprint,
        )
    dist.barrier()


def load_adapter(model: nn.Module, path: str | Path) -> None:
    """Load an adapter directory into a model, attaching the adapters it was trained with if the model has none.

    Raises:
        AdapterError: the file is damaged, of another base, or does not fit the model's adapters.
    """
    file = AdapterFile(path)
    if file.base_fingerprint != model.base_fingerprint:
        raise AdapterError(
            f"{path} was trained on a base with fingerprint {file.base_fingerprint[:12]}, "
            f"this one is {model.base_fingerprint[:12]}; use the base it was trained on"
        )
    if not hasattr(model, "inventory"):
        attach_adapters(model, file.adapter)
    file.check_keys(model.inventory.trainable)
    with torch.no_grad():
        for factor, piece, parameter in named_factors(model).values():
            if factor.trainable:
                parts = tuple(slice(start, stop) for start, stop in piece.ranges)
                parameter.copy_(file.read(factor, parts))
    check_trainability(model)
