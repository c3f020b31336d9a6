"""Write a sharded safetensors checkpoint as Hugging Face lays it out.

``model-00001-of-00004.safetensors`` ... and ``model.safetensors.index.json`` with ``weight_map``
and the true ``total_size``. The same tensors in the same order give the same bytes. The index is
written last, through a rename: a checkpoint without an index is an interrupted one. Refused: a name
given twice, an output that already holds weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_xorl.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INDEX_NAME", "SINGLE_NAME", "plan_shards", "write_checkpoint"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def plan_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Group names, in order, into shards of at most ``max_bytes``; a larger tensor gets a shard of its own.

    Raises:
        WeightsError: ``max_bytes`` is not positive.
    """
    if max_bytes < 1:
        raise WeightsError(
            f"shard size {max_bytes} bytes is not positive; give the largest shard you want in bytes"
        )
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_checkpoint(
    out: Path, tensors: Mapping[str, Tensor], *, max_bytes: int, stem: str = "model"
) -> list[Path]:
    """Write ``tensors`` into ``out`` as shards ``<stem>-…`` of at most ``max_bytes`` plus their index; return the shard paths.

    Raises:
        WeightsError: ``out`` already holds safetensors files, or there is nothing to write.
    """
    if not tensors:
        raise WeightsError("no tensors to write; a checkpoint needs at least one")
    from safetensors.torch import save_file  # takes torch, which planning shards needs not

    out.mkdir(parents=True, exist_ok=True)
    if found := sorted(out.glob("*.safetensors*")):
        raise WeightsError(f"{out} already holds {found[0].name}; choose an empty directory")
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    shards = plan_shards(sizes, max_bytes)
    weight_map: dict[str, str] = {}
    paths = []
    for number, names in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {name: tensors[name].contiguous() for name in names},
            out / file,
            metadata={"format": "pt"},
        )
        (out / file).chmod(
            _readable_mode()
        )  # safetensors writes 0600, which others cannot serve from
        weight_map.update(dict.fromkeys(names, file))
        paths.append(out / file)
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    index_name = f"{stem}.safetensors.index.json"
    temporary = out / (index_name + ".tmp")
    temporary.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, out / index_name)
    return paths


def _readable_mode() -> int:
    """Mode of a new file under the process's umask."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
