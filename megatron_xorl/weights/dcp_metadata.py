"""``.metadata`` of a Megatron distributed checkpoint: which tensor is in which byte range of which file.

Torch writes this file with pickle and reads it back with ``pickle.load``, which runs whatever code the file names. The one idea:
it is read here first, by an unpickler that knows torch's own metadata classes and nothing else, so that a planted payload is
refused before torch opens the file. Writing uses those classes, so torch and Megatron read the result.

Refused: any other class or function, a file that is no metadata, files named outside the checkpoint.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.container import DTYPE_NAMES, TORCH_DTYPES

__all__ = ["Item", "check_pickle", "metadata_bytes", "read_items"]

_DTYPES = {str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES}
_ALLOWED = {
    "torch": {"Size", "device", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *dcp.__all__,
        "_MEM_FORMAT_ENCODING",
    },
    # What Megatron's own writer leaves in the file beside the metadata proper.
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},  # where it was saved
}


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


def check_pickle(path: Path) -> Any:
    """Unpickle ``path`` with torch's metadata classes alone and return what it holds.

    Raises:
        WeightsError: the file is missing, damaged, or names any other class or function.
    """
    try:
        return _Unpickler(io.BytesIO(path.read_bytes())).load()
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


def read_items(path: Path) -> list[Item]:
    """Return every chunk of every tensor; stored objects that are no tensors are left out.

    Raises:
        WeightsError: see :func:`check_pickle`; also a tensor whose chunks do not fill it, or lie outside the checkpoint.
    """
    metadata = check_pickle(path)
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise WeightsError(
            f"{path} holds {type(metadata).__name__}, expected torch's checkpoint Metadata; copy the checkpoint again"
        )
    items = []
    try:
        for key, tensor in metadata.state_dict_metadata.items():
            if isinstance(tensor, dcp.TensorStorageMetadata):
                items += _items_of(key, tensor, metadata.storage_data)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{path} is damaged ({type(error).__name__}: {error}); copy the checkpoint again"
        ) from error
    return items


def metadata_bytes(items: Iterable[Item]) -> bytes:
    """Return the content of ``.metadata`` for ``items``."""
    tensors: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, Any] = {}
    for item in items:
        if item.key not in tensors:
            properties = dcp.TensorProperties(dtype=TORCH_DTYPES[item.dtype])
            tensors[item.key] = dcp.TensorStorageMetadata(properties, torch.Size(item.shape), [])
        chunks = tensors[item.key].chunks
        chunks.append(dcp.ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.size)))
        storage[dcp.MetadataIndex(item.key, item.offset)] = filesystem._StorageInfo(
            item.file, item.start, item.length
        )
    return pickle.dumps(dcp.Metadata(tensors, None, storage, dcp.StorageMeta(), version="1.0.0"))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise WeightsError(
                f"it names {module}.{name}, which is no part of a checkpoint's metadata and would be run on reading; "
                "do not trust this file"
            )
        return super().find_class(module, name)


def _items_of(key: str, tensor: dcp.TensorStorageMetadata, storage: dict[Any, Any]) -> list[Item]:
    shape = tuple(tensor.size)
    if tensor.properties.dtype not in DTYPE_NAMES:
        raise WeightsError(
            f"{key} is {tensor.properties.dtype}, expected one of {sorted(TORCH_DTYPES)}"
        )
    dtype = DTYPE_NAMES[tensor.properties.dtype]
    items = []
    for chunk in tensor.chunks:
        info = storage[dcp.MetadataIndex(key, chunk.offsets)]
        file, start, length = info.relative_path, int(info.offset), int(info.length)
        if len(PurePosixPath(file).parts) != 1 or file == ".." or start < 0 or length < 0:
            raise WeightsError(f"{key} lies in {file!r}, outside the checkpoint; do not trust it")
        if getattr(info, "transform_descriptors", None):
            raise WeightsError(f"{key} is stored compressed; save the checkpoint without it")
        items.append(
            Item(key, dtype, shape, tuple(chunk.offsets), tuple(chunk.sizes), file, start, length)
        )
    if sum(math.prod(item.size) for item in items) != math.prod(shape):
        raise WeightsError(
            f"the chunks of {key} do not add up to its shape {list(shape)}; the checkpoint is incomplete"
        )
    return items
