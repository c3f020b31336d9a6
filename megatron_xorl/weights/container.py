"""The container around one tensor in a Megatron distributed checkpoint: what ``torch.save`` writes, without the values.

Torch's checkpoint reader calls ``torch.load`` on a byte range of a file. The one idea: for a given dtype and shape everything
around the values is the same (``weights.archive``), so a conversion copies values between a prefix and a suffix without ever
building a tensor, or importing torch.

Reading goes the other way: :func:`locate` says where the values of a container lie, so that a slice of them can be mapped. What
is not a plain contiguous tensor in one storage is refused, and nothing is unpickled but by torch's ``weights_only`` reader.
"""

from __future__ import annotations

import functools
import math
import pickle
import zipfile
from typing import IO, TYPE_CHECKING

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.archive import ALIGNMENT, Around, around_values
from megatron_xorl.weights.opcodes import call, document, joined, named, plain
from megatron_xorl.weights.shards import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "TORCH_NAMES", "container", "locate", "torch_dtype"]

TORCH_NAMES = {
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
    "I8": "int8",
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "F32": "float32",
    "I32": "int32",
    "F64": "float64",
    "I64": "int64",
}
"""Torch's name of a dtype by the name that safetensors gives it."""

_LOCAL_HEADER = 30  # fixed part of a zip local file header; name and extra field follow


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for the name that safetensors gives it."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_NAMES[name])
    return dtype


@functools.lru_cache(maxsize=4096)
def container(dtype: str, shape: tuple[int, ...]) -> Around:
    """Return the container of a contiguous tensor.

    Args:
        dtype: safetensors name of the dtype.
        shape: of the tensor; no axis of length 0.
    """
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    storage = joined(
        (
            plain("storage"),
            named("torch.storage", "UntypedStorage"),
            *map(plain, ("0", "cpu", size)),
        )
    )
    tensor = call(
        named("torch._utils", "_rebuild_tensor_v3"),
        storage + pickle.BINPERSID,
        plain(0),
        plain(shape),
        plain(strides),
        plain(False),
        call(named("collections", "OrderedDict")),
        named("torch", TORCH_NAMES[dtype]),
    )
    return around_values(document(tensor), size)


def locate(name: str, view: IO[bytes], dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return where in a container the values of a tensor begin and end.

    Args:
        name: of the tensor, for the message.
        view: the container alone, seekable.
        dtype: safetensors name that the tensor must have.
        shape: that it must have.

    Raises:
        WeightsError: the container is damaged, or holds anything but that tensor, contiguous, in a storage of its own.
    """
    import torch

    size = math.prod(shape) * DTYPE_BYTES[dtype]
    try:
        start, stop = _values(view)
        view.seek(0)
        found = torch.load(view, map_location="meta", weights_only=True)
        assert isinstance(found, torch.Tensor)
    except Exception as error:  # whatever a damaged pickle or zip makes of itself
        raise WeightsError(
            f"{name}: its container is damaged or no saved tensor ({type(error).__name__}); convert or copy the checkpoint again"
        ) from error
    contiguous = found.is_contiguous() and found.storage_offset() == 0 and stop - start == size
    if found.dtype != torch_dtype(dtype) or tuple(found.shape) != shape or not contiguous:
        raise WeightsError(
            f"{name}: its container holds {found.dtype} {list(found.shape)}, .metadata says {dtype} {list(shape)}; "
            "convert or copy the checkpoint again"
        )
    return start, stop


def _values(file: IO[bytes]) -> tuple[int, int]:
    """Range of the one storage in a container."""
    with zipfile.ZipFile(file) as archive:
        (entry,) = [item for item in archive.infolist() if "/data/" in item.filename]
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER)
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed values")
    names, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    start = entry.header_offset + _LOCAL_HEADER + names + extra
    return start, start + entry.file_size
