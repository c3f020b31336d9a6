"""Read a Megatron distributed checkpoint under Hugging Face names: ``weights.checkpoint``, as a Hugging Face directory is read.

The one idea: a chunk of the checkpoint is one Hugging Face tensor (``weights.keys``), and its values lie in one byte range of one
file, so a reader, a slice and the fingerprint need no more than they need of a safetensors file. ``config.json`` and the
tokenizer lie in the same folder, so the folder can be given wherever a Hugging Face directory is expected.

Refused at opening: what ``weights.completeness`` refuses, a ``.metadata`` that would run code or that lists a tensor twice, a
``common.pt`` with anything but numbers and text. :meth:`MegatronCheckpoint.validate` compares everything with the name table, as
for Hugging Face directories.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from typing import TYPE_CHECKING

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.archive import read_plain
from megatron_xorl.weights.checkpoint import Checkpoint
from megatron_xorl.weights.completeness import COMMON_NAME
from megatron_xorl.weights.container import ALIGNMENT, container, locate
from megatron_xorl.weights.dcp_metadata import Item, read_items
from megatron_xorl.weights.keys import METADATA_NAME, canonical_key, hf_names_by_chunk, key_table
from megatron_xorl.weights.manifest import file_fault
from megatron_xorl.weights.shards import DTYPE_BYTES, Entry

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_xorl.config.model import GlmConfig

__all__ = ["MegatronCheckpoint"]


class MegatronCheckpoint(Checkpoint):
    """A folder with ``.metadata``, ``*.distcp`` files, config.json and a manifest.

    Raises:
        WeightsError: see the module's list of refusals.
    """

    def _find_weights(self) -> dict[str, str]:
        read_plain(self.directory / COMMON_NAME)
        config = load_glm_config(self.directory)
        self._items = _by_hf_name(self.directory, config)
        self._files: dict[str, list[str]] = defaultdict(list)
        for name, item in self._items.items():
            self._files[item.file].append(name)
        self._shapes = {
            name: item.size[len(item.size) - _rank(name, item, config) :]
            for name, item in self._items.items()
        }
        self._spellings = {canonical_key(item.key): item.key for item in self._items.values()}
        return {name: item.file for name, item in self._items.items()}

    def spelling(self, key: str) -> str:
        """Return a key of the key table as this checkpoint spells it: it may have fused norms under other names."""
        return self._spellings.get(key, key)

    def _read_header(self, shard: str) -> dict[str, Entry]:
        path = self.directory / shard
        if fault := file_fault(path):
            raise WeightsError(f"{shard} {fault}; .metadata names it, copy the checkpoint again")
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
    return math.prod(item.size) * DTYPE_BYTES[item.dtype]


def _rank(name: str, item: Item, config: GlmConfig) -> int:
    """Axes of the tensor as Hugging Face has it: a bank's chunk has the expert axis before them."""
    chunk = key_table(config).get(name)
    return len(item.size) - (chunk is not None and chunk.size != chunk.shape and item.size[0] == 1)
