"""Files of a conversion: read once in order, write once in order, hash on the way, keep neither in memory.

The one idea: bytes pass through in blocks of :data:`PIECE` bytes, and no step waits for another. A thread of its own reads the
source a few blocks ahead, others write the output and hash both a few blocks behind, all on the same buffers. So a conversion is
as slow as the slowest step, not as slow as their sum, and its memory does not depend on the size of a tensor.

Written files get their name when they are on disk: a temporary name, fsync, rename. Pages are given back to the system as they
are done with, so a conversion of 704 GB does not push everything else out of the page cache.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
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

_BLOCKS_AHEAD = 4  # that are read, or being read, before they are asked for
_PIECES_BEHIND = 4  # that may wait to be written or hashed
_READ_AHEAD = 64 * 2**20  # bytes that the disk is told of before they are read
_WRITE_BEHIND = 32 * 2**20  # the disk starts on written bytes after this many, not at the fsync
_SMALL = 2**17  # shorter pieces (norms, scales, headers) are collected ...
_TOGETHER = 2**20  # ... up to this many bytes before they are written and hashed


class SourceFile:
    """A file that is read from front to back, and compared with its hash where one is known.

    Args:
        path: of the file.
        sha256: that it must have, or None.
        hashed: compute the SHA-256 where none is known, too.
    """

    def __init__(self, path: Path, sha256: str | None = None, *, hashed: bool = False) -> None:
        self.path = path
        self.handle = os.open(path, os.O_RDONLY)
        self.expected = sha256
        self._hashed = hashed or sha256 is not None
        self._blocks: _Blocks | None = None

    def pieces(self, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes from ``start`` to ``stop``.

        Raises:
            WeightsError: the file ends before them.
        """
        if self._blocks is None:
            self._blocks = self._begin(start)
        while start < stop:
            piece = self._blocks.piece(start, stop)
            if not piece:
                raise WeightsError(
                    f"{self.path} ends at byte {start}, expected {stop} or more: it was cut while it was read"
                )
            start += len(piece)
            yield piece

    def finish(self) -> str | None:
        """Read what is left, compare the hash, and return it where one was asked for.

        Raises:
            WeightsError: the file is not what its manifest says.
        """
        if not self._hashed:
            return None
        if self._blocks is None:
            self._blocks = self._begin(0)
        found = self._blocks.sha256()
        if self.expected is not None and found != self.expected:
            raise WeightsError(
                f"{self.path} has other content than its manifest says (SHA-256 differs); copy or convert it again"
            )
        return found

    def close(self) -> None:
        """Close the file and give its pages back."""
        if self._blocks is not None:
            self._blocks.close()
        _forget(self.handle, 0, 0)
        os.close(self.handle)

    def _begin(self, start: int) -> _Blocks:
        """A hash needs every byte; without one, reading begins where it is asked to."""
        return _Blocks(self.path, self.handle, 0 if self._hashed else start, self._hashed)


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
        self._sha256 = hashlib.sha256() if hashed else None
        self._writing = _Behind()
        self._hashing = _Behind() if hashed else None
        self._small = bytearray()
        self._written = self._started = 0
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
        self._writing.close()
        if self._hashing is not None:
            self._hashing.close()
        os.close(self._handle)
        self._partial.unlink(missing_ok=True)

    def write(self, piece: Any) -> None:
        """Append bytes, which must not change afterwards.

        Raises:
            OSError: of this piece or of one before it: they are written a few pieces behind.
        """
        view = memoryview(piece).cast("B")
        self.size += len(view)
        if len(view) < _SMALL:
            self._small += view
            if len(self._small) < _TOGETHER:
                return
            view = memoryview(b"")
        self._send_small()
        self._send(view)

    def publish(self) -> dict[str, Any]:
        """Flush the file, give it its name, and return ``{"size"}`` with ``"sha256"`` where it was asked for.

        The name itself is on disk after :func:`sync_directory`.

        Raises:
            OSError: the disk did not take it; the name is not given then.
        """
        self._send_small()
        self._writing.wait()
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._partial)) from error
        _forget(self._handle, 0, 0)
        described: dict[str, Any] = {"size": self.size}
        if self._hashing is not None and self._sha256 is not None:
            self._hashing.wait()
            described["sha256"] = self._sha256.hexdigest()
        os.replace(self._partial, self.path)
        return described

    def _send_small(self) -> None:
        self._send(memoryview(self._small))
        self._small = bytearray()

    def _send(self, view: memoryview) -> None:
        if view:
            self._writing.submit(self._write, view)
        if view and self._hashing is not None and self._sha256 is not None:
            self._hashing.submit(self._sha256.update, view)

    def _write(self, view: memoryview) -> None:
        try:
            while view:
                written = os.write(self._handle, view)
                self._written += written
                view = view[written:]
        except OSError as error:  # of a handle, so without the name of the file
            raise OSError(error.errno, error.strerror, str(self._partial)) from error
        if self._written - self._started >= _WRITE_BEHIND:
            _forget(self._handle, self._started, self._written - self._started)
            self._started = self._written


