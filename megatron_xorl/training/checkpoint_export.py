"""The adapter of a training checkpoint, written as files that a server reads.

One process and no base: the tensors have their full logical shapes in the checkpoint, so they are read back as they are, factor
by factor, whatever layout saved them. Needs torch, not Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.adapters.formats import file_size
from megatron_xorl.adapters.inventory import Factor, build_inventory
from megatron_xorl.adapters.recovery import model_order
from megatron_xorl.adapters.servers import server_notes
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import MegatronXorlError
from megatron_xorl.training.checkpoint_forms import FORMS, read_whole
from megatron_xorl.training.resume import (
    check_version,
    checkpoint_directory,
    latest_iteration,
)
from megatron_xorl.weights.adapter_writer import check_output, write_adapter
from megatron_xorl.weights.manifest import MANIFEST, read_manifest, verify_files

__all__ = ["export_checkpoint"]


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    format: str | None = None,
    *,
    allow_expanded: bool = False,
) -> dict[str, Any]:
    """Write the adapter of a training checkpoint to a directory, in one process and without the base.

    Args:
        checkpoint: a checkpoint directory ``…/iter_0000040``, or its root (the latest is taken).
        out: directory to make.
        format: of the files; the ``export_format`` of the adapter configuration that trained it by default.
        allow_expanded: write an expanded form that is far larger than the shared one.

    Returns:
        ``{"iteration", "format", "factors", "bytes", "shared_bytes", "full_bytes", "servers"}`` of what was written: bytes of the
        file, of the shared form, and of this format with every projection of the base adapted (None where the base is not at
        hand, or the format cannot hold that); what servers make of it.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        AdapterError: the output exists, or the format cannot hold the factors.
    """
    directory = _directory(Path(checkpoint))
    manifest = read_manifest(directory)
    check_version(directory, manifest)
    factors = _factors(manifest)
    saved = dict(manifest["adapter"])
    saved.pop("seed")
    adapter = AdapterConfig.from_dict(saved, f"{checkpoint} adapter")
    format = format or adapter.export_format
    size = check_output(Path(out), factors, format, allow_expanded=allow_expanded)
    verify_files(directory, manifest["files"])
    write_adapter(
        Path(out),
        factors,
        _read(directory, manifest, factors),
        adapter,
        base_model=manifest["base_directory"],
        base_fingerprint=manifest["base"]["fingerprint"],
        forward=manifest["forward"],
        format=format,
        allow_expanded=allow_expanded,
    )
    return {
        "iteration": manifest["iteration"],
        "format": format,
        "factors": len(factors),
        "bytes": size,
        "shared_bytes": file_size(factors, "sglang_shared_outer"),
        "full_bytes": _full_bytes(manifest, adapter, format, factors[0].dtype),
        "servers": server_notes(factors, format, rslora=adapter.rslora),
    }


def _full_bytes(
    manifest: dict[str, Any], adapter: AdapterConfig, format: str, dtype: str
) -> int | None:
    """What scope and targets saved; only the base's config.json knows the projections that were left out."""
    everything = {"glm52_lora_scope": "all", "lora_target_modules": None}
    try:
        config = load_glm_config(manifest["base_directory"])
        full = build_inventory(config, adapter.model_copy(update=everything), dtype)
        return file_size(full.factors, format)
    except MegatronXorlError:
        return None


def _directory(path: Path) -> Path:
    """The checkpoint itself, where ``path`` may be the root of several.

    Raises:
        CheckpointError: nothing was saved there.
    """
    if not (path / MANIFEST).exists() and (iteration := latest_iteration(path)) is not None:
        return checkpoint_directory(path, iteration)
    return path


def _factors(manifest: dict[str, Any]) -> tuple[Factor, ...]:
    """The factors that trained and those that contribute frozen, in model order, as the manifest describes them."""
    factors = []
    described = manifest["factors"] | manifest.get("frozen", {})
    for name in [*manifest["order"], *manifest.get("frozen", {})]:
        fields = {key: value for key, value in described[name].items() if key != "step"}
        factors.append(Factor(**(fields | {"shape": tuple(fields["shape"])})))
    return tuple(sorted(factors, key=lambda factor: (*model_order(factor.target), factor.side)))


def _read(
    directory: Path, manifest: dict[str, Any], factors: tuple[Factor, ...]
) -> Iterator[tuple[str, Tensor]]:
    """One factor after the other in its full logical shape."""
    form = manifest.get("form", FORMS[0])
    for factor in factors:
        dtype = getattr(torch, factor.dtype)
        yield factor.name, read_whole(form, directory, f"lora/{factor.name}", factor.shape, dtype)
