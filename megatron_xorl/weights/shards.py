"""One safetensors file: its header, read and checked without mapping the data.

A safetensors file is 8 bytes of header length (little-endian), a JSON header of name -> dtype,
shape, data_offsets, and the data. Everything that a truncated, empty or damaged file gets wrong
shows in the header against the file's size, so it can be named before a byte of weight is read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.manifest import file_fault, parse_json

__all__ = ["DTYPE_BYTES", "Entry", "read_header"]

DTYPE_BYTES = {
    "F8_E4M3": 1,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "F32": 4,
    "I32": 4,
    "F64": 8,
    "I64": 8,
}
"""Bytes of an element by safetensors dtype name; a dtype outside this table is refused by name."""

_LENGTH_BYTES = 8


class Entry(NamedTuple):
    """Where one tensor lies in its file; ``start`` and ``stop`` are absolute file offsets."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a safetensors file by name.

    Raises:
        WeightsError: the file is missing, empty, truncated, its header is no JSON, an entry does not fit its
            dtype and shape, or tensors overlap or leave bytes between or behind them.
    """
    size = _file_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if _LENGTH_BYTES + length > size:
            raise WeightsError(
                f"{path.name} is truncated or no safetensors file: its header claims {length} bytes, the file has {size}; "
                "fetch it again"
            )
        text = file.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise WeightsError(
            f"{path.name}: the safetensors header is damaged ({error}); fetch the file again"
        ) from error
    if not isinstance(header, dict):
        raise WeightsError(
            f"{path.name}: the safetensors header is no JSON object; fetch the file again"
        )
    header.pop("__metadata__", None)
    data = _LENGTH_BYTES + length
    entries = {name: _entry(path, name, fields, data, size) for name, fields in header.items()}
    _check_layout(path, entries, data, size)
    return entries


def _file_size(path: Path) -> int:
    if fault := file_fault(path):
        raise WeightsError(f"{path.name} {fault}; the index names it, fetch it")
    size = path.stat().st_size
    if size < _LENGTH_BYTES:
        raise WeightsError(
            f"{path.name} has {size} bytes, a safetensors file starts with {_LENGTH_BYTES}; fetch it again"
        )
    return size


def _entry(path: Path, name: str, fields: Any, data: int, size: int) -> Entry:
    try:
        dtype, shape = str(fields["dtype"]), tuple(_whole(side) for side in fields["shape"])
        first, last = (_whole(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{path.name}: the header entry of {name} is damaged; fetch the file again"
        ) from error
    if dtype not in DTYPE_BYTES:
        raise WeightsError(
            f"{path.name}: {name} has dtype {dtype}, expected one of {sorted(DTYPE_BYTES)}"
        )
    if not 0 <= first <= last:
        raise WeightsError(
            f"{path.name}: {name} has data_offsets [{first}, {last}], expected 0 <= begin <= end; fetch the file again"
        )
    start, stop = data + first, data + last
    if stop > size:
        raise WeightsError(
            f"{path.name} is truncated: {name} ends at byte {stop}, the file has {size}; fetch it again"
        )
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if stop - start != needed or min(shape, default=0) < 0:
        raise WeightsError(
            f"{path.name}: {name} has {stop - start} bytes, {dtype} {list(shape)} needs {needed}; fetch the file again"
        )
    return Entry(dtype, shape, start, stop)


def _check_layout(path: Path, entries: dict[str, Entry], data: int, size: int) -> None:
    """Tensors follow each other from the header to the end of the file, as the format says."""
    end, before = data, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            fault = "overlaps" if entry.start < end else f"lies {entry.start - end} bytes behind"
            raise WeightsError(
                f"{path.name}: {name} {fault} {before}, expected each tensor to begin where the one before it ends; "
                "fetch the file again"
            )
        end, before = entry.stop, name
    if end != size:
        raise WeightsError(
            f"{path.name}: {size - end} bytes follow {before}, expected the file to end with its last tensor; fetch it again"
        )


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise TypeError(f"{number!r} is no whole number")
    return number
