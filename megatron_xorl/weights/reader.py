"""Read a Hugging Face checkpoint lazily: a tensor, or the slice of it that a rank owns, is read
when it is asked for.

Opening looks at the index alone; a shard's header is read when one of its tensors is first
mentioned, and ``read(name, slices)`` touches only the bytes of the slice (memory map). FP8 weights
stay ``float8_e4m3fn``: nothing is dequantised here.

Refused at opening: a directory without safetensors weights (pickled ``*.bin`` files are never
loaded: unpickling runs code), an index that is no JSON or that points outside the directory.
:meth:`HfCheckpoint.validate` then compares everything with the name table and lists all that is
wrong at once.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_xorl.errors import WeightsError, nearest
from megatron_xorl.weights.check import check_checkpoint
from megatron_xorl.weights.shards import Entry, read_header
from megatron_xorl.weights.writer import INDEX_NAME, SINGLE_NAME

if TYPE_CHECKING:
    from megatron_xorl.config.model import GlmConfig

__all__ = ["HfCheckpoint", "refuse_nonfinite"]


def refuse_nonfinite(name: str, tensor: Tensor) -> None:
    """Check that a tensor of the base holds numbers: one inf or NaN would spread to every output.

    Args:
        name: of the tensor in the file.
        tensor: floating point, any shape; codes of an FP8 weight are checked with their scales.

    Raises:
        WeightsError: says how many values are inf or NaN.
    """
    finite = torch.isfinite(tensor)
    if not finite.all():
        raise WeightsError(
            f"{name} has {int((~finite).sum())} inf or NaN values of {tensor.numel()}, expected finite ones; "
            "the shard is damaged, fetch it again"
        )


class HfCheckpoint:
    """A directory with config.json and either an index of safetensors shards or one ``model.safetensors``.

    Args:
        directory: of the checkpoint.

    Raises:
        WeightsError: see the module's list of refusals.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise WeightsError(
                f"{self.directory} is not a directory; give the folder with config.json and the safetensors files"
            )
        self._weight_map = self._find_weights()
        self._headers: dict[str, dict[str, Entry]] = {}
        self._open: dict[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, scales included, sorted."""
        return tuple(sorted(self._weight_map))

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""
        return name in self._weight_map

    def shards(self) -> tuple[str, ...]:
        """Return the file names of the shards, sorted."""
        return tuple(sorted(set(self._weight_map.values())))

    def shard_of(self, name: str) -> str:
        """Return the file that the index gives for ``name``.

        Raises:
            WeightsError: there is no such tensor; the message has the nearest names.
        """
        if name not in self._weight_map:
            close = nearest(name, self._weight_map)
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise WeightsError(f"{self.directory} holds no tensor {name}{hint}")
        return self._weight_map[name]

    def header(self, shard: str) -> dict[str, Entry]:
        """Return the entries of one shard, read once.

        Raises:
            WeightsError: the shard is missing, truncated or damaged.
        """
        if shard not in self._headers:
            self._headers[shard] = read_header(self.directory / shard)
        return self._headers[shard]

    def entry(self, name: str) -> Entry:
        """Return dtype, shape and place of a tensor.

        Raises:
            WeightsError: unknown name, damaged shard, or an index entry that the shard does not hold.
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
        """Return the full shape of a tensor."""
        return self.entry(name).shape

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Return a tensor, or its ``slices`` (one a leading axis), in the dtype of the file; only those bytes are read.

        Raises:
            WeightsError: unknown name, damaged shard, or a slice that reaches outside the tensor.
        """
        shape = self.entry(name).shape
        shard = self.shard_of(name)
        if shard not in self._open:
            self._open[shard] = safe_open(str(self.directory / shard), framework="pt", device="cpu")
        if slices is None:
            whole: Tensor = self._open[shard].get_tensor(name)
            return whole
        for axis, part in enumerate(slices):
            start, stop, step = part.start or 0, part.stop, part.step or 1
            if (
                axis >= len(shape)
                or step != 1
                or start < 0
                or (stop is not None and not start < stop <= shape[axis])
            ):
                raise WeightsError(
                    f"{name} {list(shape)}: slice {slices} reaches outside it; expected one range an axis, step 1"
                )
        owned: Tensor = self._open[shard].get_slice(name)[slices]
        return owned

    def validate(self, config: GlmConfig) -> None:
        """Check the whole checkpoint against the tensors that ``config`` says it must hold.

        Raises:
            WeightsError: one error that lists every problem by name.
        """
        check_checkpoint(self, config)

    def close(self) -> None:
        """Drop the memory maps; reading opens them again."""
        self._open.clear()

    def _find_weights(self) -> dict[str, str]:
        index = self.directory / INDEX_NAME
        if index.is_file():
            return _read_index(index)
        if (self.directory / SINGLE_NAME).is_file():
            return dict.fromkeys(read_header(self.directory / SINGLE_NAME), SINGLE_NAME)
        if pickled := sorted(self.directory.glob("*.bin")):
            raise WeightsError(
                f"{self.directory} has pickled weights ({pickled[0].name}); loading them would run code: convert to safetensors"
            )
        raise WeightsError(
            f"{self.directory} has neither {INDEX_NAME} nor {SINGLE_NAME}; fetch the checkpoint again"
        )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(
            f"{path} is not a safetensors index (JSON with weight_map): {error}; fetch it again"
        ) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: weight_map is no table of names and files; fetch it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise WeightsError(
                f"{path}: {name} is mapped to {file!r}, expected a file name; fetch the index again"
            )
        if len(PurePosixPath(file).parts) != 1 or file == ".." or "\\" in file:
            raise WeightsError(
                f"{path}: {name} is mapped to {file!r}, outside the checkpoint; do not trust this index"
            )
        if not file.endswith(".safetensors"):
            raise WeightsError(
                f"{path}: {name} is mapped to {file!r}, expected a .safetensors file: pickled weights run code"
            )
    return weight_map
