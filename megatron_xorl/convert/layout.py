"""``hf/shards.json`` of a Megatron checkpoint: which tensor stood in which Hugging Face shard, and what else was copied.

The one idea: the document is checked whole, once, where it is read. What comes out names every tensor of the checkpoint exactly
once, writes only plain file names that no other output has, and has headers that safetensors reads as these tensors.

Refused, by file and field: anything else, whatever the JSON holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_xorl.convert.files import PARTIAL
from megatron_xorl.convert.plan import Shard, header_entries
from megatron_xorl.convert.values import OutputTensor
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.completeness import LAYOUT_NAME, PROGRESS_NAME
from megatron_xorl.weights.manifest import MANIFEST, parse_json
from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint
from megatron_xorl.weights.writer import INDEX_NAME

__all__ = ["RAW_INDEX_NAME", "VERSION", "Layout", "read_layout", "string_map"]

VERSION = 1
"""``format_version`` of the document."""

RAW_INDEX_NAME = f"hf/{INDEX_NAME}"
"""The index as the source had it."""

_LONGEST_HEADER = 100_000_000  # safetensors' own limit
_WRITTEN = {MANIFEST, PROGRESS_NAME, INDEX_NAME, "hf"}


class Layout(NamedTuple):
    """Shards in order, names of copied files, and the ``metadata`` of the index, None where there was no index."""

    shards: list[Shard]
    copied: list[str]
    index_metadata: dict[str, Any] | None


def read_layout(checkpoint: MegatronCheckpoint) -> Layout:
    """Return the layout of a checkpoint.

    Raises:
        WeightsError: see the module's list of refusals.
    """
    path = checkpoint.directory / LAYOUT_NAME
    try:
        return _layout(parse_json(path.read_bytes()), checkpoint)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise WeightsError(f"{path}: {what}; import the checkpoint again") from error


def string_map(value: Any) -> dict[str, str] | None:
    """Return the ``__metadata__`` of a safetensors header, which is text to text, or None.

    Raises:
        ValueError: it is anything else.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("is no object of text to text")
    return value


def _layout(document: Any, checkpoint: MegatronCheckpoint) -> Layout:
    version, items, copied, metadata = _fields(
        document, "the document", ("format_version", "shards", "copied", "index_metadata")
    )
    if type(version) is not int or version != VERSION:
        raise ValueError(f"format_version is {version!r}, expected {VERSION}")
    if not isinstance(items, list):
        raise ValueError(f"shards is {type(items).__name__}, expected a list")
    shards = [_shard(number, item) for number, item in enumerate(items)]
    files = [shard.file for shard in shards]
    if len(files) != len(set(files)):
        raise ValueError(f"shards, file: {_twice(files)} appears twice")
    _check_names(shards, checkpoint)
    for shard in shards:
        if shard.header is not None:
            _check_header(shard, checkpoint)
    layout = Layout(shards, _copied(copied, checkpoint.directory), metadata)
    if metadata is not None:
        _check_index(layout, checkpoint.directory / RAW_INDEX_NAME)
    return layout


def _fields(value: Any, where: str, names: tuple[str, ...]) -> list[Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type(value).__name__}, expected an object")
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"{where} has no {missing[0]}")
    return [value[name] for name in names]


def _shard(number: int, item: Any) -> Shard:
    where = f"shards[{number}]"
    file, metadata, names, header = _fields(item, where, ("file", "metadata", "names", "header"))
    if not _plain(file) or not file.endswith(".safetensors"):
        raise ValueError(f"{where}.file is {file!r}: outside the output, or no *.safetensors")
    try:
        metadata = string_map(metadata)
    except ValueError as error:
        raise ValueError(f"{where}.metadata {error}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}.names is no list of text")
    if header is not None and not isinstance(header, str):
        raise ValueError(f"{where}.header is {type(header).__name__}, expected text or null")
    return Shard(file, metadata, tuple(names), header)


def _plain(name: Any) -> bool:
    """Whether a name is that of a visible file in the output itself."""
    return isinstance(name, str) and not name.startswith(".") and Path(name).name == name != ""


def _check_names(shards: list[Shard], checkpoint: MegatronCheckpoint) -> None:
    names = [name for shard in shards for name in shard.names]
    if len(names) != len(set(names)):
        raise ValueError(f"shards, names: {_twice(names)} appears twice")
    differ = set(names) ^ set(checkpoint.names())
    if differ:
        raise ValueError(f"it and .metadata do not name the same tensors (first: {min(differ)})")


def _check_header(shard: Shard, checkpoint: MegatronCheckpoint) -> None:
    """Check that a header that is written as it was says what the file will hold."""
    text = (shard.header or "").encode()
    where = f"shards, header of {shard.file}"
    if not text.startswith(b"{") or len(text) > _LONGEST_HEADER:
        raise ValueError(f"{where} does not begin with an object, or is too long for safetensors")
    found = parse_json(text)
    entries = [checkpoint.entry(name) for name in shard.names]
    tensors = [
        OutputTensor(name, entry.dtype, entry.shape, "copy", name)
        for name, entry in zip(shard.names, entries, strict=True)
    ]
    if found != header_entries(tensors, shard.metadata):
        raise ValueError(f"{where} does not describe the tensors of the shard")


def _copied(copied: Any, folder: Path) -> list[str]:
    if not isinstance(copied, list) or not all(map(_plain, copied)):
        raise ValueError("copied is no list of file names, or names one outside the output")
    if len(copied) != len(set(copied)) or "config.json" not in copied:
        raise ValueError("copied names a file twice, or leaves out config.json")
    for name in copied:
        ours = name in _WRITTEN or name.endswith((PARTIAL, ".safetensors", ".distcp"))
        if ours or not (folder / name).is_file():
            raise ValueError(f"copied names {name}, which is missing or no file that is copied")
    return copied


def _check_index(layout: Layout, path: Path) -> None:
    if not isinstance(layout.index_metadata, dict):
        raise ValueError("index_metadata is neither an object nor null")
    try:
        index = parse_json(path.read_bytes())
    except (OSError, ValueError):
        index = None
    wanted = {name: shard.file for shard in layout.shards for name in shard.names}
    if not isinstance(index, dict) or index.get("weight_map") != wanted:
        raise ValueError(f"it and {RAW_INDEX_NAME} do not put the same tensors into the same files")


def _twice(names: Sequence[str]) -> str:
    return Counter(names).most_common(1)[0][0]
