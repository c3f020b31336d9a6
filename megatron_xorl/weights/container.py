"""The container around one tensor in a Megatron distributed checkpoint: what ``torch.save`` writes, without the values.

Torch's checkpoint reader calls ``torch.load`` on a byte range of a file. The one idea: for a given dtype and shape everything
around the values is the same, so torch itself writes that once, with the values left out (``torch.serialization.skip_data``),
and a conversion copies values between a prefix and a suffix without ever building a tensor.

Reading goes the other way: :func:`locate` says where the values of a container lie, so that a slice of them can be mapped. What
is not a plain contiguous tensor in one storage is refused, and nothing is unpickled but by torch's ``weights_only`` reader.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
import zipfile
from typing import IO, NamedTuple

import torch

from megatron_xorl.errors import WeightsError

__all__ = ["ALIGNMENT", "DTYPE_NAMES", "TORCH_DTYPES", "Container", "container", "locate"]

ALIGNMENT = 64
"""Containers begin on this grid, as values do within them, so that mapped values are aligned."""

TORCH_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F32": torch.float32,
    "I32": torch.int32,
    "F64": torch.float64,
    "I64": torch.int64,
}
"""Torch's dtype by the name that safetensors gives it."""

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_LOCAL_HEADER = 30  # fixed part of a zip local file header; name and extra field follow


class Container(NamedTuple):
    """Bytes before and after the values of a tensor."""

    prefix: bytes
    suffix: bytes


@functools.lru_cache(maxsize=4096)
def container(dtype: str, shape: tuple[int, ...]) -> Container:
    """Return the container of a tensor.

    Args:
        dtype: safetensors name of the dtype.
        shape: of the tensor; not empty.

    Raises:
        WeightsError: the temporary directory cannot hold the file that torch writes for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The values are a hole of this file: it takes no space and no time, however large the tensor.
        path = os.path.join(folder, "tensor.pt")
        try:
            with torch.serialization.skip_data():
                torch.save(torch.empty(shape, dtype=TORCH_DTYPES[dtype]), path)
        except RuntimeError as error:  # from C++, without an error number
            raise WeightsError(
                f"{tempfile.gettempdir()} cannot hold a file with a hole of {math.prod(shape)} {dtype} values ({error}); "
                "set TMPDIR to a directory that can"
            ) from error
        with open(path, "rb") as file:
            start, stop = _values(file)
            file.seek(0)
            prefix = file.read(start)
            file.seek(stop)
            return Container(prefix, file.read())


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
    size = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    try:
        start, stop = _values(view)
        view.seek(0)
        found = torch.load(view, map_location="meta", weights_only=True)
        assert isinstance(found, torch.Tensor)
    except Exception as error:  # whatever a damaged pickle or zip makes of itself
        raise WeightsError(
            f"{name}: its container is damaged or no saved tensor ({type(error).__name__}); convert or copy the checkpoint again"
        ) from error
    plain = found.is_contiguous() and found.storage_offset() == 0 and stop - start == size
    if found.dtype != TORCH_DTYPES[dtype] or tuple(found.shape) != shape or not plain:
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
