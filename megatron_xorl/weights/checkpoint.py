"""A checkpoint that is read by Hugging Face name, whatever form its files have: what both forms share.

The one idea: a tensor is one byte range of one file. A form says which file holds which name (``_find_weights``) and where in
it the values lie (``_read_header``); looking up, reading, slicing and checking are the same. ``read(name, slices)`` touches only
the bytes of the slice (memory map), in the dtype of the file: nothing is dequantised. Torch is imported by the first ``read``
and by nothing else.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_xorl.errors import WeightsError, nearest
from megatron_xorl.weights.check import check_checkpoint
from megatron_xorl.weights.completeness import read_files, refuse_unlisted
from megatron_xorl.weights.container import torch_dtype
from megatron_xorl.weights.shards import Entry

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_xorl.config.model import GlmConfig

__all__ = ["Checkpoint"]


class Checkpoint(ABC):
    """A folder with config.json and weights.

    Args:
        directory: of the checkpoint.
        weights: compare the SHA-256 of the weight files with the manifest, where there is one; reads all of them.
        small: compare the SHA-256 of the other files; sizes are compared anyway.

    Attributes:
        directory: as given.
        listed: files of the manifest, by name; empty where there is none.

    Raises:
        WeightsError: there is no checkpoint, it is unfinished, or it is not what its manifest says.
    """

    def __init__(self, directory: Path | str, *, weights: bool = False, small: bool = True) -> None:
        self.directory = Path(directory)
        self.listed: dict[str, dict[str, Any]] = read_files(
            self.directory, weights=weights, small=small
        )
        self._home = self._find_weights()
        self._headers: dict[str, dict[str, Entry]] = {}
        self._maps: dict[str, Tensor] = {}
        refuse_unlisted(self.directory, self.shards(), self.listed)

    @abstractmethod
    def _find_weights(self) -> Mapping[str, str]:
        """Return the file of every tensor."""

    @abstractmethod
    def _read_header(self, shard: str) -> dict[str, Entry]:
        """Return the entries of one file."""

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, scales included, sorted."""
        return tuple(sorted(self._home))

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""
        return name in self._home

    def shards(self) -> tuple[str, ...]:
        """Return the names of the files that hold tensors, sorted."""
        return tuple(sorted(set(self._home.values())))

    def shard_of(self, name: str) -> str:
        """Return the file that holds ``name``, as the index says.

        Raises:
            WeightsError: there is no such tensor; the message has the nearest names.
        """
        if name not in self._home:
            close = nearest(name, self._home)
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise WeightsError(f"{self.directory} holds no tensor {name}{hint}")
        return self._home[name]

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
            WeightsError: unknown name, damaged file, or an index entry that the file does not hold.
        """
        shard = self.shard_of(name)
        entries = self.header(shard)
        if name not in entries:
            raise WeightsError(
                f"the index puts {name} into {shard}, which does not hold it; fetch index and shard again"
            )
        return entries[name]

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype name: ``BF16``, ``F32``, ``F8_E4M3``."""
        return self.entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor, as Hugging Face has it."""
        return self.entry(name).shape

    def raw(self, name: str) -> bytes:
        """Return the bytes of a tensor.

        Raises:
            WeightsError: unknown name or damaged file.
        """
        entry = self.entry(name)
        with open(self.directory / self.shard_of(name), "rb", buffering=0) as file:
            return os.pread(file.fileno(), entry.stop - entry.start, entry.start)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor, or its ``slices`` (one a leading axis), in the dtype of the file; only those bytes are read.

        Raises:
            WeightsError: unknown name, damaged file, or a slice that reaches outside the tensor.
        """
        entry = self.entry(name)
        for axis, part in enumerate(slices or ()):
            inside = axis < len(entry.shape) and part.step in (None, 1) and (part.start or 0) >= 0
            stop = None if not inside else entry.shape[axis] if part.stop is None else part.stop
            if stop is None or not (part.start or 0) < stop <= entry.shape[axis]:
                raise WeightsError(
                    f"{name} {list(entry.shape)}: slice {slices} reaches outside it; expected one range an axis, step 1"
                )
        dtype = torch_dtype(entry.dtype)
        values = self._map(self.shard_of(name))[entry.start : entry.stop]
        if entry.start % dtype.itemsize:  # legal in a safetensors file, but no place for a view
            values = values.clone()
        tensor = values.view(dtype).reshape(entry.shape)
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
            import torch

            with open(self.directory / shard, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[shard] = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._maps[shard]