class _Behind:
    """Calls that a thread of its own makes in order, a few behind; the first that fails is raised by a later call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def submit(self, function: Callable[[Any], None], piece: Any) -> None:
        self._waiting.append(self._thread.submit(function, piece))
        while len(self._waiting) > _PIECES_BEHIND:
            self._waiting.popleft().result()

    def wait(self) -> None:
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class _Blocks:
    """The blocks of a file from ``start``, in order, read ahead by a thread of its own and hashed by another."""

    def __init__(self, path: Path, handle: int, start: int, hashed: bool) -> None:
        self._path, self._handle = path, handle
        self._sha256 = hashlib.sha256() if hashed else None
        self._hashing = _Behind() if hashed else None
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[memoryview]] = deque()
        self._at, self._block = start, memoryview(b"")  # what is being handed out
        self._read = self._told = (
            start  # the thread's own: how far it is, and how far the disk was told
        )
        self._refill()

    def piece(self, start: int, stop: int) -> bytes | memoryview:
        """Return bytes from ``start`` on, at most to ``stop``; none behind the end of the file."""
        if start < self._at:  # in another order than the file's
            return os.pread(self._handle, min(PIECE, stop - start), start)
        while start >= self._at + len(self._block) and self._next():
            pass
        return self._block[start - self._at : stop - self._at]

    def sha256(self) -> str | None:
        """Read to the end and return the hash."""
        while self._next():
            pass
        if self._hashing is None or self._sha256 is None:
            return None
        self._hashing.wait()
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown(cancel_futures=True)
        if self._hashing is not None:
            self._hashing.close()

    def _next(self) -> bool:
        """Take the next block; False at the end of the file."""
        block = self._waiting.popleft().result()
        self._at, self._block = self._at + len(self._block), block
        self._refill()
        if self._hashing is not None and self._sha256 is not None:
            self._hashing.submit(self._sha256.update, block)
        return bool(block)

    def _refill(self) -> None:
        while len(self._waiting) < _BLOCKS_AHEAD:
            self._waiting.append(self._thread.submit(self._load))

    def _load(self) -> memoryview:
        self._tell()
        try:
            block = os.pread(self._handle, PIECE, self._read)
        except OSError as error:  # of a handle, so without the name of the file
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._read += len(block)
        return memoryview(block)

    def _tell(self) -> None:
        """Let the disk fetch what comes next while this block is used."""
        if self._read + _READ_AHEAD // 2 > self._told and hasattr(os, "posix_fadvise"):
            begin = max(self._read, self._told)
            self._told = self._read + _READ_AHEAD
            os.posix_fadvise(self._handle, begin, self._told - begin, os.POSIX_FADV_WILLNEED)


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
