"""Files of a conversion: read once in order, write once in order, hash on the way, keep neither in memory.

The one idea: bytes pass through in pieces of :data:`PIECE` bytes. A piece is hashed by a thread of its own while the next is
read and written, so a conversion waits for the disk and for nothing else, and its memory does not depend on the size of a tensor.

Written files get their name when they are on disk: a temporary name, fsync, rename. Pages are given back to the system as they
are done with, so a conversion of 704 GB does not push everything else out of the page cache.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_xorl.errors import WeightsError

__all__ = ["PARTIAL", "PIECE", "OutputFile", "SourceFile", "sync_directory"]

PIECE = 8 * 2**20
"""Bytes that are read, written and hashed at a time."""

PARTIAL = ".partial"
"""End of the name of a file that is not finished."""

_WRITE_BEHIND = 32 * 2**20  # the disk starts on written bytes after this many, not at the fsync
_READ_AHEAD = 64 * 2**20
_HASHES_BEHIND = 4  # pieces that may wait for the hashing thread
_SMALL = 2**17  # shorter pieces (norms, scales, headers) are collected ...
_TOGETHER = 2**20  # ... up to this many bytes before they are written or hashed


class SourceFile:
    """A file that is read from front to back, and compared with its hash where one is known.

    Args:
        path: of the file.
        sha256: that it must have, or None.
    """

    def __init__(self, path: Path, sha256: str | None = None) -> None:
        self.path = path
        self.handle = os.open(path, os.O_RDONLY)
        self._ahead = 0
        self.expected = sha256
        self._digest = None if sha256 is None else _Digest()
        self._hashed = 0

    def pieces(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from ``start`` to ``stop``.

        Raises:
            WeightsError: the file ends before them.
        """
        self._skip_to(start)
        while start < stop:
            self._read_ahead(start)
            piece = os.pread(self.handle, min(PIECE, stop - start), start)
            if not piece:
                raise WeightsError(
                    f"{self.path} ends at byte {start}, expected {stop} or more: it was cut while it was read"
                )
            self._hash(start, piece)
            start += len(piece)
            yield piece

    def finish(self) -> None:
        """Read what is left and compare the hash.

        Raises:
            WeightsError: the file is not what its manifest says.
        """
        if self._digest is None:
            return
        self._skip_to(os.fstat(self.handle).st_size)
        if self._digest.value() != self.expected:
            raise WeightsError(
                f"{self.path} has other content than its manifest says (SHA-256 differs); copy or convert it again"
            )

    def close(self) -> None:
        """Close the file and give its pages back."""
        _forget(self.handle, 0, 0)
        os.close(self.handle)
        if self._digest is not None:
            self._digest.close()

    def _read_ahead(self, start: int) -> None:
        """Let the disk fetch what comes next while this piece is written."""
        if start + _READ_AHEAD // 2 > self._ahead and hasattr(os, "posix_fadvise"):
            begin = max(start, self._ahead)
            self._ahead = start + _READ_AHEAD
            os.posix_fadvise(self.handle, begin, self._ahead - begin, os.POSIX_FADV_WILLNEED)

    def _skip_to(self, start: int) -> None:
        """Hash what lies between the last piece and ``start``."""
        while self._digest is not None and self._hashed < start:
            piece = os.pread(self.handle, min(PIECE, start - self._hashed), self._hashed)
            if not piece:
                return
            self._hash(self._hashed, piece)

    def _hash(self, start: int, piece: bytes) -> None:
        if self._digest is not None and start == self._hashed:
            self._digest.update(piece)
            self._hashed += len(piece)


class OutputFile:
    """A file that exists under its name only when all of it is on disk.

    Args:
        path: final name; what stands there is replaced.
        hashed: compute the SHA-256.
    """

    def __init__(self, path: Path, *, hashed: bool) -> None:
        self.path = path
        self._partial = path.with_name(path.name + PARTIAL)
        self._handle = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._digest = _Digest() if hashed else None
        self._small = bytearray()
        self._started = 0
        self.size = 0

    def __enter__(self) -> OutputFile:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file; without :meth:`publish` it is removed."""
        os.close(self._handle)
        if self._digest is not None:
            self._digest.close()
        self._partial.unlink(missing_ok=True)

    def write(self, piece: Any) -> None:
        """Append bytes."""
        view = memoryview(piece).cast("B")
        if self._digest is not None:
            self._digest.update(view)
        self.size += len(view)
        if len(view) < _SMALL:
            self._small += view
            if len(self._small) < _TOGETHER:
                return
            view = memoryview(b"")
        self._flush_small()
        self._write(view)
        if self.size - self._started >= _WRITE_BEHIND:
            _forget(self._handle, self._started, self.size - self._started)
            self._started = self.size

    def publish(self) -> dict[str, Any]:
        """Flush the file, give it its name, and return ``{"size"}`` with ``"sha256"`` where it was asked for.

        The name itself is on disk after :func:`sync_directory`.
        """
        self._flush_small()
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._partial)) from error
        _forget(self._handle, 0, 0)
        os.replace(self._partial, self.path)
        described: dict[str, Any] = {"size": self.size}
        return described if self._digest is None else described | {"sha256": self._digest.value()}

    def _flush_small(self) -> None:
        self._write(memoryview(self._small))
        self._small = bytearray()

    def _write(self, view: memoryview) -> None:
        try:
            while view:
                view = view[os.write(self._handle, view) :]
        except OSError as error:  # of a handle, so without the name of the file
            raise OSError(error.errno, error.strerror, str(self._partial)) from error


class _Digest:
    """A SHA-256 that is computed in a thread of its own, a few pieces behind."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._small = bytearray()

    def update(self, piece: Any) -> None:
        if len(piece) < _SMALL:
            self._small += piece
            if len(self._small) < _TOGETHER:
                return
            piece = b""
        if self._small:
            self._submit(self._small)
            self._small = bytearray()
        if piece:
            self._submit(piece)

    def _submit(self, piece: Any) -> None:
        self._waiting.append(self._thread.submit(self._sha256.update, piece))
        while len(self._waiting) > _HASHES_BEHIND:
            self._waiting.popleft().result()

    def value(self) -> str:
        while self._waiting:
            self._waiting.popleft().result()
        self._sha256.update(self._small)
        self._small = bytearray()
        return self._sha256.hexdigest()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _forget(handle: int, start: int, length: int) -> None:
    """Tell the system that a range will not be used again; what is not on disk yet is started on its way."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, start, length, os.POSIX_FADV_DONTNEED)
