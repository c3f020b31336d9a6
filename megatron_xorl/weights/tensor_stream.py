"""Write safetensors files one tensor at a time, sharded above a size.

The one idea: names, dtypes and shapes are known before the first value, so the header goes first and the values follow in order;
memory is one tensor, whatever the file. The same tensors in the same order give the same bytes.

Files are written in place and fsynced; making the whole folder appear at once is the caller's business (a rename).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.writer import plan_shards

__all__ = ["TORCH_DTYPES", "Slot", "write_stream"]

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Dtypes of factors by the names that safetensors gives them."""

_ALIGNMENT = 8  # of the values, which safetensors' own writer keeps too


class Slot(NamedTuple):
    """A tensor to come: its name, safetensors dtype, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def write_stream(
    folder: Path,
    slots: Sequence[Slot],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    stem: str,
    max_bytes: int,
) -> list[Path]:
    """Write ``<stem>.safetensors``, or shards of at most ``max_bytes`` and an index, into ``folder``.

    Args:
        folder: exists.
        slots: every tensor, in order.
        tensors: ``(name, contiguous tensor)`` in the order of ``slots``; taken one by one.
        stem: first part of the file names.
        max_bytes: above this the weights are sharded; a larger tensor gets a shard of its own.

    Returns:
        The files with tensors.

    Raises:
        WeightsError: the stream is not what ``slots`` announced.
    """
    sizes = {slot.name: slot.nbytes for slot in slots}
    by_name = {slot.name: slot for slot in slots}
    total = sum(sizes.values())
    groups = [list(sizes)] if total <= max_bytes else plan_shards(sizes, max_bytes)
    stream = iter(tensors)
    weight_map: dict[str, str] = {}
    paths = []
    for number, names in enumerate(groups, start=1):
        shard = "" if len(groups) == 1 else f"-{number:05d}-of-{len(groups):05d}"
        path = folder / f"{stem}{shard}.safetensors"
        with path.open("wb") as file:
            file.write(_header([by_name[name] for name in names]))
            for name in names:
                _write(file, by_name[name], next(stream, None))
            file.flush()
            os.fsync(file.fileno())
        weight_map.update(dict.fromkeys(names, path.name))
        paths.append(path)
    if (surplus := next(stream, None)) is not None:
        raise WeightsError(f"{surplus[0]} follows the last announced tensor; announce it")
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
    return paths


def _header(slots: Sequence[Slot]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for slot in slots:
        header[slot.name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [place, place + slot.nbytes],
        }
        place += slot.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(file: IO[bytes], slot: Slot, found: tuple[str, Tensor] | None) -> None:
    if found is None:
        raise WeightsError(f"{slot.name} is missing; the stream ended before it")
    name, tensor = found
    wanted = (slot.name, TORCH_DTYPES[slot.dtype], slot.shape)
    if (name, tensor.dtype, tuple(tensor.shape)) != wanted:
        raise WeightsError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {slot.name} {wanted[1]} {list(slot.shape)}"
        )
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    file.write(memoryview(values.numpy()))
