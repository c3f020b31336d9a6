"""The adapter of a training checkpoint, written as files that a server reads.

One process and no base: the tensors have their full logical shapes in the checkpoint, so they are read back as they are, whatever
layout saved them. Needs torch, not Megatron.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.training.resume import (
    check_version,
    checkpoint_directory,
    latest_iteration,
)
from megatron_xorl.weights.adapter_files import write_adapter
from megatron_xorl.weights.manifest import MANIFEST, read_manifest, verify_files

__all__ = ["export_checkpoint"]


def export_checkpoint(checkpoint: str | Path, out: str | Path) -> dict[str, Any]:
    """Write the adapter of a training checkpoint to a directory, in one process and without the base.

    Args:
        checkpoint: a checkpoint directory ``…/iter_0000040``, or its root (the latest is taken).
        out: directory to make.

    Returns:
        ``{"iteration", "factors", "bytes"}`` of what was written.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        AdapterError: the output exists.
    """
    manifest, factors, tensors = _read_factors(Path(checkpoint))
    saved = dict(manifest["adapter"])
    saved.pop("seed")
    write_adapter(
        Path(out),
        factors,
        tensors,
        AdapterConfig.from_dict(saved, f"{checkpoint} adapter"),
        base_model=manifest["base_directory"],
        base_fingerprint=manifest["base"]["fingerprint"],
        forward=manifest["forward"],
    )
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return {"iteration": manifest["iteration"], "factors": len(factors), "bytes": size}


def _read_factors(path: Path) -> tuple[dict[str, Any], tuple[Factor, ...], dict[str, Tensor]]:
    """Read the trained factors of a checkpoint in one process, whatever layout saved it.

    Args:
        path: a checkpoint directory, or a root whose latest checkpoint is taken.

    Returns:
        The manifest, the factors in model order, and ``{name: tensor of the full logical shape}``.

    Raises:
        CheckpointError: nothing was saved there, or the checkpoint is damaged.
    """
    directory = path
    if not (path / MANIFEST).exists() and (iteration := latest_iteration(path)) is not None:
        directory = checkpoint_directory(path, iteration)
    manifest = read_manifest(directory)
    check_version(directory, manifest)
    verify_files(directory, manifest["files"])
    factors = []
    for name in manifest["order"]:
        fields = {key: value for key, value in manifest["factors"][name].items() if key != "step"}
        factors.append(Factor(**(fields | {"shape": tuple(fields["shape"])})))
    tensors = {
        factor.name: torch.empty(factor.shape, dtype=getattr(torch, factor.dtype))
        for factor in factors
    }
    keyed = {f"lora/{name}": tensor for name, tensor in tensors.items()}
    dcp.load(keyed, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return manifest, tuple(factors), tensors
