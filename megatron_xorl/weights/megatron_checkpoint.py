"""Read a Megatron distributed checkpoint under Hugging Face names: the same interface as ``weights.reader.HfCheckpoint``.

The one idea: a chunk of the checkpoint is one Hugging Face tensor (``weights.keys``), and its values lie in one byte range of one
file, so a reader, a slice and the fingerprint need no more than they need of a safetensors file. ``config.json`` and the
tokenizer lie in the same folder, so the folder can be given wherever a Hugging Face directory is expected.

Refused at opening: a folder whose conversion was interrupted or that has no manifest, files of another size than the manifest
says, a ``.metadata`` that would run code or that lists a tensor twice. :meth:`MegatronCheckpoint.validate` compares everything
with the name table, as for Hugging Face directories.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import WeightsError, nearest
from megatron_xorl.weights.check import check_checkpoint
from megatron_xorl.weights.container import ALIGNMENT, TORCH_DTYPES, container, locate
from megatron_xorl.weights.dcp_metadata import Item, read_items
from megatron_xorl.weights.keys import METADATA_NAME, canonical_key, hf_names_by_chunk, key_table
from megatron_xorl.weights.shards import Entry

if TYPE_CHECKING:
    from megatron_xorl.config.model import GlmConfig

__all__ = ["MegatronCheckpoint"]


class MegatronCheckpoint:
    """A folder with ``.metadata``, ``*.distcp`` files, config.json and a manifest.

    Args:
        directory: of the checkpoint.

    Raises:
        WeightsError: see the module's list of refusals.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        config = load_glm_config(self.directory)
        self._items = _by_hf_name(self.directory, config)
        self._files: dict[str, list[str]] = defaultdict(list)
        for name, item in self._items.items():
            self._files[item.file].append(name)
        self._shapes = {
            name: item.size[len(item.size) - _rank(name, item, config) :]
            for name, item in self._items.items()
        }
        self._headers: dict[str, dict[str, Entry]] = {}
        self._maps: dict[str, Tensor] = {}

    def names(self) -> tuple[str, ...]:
        """Return the Hugging Face names of all tensors, scales included, sorted; a key outside the table under its own name."""
        return tuple(sorted(self._items))

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""
        return name in self._items

    def shards(self) -> tuple[str, ...]:
        """Return the names of the files that hold tensors, sorted."""
        return tuple(sorted(self._files))

    def shard_of(self, name: str) -> str:
        """Return the file that holds ``name``.

        Raises:
            WeightsError: there is no such tensor; the message has the nearest names.
        """
        return self.item(name).file

    def item(self, name: str) -> Item:
        """Return the chunk of a tensor: key, offset, file and byte range of its container.

        Raises:
            WeightsError: there is no such tensor; the message has the nearest names.
        """
        if name not in self._items:
            close = nearest(name, self._items)
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise WeightsError(f"{self.directory} holds no tensor {name}{hint}")
        return self._items[name]

    def header(self, shard: str) -> dict[str, Entry]:
        """Return the entries of one file, read once; offsets are those of the values in the file.

        Raises:
            WeightsError: the file is missing, truncated or damaged.
        """
        if shard not in self._headers:
            self._headers[shard] = self._read_header(shard)
        return self._headers[shard]

    def entry(self, name: str) -> Entry:
        """Return dtype, shape and place of a tensor.

        Raises:
            WeightsError: unknown name or damaged file.
        """
        return self.header(self.shard_of(name))[name]

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype name: ``BF16``, ``F32``, ``F8_E4M3``."""
        return self.entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor, as Hugging Face has it."""
        return self.entry(name).shape

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor, or its ``slices`` (one a leading axis); only those bytes are read.

        Raises:
            WeightsError: unknown name, damaged file, or a slice that reaches outside the tensor.
        """
        entry = self.entry(name)
        whole = self._map(self.shard_of(name))[entry.start : entry.stop]
        tensor = whole.view(TORCH_DTYPES[entry.dtype]).reshape(entry.shape)
        for axis, part in enumerate(slices or ()):
            inside = axis < len(entry.shape) and part.step in (None, 1) and (part.start or 0) >= 0
            stop = None if not inside else entry.shape[axis] if part.stop is None else part.stop
            if stop is None or not (part.start or 0) < stop <= entry.shape[axis]:
                raise WeightsError(
                    f"{name} {list(entry.shape)}: slice {slices} reaches outside it; expected one range an axis, step 1"
                )
        return tensor[slices].clone() if slices else tensor.clone()

    def validate(self, config: GlmConfig) -> None:
        """Check the whole checkpoint against the tensors that ``config`` says it must hold.

        Raises:
            WeightsError: one error that lists every problem by name.
        """
        check_checkpoint(self, config)

    def close(self) -> None:
        """Drop the memory maps; reading opens them again."""
        self._maps.clear()

    def _map(self, shard: str) -> Tensor:
        if shard not in self._maps:
            mapped = np.memmap(self.directory / shard, dtype=np.uint8, mode="c")
            self._maps[shard] = torch.from_numpy(mapped)
        return self._maps[shard]

    def _read_header(self, shard: str) -> dict[str, Entry]:
        path = self.directory / shard
        if not path.is_file():
            raise WeightsError(f"{shard} is missing; .metadata names it, copy the checkpoint again")
        size, end = path.stat().st_size, 0
        entries = {}
        with open(path, "rb") as file:
            for name in sorted(self._files[shard], key=lambda name: self._items[name].start):
                item = self._items[name]
                if item.start + item.length > size:
                    raise WeightsError(
                        f"{shard} is truncated: {name} ends at byte {item.start + item.length}, the file has {size}; "
                        "copy the checkpoint again"
                    )
                if item.start < end:
                    raise WeightsError(
                        f"{shard}: {name} overlaps the tensor before it; .metadata is damaged, copy the checkpoint again"
                    )
                end = item.start + item.length
                entries[name] = self._entry(name, item, file)
        return entries

    def _entry(self, name: str, item: Item, file: io.BufferedReader) -> Entry:
        around = container(item.dtype, item.size)
        start, stop = len(around.prefix), item.length - len(around.suffix)
        # Written by import, nearly always; anything else is looked at the long way.
        ours = item.start % ALIGNMENT == 0 and stop - start == _nbytes(item)
        for at, expected in ((0, around.prefix), (stop, around.suffix)):
            file.seek(item.start + max(at, 0))
            ours = ours and file.read(len(expected)) == expected
        if not ours:
            file.seek(item.start)
            view = io.BytesIO(file.read(item.length))
            start, stop = locate(name, view, item.dtype, item.size)
        shape = self._shapes[name]
        return Entry(item.dtype, shape, item.start + start, item.start + stop)


def _by_hf_name(directory: Path, config: GlmConfig) -> dict[str, Item]:
    names = hf_names_by_chunk(config)
    found: dict[str, Item] = {}
    for item in read_items(directory / METADATA_NAME):
        key = canonical_key(item.key)
        name = names.get((key, item.offset))
        if name is None:  # validate() reports it as no tensor of this config
            name = item.key if not any(item.offset) else f"{item.key}{list(item.offset)}"
        if name in found:
            raise WeightsError(
                f"{directory}: {found[name].key} and {item.key} are both {name}; keep one spelling"
            )
        found[name] = item
    return found


def _nbytes(item: Item) -> int:
    return math.prod(item.size) * TORCH_DTYPES[item.dtype].itemsize


def _rank(name: str, item: Item, config: GlmConfig) -> int:
    """Axes of the tensor as Hugging Face has it: a bank's chunk has the expert axis before them."""
    chunk = key_table(config).get(name)
    return len(item.size) - (chunk is not None and chunk.size != chunk.shape and item.size[0] == 1)
