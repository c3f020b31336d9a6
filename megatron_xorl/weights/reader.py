"""Read a Hugging Face checkpoint lazily: a tensor, or the slice of it that a rank owns, is read
when it is asked for (``weights.checkpoint``).

Opening looks at the index alone; a shard's header is read when one of its tensors is first
mentioned. FP8 weights stay ``float8_e4m3fn``.

Refused at opening: a directory without safetensors weights (pickled ``*.bin`` files are never
loaded: unpickling runs code), an index that is no JSON or that points outside the directory.
:meth:`HfCheckpoint.validate` then compares everything with the name table and lists all that is
wrong at once.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.checkpoint import Checkpoint
from megatron_xorl.weights.manifest import file_fault, parse_json
from megatron_xorl.weights.shards import Entry, read_header
from megatron_xorl.weights.writer import INDEX_NAME, SINGLE_NAME

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HfCheckpoint", "refuse_nonfinite"]


def refuse_nonfinite(name: str, tensor: Tensor) -> None:
    """Check that a tensor of the base holds numbers: one inf or NaN would spread to every output.

    Args:
        name: of the tensor in the file.
        tensor: floating point, any shape; codes of an FP8 weight are checked with their scales.

    Raises:
        WeightsError: says how many values are inf or NaN.
    """
    finite = tensor.isfinite()
    if not finite.all():
        raise WeightsError(
            f"{name} has {int((~finite).sum())} inf or NaN values of {tensor.numel()}, expected finite ones; "
            "the shard is damaged, fetch it again"
        )


class HfCheckpoint(Checkpoint):
    """A directory with config.json and either an index of safetensors shards or one ``model.safetensors``.

    Raises:
        WeightsError: see the module's list of refusals.
    """

    def _read_header(self, shard: str) -> dict[str, Entry]:
        return read_header(self.directory / shard)

    def _find_weights(self) -> dict[str, str]:
        index = self.directory / INDEX_NAME
        if index.exists():
            return _read_index(index)
        if (self.directory / SINGLE_NAME).exists():
            return dict.fromkeys(read_header(self.directory / SINGLE_NAME), SINGLE_NAME)
        if pickled := sorted(self.directory.glob("*.bin")):
            raise WeightsError(
                f"{self.directory} has pickled weights ({_some(pickled)}); loading them would run code: convert to safetensors"
            )
        raise WeightsError(
            f"{self.directory} has neither {INDEX_NAME} nor {SINGLE_NAME}; fetch the checkpoint again"
        )


def _some(paths: list[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_index(path: Path) -> dict[str, str]:
    if fault := file_fault(path):
        raise WeightsError(f"{path} {fault}; fetch it again")
    try:
        weight_map = parse_json(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
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
