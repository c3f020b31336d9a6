"""``.metadata`` of a Megatron distributed checkpoint: which tensor is in which byte range of which file.

Torch writes this file with pickle and reads it back with ``pickle.load``, which runs whatever code the file names. The one idea:
here the names in the file stand for plain records of this module, so reading runs no code but the lines below, needs no torch,
and a planted payload is refused before torch opens the file. What is written names torch's own classes, so torch and Megatron
read it.

Refused: any other class or function, a file that is no metadata, files named outside the checkpoint.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.container import TORCH_NAMES
from megatron_xorl.weights.opcodes import Pool, call, document, joined, named, plain

__all__ = ["Item", "metadata_bytes", "read_items"]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"
_NAMES = {name: short for short, name in TORCH_NAMES.items()}


class Item(NamedTuple):
    """One chunk of a tensor: ``shape`` of the whole key, ``offset`` and ``size`` of the chunk, and its byte range in ``file``."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    length: int


class _Record:
    """Stands for one of torch's classes: takes any arguments and any state, and does nothing with them."""

    state: Any = None

    def __new__(cls, *_: Any) -> _Record:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Metadata(_Record):
    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]


class _Tensor(_Record):
    properties: Any
    size: tuple[int, ...]
    chunks: list[Any]


class _Index(_Record):
    """A key of the table of places; torch compares these two fields and no other."""

    fqn: str
    offset: tuple[int, ...] | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))


_STAND_INS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch", "device"): _Record,
    **{("torch", name): name for name in _NAMES},
    ("torch.serialization", "_get_layout"): _Record,
    (_FILES, "_StorageInfo"): _Record,
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "BytesStorageMetadata"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Record,
    # What Megatron's own writer leaves in the file beside the metadata proper.
    **{
        (_PLANNER, name): _Record
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    },
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): _Record,  # where it was saved
    ("pathlib", "PurePosixPath"): _Record,
}


def read_items(path: Path) -> list[Item]:
    """Return every chunk of every tensor; stored objects that are no tensors are left out.

    Raises:
        WeightsError: the file is missing, damaged, no metadata, or names any other class or function; a tensor's chunks do not
            fill it, or lie outside the checkpoint.
    """
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(metadata, _Metadata) or not isinstance(metadata.storage_data, dict):
            raise WeightsError(
                f"it holds {type(metadata).__name__}, expected torch's checkpoint Metadata; copy the checkpoint again"
            )
        return [
            item
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, _Tensor)
            for item in _items_of(key, tensor, metadata.storage_data)
        ]
    except FileNotFoundError:
        raise WeightsError(
            f"{path} is missing: this is no Megatron distributed checkpoint, or its import was interrupted"
        ) from None
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle fails in any way it likes
        raise WeightsError(
            f"{path} is damaged ({type(error).__name__}: {' '.join(str(error).split())[:80]}); "
            "convert or copy the checkpoint again"
        ) from error


def metadata_bytes(items: Iterable[Item]) -> bytes:
    """Return the content of ``.metadata`` for ``items``: the pickle of a ``torch.distributed.checkpoint.metadata.Metadata``."""
    pool = _pool()
    tensors: dict[str, tuple[Item, list[bytes]]] = {}
    places = []
    for item in items:
        offset, size = (call(pool["Size"], plain(value)) for value in (item.offset, item.size))
        chunk = pool.record("ChunkStorageMetadata", offsets=offset, sizes=size)
        tensors.setdefault(item.key, (item, []))[1].append(chunk)
        places.append(
            pool.record("MetadataIndex", fqn=plain(item.key), index=plain(None), offset=offset)
            + pool.record(
                "_StorageInfo",
                relative_path=plain(item.file),
                offset=plain(item.start),
                length=plain(item.length),
            )
        )
    described = [
        plain(key)
        + pool.record(
            "TensorStorageMetadata",
            properties=_properties(pool, item.dtype),
            size=call(pool["Size"], plain(item.shape)),
            chunks=pickle.EMPTY_LIST + pickle.MARK + b"".join(chunks) + pickle.APPENDS,
        )
        for key, (item, chunks) in tensors.items()
    ]
    whole = pool.record(
        "Metadata",
        state_dict_metadata=_table(described),
        planner_data=plain(None),
        storage_data=_table(places),
        storage_meta=pool.record(
            "StorageMeta",
            **dict.fromkeys(("checkpoint_id", "save_id", "load_id"), plain(None)),
            modules=pickle.EMPTY_LIST,
        ),
        version=plain("1.0.0"),
    )
    return document(pool.begin + whole)


def _pool() -> Pool:
    """Classes and field names of torch's metadata."""
    content = {"Size": named("torch", "Size"), "_StorageInfo": named(_FILES, "_StorageInfo")}
    for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"):
        content[name] = named(_METADATA, name)
    for name in ("MetadataIndex", "StorageMeta"):
        content[name] = named(_METADATA, name)
    content["strided"] = call(named("torch.serialization", "_get_layout"), plain("torch.strided"))
    # Torch's number of torch.contiguous_format.
    content["contiguous"] = call(named(_METADATA, "_MEM_FORMAT_ENCODING"), plain(0))
    fields = "state_dict_metadata planner_data storage_data storage_meta version properties size chunks offsets sizes"
    fields += " fqn index offset relative_path length checkpoint_id save_id load_id modules"
    return Pool(content | {name: plain(name) for name in fields.split()})


def _properties(pool: Pool, dtype: str) -> bytes:
    """A dense tensor without gradient; the class has a state of its own: dtype, layout, gradient, memory format, pinned."""
    new = pool["TensorProperties"] + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    no = plain(False)
    state = (named("torch", TORCH_NAMES[dtype]), pool["strided"], no, pool["contiguous"], no)
    return new + joined(state) + pickle.BUILD


def _table(pairs: list[bytes]) -> bytes:
    return pickle.EMPTY_DICT + pickle.MARK + b"".join(pairs) + pickle.SETITEMS


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise WeightsError(
                f"it names {module}.{name}, which is no part of a checkpoint's metadata and would be run on reading; "
                "do not trust this file"
            )
        return _STAND_INS[module, name]


def _items_of(key: str, tensor: _Tensor, storage: dict[Any, Any]) -> list[Item]:
    shape, dtype = tuple(tensor.size), tensor.properties.state[0]
    if dtype not in _NAMES:
        raise WeightsError(f"{key} is {dtype}, expected one of {sorted(TORCH_NAMES)}")
    items = []
    for chunk in tensor.chunks:
        index = _Index()
        index.fqn, index.offset = key, chunk.offsets
        info = storage[index]
        file, start, length = info.relative_path, int(info.offset), int(info.length)
        if len(PurePosixPath(file).parts) != 1 or file == ".." or start < 0 or length < 0:
            raise WeightsError(f"{key} lies in {file!r}, outside the checkpoint; do not trust it")
        if getattr(info, "transform_descriptors", None):
            raise WeightsError(f"{key} is stored compressed; save the checkpoint without it")
        place = (tuple(chunk.offsets), tuple(chunk.sizes), file, start, length)
        items.append(Item(key, _NAMES[dtype], shape, *place))
    if sum(math.prod(item.size) for item in items) != math.prod(shape):
        raise WeightsError(
            f"the chunks of {key} do not add up to its shape {list(shape)}; the checkpoint is incomplete"
        )
    return items
