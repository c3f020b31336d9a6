"""The zip file that ``torch.save`` writes, without torch: stored records, the values of a tensor last.

The one idea: ``torch.load`` wants a folder in a zip file with ``data.pkl``, ``byteorder``, ``version`` and ``data/0``, none
compressed. So the bytes around the values are known before the values are, however many there are (zip64). Checksums of values
are left at 0, as torch leaves them where it skips data (``torch.serialization.skip_data``); torch reads none.

Formats: PKWARE's APPNOTE 6.3.10, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from megatron_xorl.errors import WeightsError

__all__ = ["ALIGNMENT", "Around", "around_values", "plain_archive", "read_plain"]

ALIGNMENT = 64
"""Values begin on this grid of the archive, so that mapped values are aligned."""

_LIMIT = 0xFFFFFFFF  # what does not fit 32 bits stands in a zip64 field
_VERSION = 45  # of the format: zip64


class Around(NamedTuple):
    """Bytes before and after the values of a tensor."""

    prefix: bytes
    suffix: bytes


class _Record(NamedTuple):
    name: bytes
    size: int
    checksum: int
    at: int


def around_values(data: bytes, size: int) -> Around:
    """Return the archive around ``size`` bytes of values.

    Args:
        data: content of ``data.pkl``, a pickle of a tensor whose storage has the key ``0``.
        size: of the storage.
    """
    content, records = _records(data)
    values = _Record(b"archive/data/0", size, 0, len(content))
    header = _local(values)
    padding = -(len(content) + len(header)) % ALIGNMENT
    content += _local(values, padding)
    records.append(values)
    return Around(content, _directory(records, len(content) + size))


def plain_archive(value: Any) -> bytes:
    """Return what ``torch.save`` would write for plain Python values."""
    content, records = _records(pickle.dumps(value, 2))
    return content + _directory(records, len(content))


def read_plain(path: Path) -> Any:
    """Return the plain Python values that ``torch.save`` wrote into ``path``; no class or function is named while reading.

    Raises:
        WeightsError: the file is missing or damaged, or names a class or function.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return _Plain(io.BytesIO(archive.read(name))).load()
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing; copy the checkpoint again") from None
    except Exception as error:  # a damaged pickle or zip fails in any way it likes
        raise WeightsError(
            f"{path} is damaged or not what torch.save writes ({type(error).__name__}); copy the checkpoint again"
        ) from error


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise WeightsError(
            f"it names {module}.{name}, expected numbers and text alone, and would be run on reading; do not trust this file"
        )

    def persistent_load(self, _: Any) -> Any:
        raise WeightsError(
            "it holds tensors, expected numbers and text alone; copy the checkpoint again"
        )


def _records(data: bytes) -> tuple[bytes, list[_Record]]:
    content, records = b"", []
    for name, text in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
        record = _Record(f"archive/{name}".encode(), len(text), zlib.crc32(text), len(content))
        content += _local(record) + text
        records.append(record)
    return content, records


def _local(record: _Record, padding: int = 0) -> bytes:
    """The header before a record; ``padding`` bytes are added to it as an extra field of their own."""
    large = record.size >= _LIMIT
    extra = struct.pack("<2H2Q", 1, 16, record.size, record.size) if large else b""
    if padding:
        padding += 0 if padding >= 4 else ALIGNMENT  # the field itself takes four bytes
        extra += struct.pack("<2H", 0x4246, padding - 4) + bytes(padding - 4)  # torch's own "FB"
    size = _LIMIT if large else record.size
    numbers = (_VERSION, 0, 0, 0, 0, record.checksum, size, size, len(record.name), len(extra))
    return struct.pack("<4s5H3L2H", b"PK\3\4", *numbers) + record.name + extra


def _directory(records: list[_Record], at: int) -> bytes:
    entries = b""
    for record in records:
        size, start = min(record.size, _LIMIT), min(record.at, _LIMIT)
        wide = [record.size] * 2 if size == _LIMIT else []
        wide += [record.at] if start == _LIMIT else []
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        sizes = (record.checksum, size, size, len(record.name), len(extra))
        numbers = (_VERSION, _VERSION, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, start)
        entries += struct.pack("<4s6H3L5H2L", b"PK\1\2", *numbers) + record.name + extra
    count, length = len(records), len(entries)
    end64 = struct.pack(
        "<4sQ2H2L4Q", b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, length, at
    )
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at + length, 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, length, min(at, _LIMIT), 0)
    return entries + end64 + locator + end
