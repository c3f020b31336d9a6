"""The C++ loops of the ``cpu`` backend: built at first use, kept in a cache of the user, loaded with ctypes.

One idea: *a library is a file named by the hash of everything that made it* (source, flags, compiler, architecture), that is
written under a temporary name and then renamed. Processes that start together each build their own and the last rename wins,
with the same bytes as the first; nobody waits for anybody. ``torch.utils.cpp_extension`` is not used, because its lock file
(``FileBaton``) outlives a process that is killed while building, and every later process then waits for ever.

The file ends in the SHA-256 of what stands before it, so that a damaged one is seen before it is mapped, and is built again. A
loaded library must decode all codes as torch does before it is used.

Folders tried in order: ``$MEGATRON_XORL_CACHE``, ``$XDG_CACHE_HOME/megatron_xorl`` or ``~/.cache/megatron_xorl``, a private one
under the system's temporary directory. Refused: a folder that others may write to, and running without a C++17 compiler
(``$CXX``, else ``c++``, as torch chooses).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_xorl.errors import PlatformError

__all__ = ["BF16", "FP32", "FP32_OF_BF16", "Library", "library"]

BF16, FP32, FP32_OF_BF16 = 0, 1, 2
"""What a tile is written as; the last is fp32 storage of values rounded to bf16."""

SOURCE = Path(__file__).with_name("dequantize.cpp")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread")
BUILD_SECONDS = 300
ELEMENTS_A_THREAD = 1 << 17  # below this a thread costs more than it saves
_DIGEST = hashlib.sha256().digest_size
_WHOLE, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Library:
    """The loaded functions, with tensors in place of pointers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        loaded = ctypes.CDLL(str(path))  # CDLL gives up the interpreter lock during a call
        self._dequantize = loaded.mx_dequantize
        self._dequantize.argtypes = [_POINTER, _WHOLE, _POINTER, *[_WHOLE] * 9, _POINTER, *[_WHOLE] * 3]  # fmt: skip
        self._round_trip = loaded.mx_quantize_round_trip
        self._round_trip.argtypes = [_POINTER, *[_WHOLE] * 4, ctypes.c_float, _WHOLE]
        self._dequantize.restype = self._round_trip.restype = None

    def dequantize(
        self,
        codes: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        out: Tensor,
        *,
        rows: slice,
        cols: slice,
        parts: int = 1,
        kind: int,
    ) -> None:
        """Write the tile ``[rows, cols]`` of one matrix.

        Args:
            codes: uint8 ``[N, K]`` with contiguous rows.
            scales: fp32, ``parts`` grids stacked, contiguous rows.
            block: rows and columns of a scale block, any size.
            out: ``[rows, cols]`` with contiguous rows, bf16 for ``BF16``, else fp32.
            rows, cols: half-open ranges inside the matrix.
            parts: equal parts that the rows are stacked from, each with a grid of its own.
            kind: ``BF16``, ``FP32`` or ``FP32_OF_BF16``.
        """
        height, width = rows.stop - rows.start, cols.stop - cols.start
        self._dequantize(
            codes.data_ptr(), codes.stride(0), scales.data_ptr(), scales.stride(0), rows.start, height, cols.start, width,
            codes.shape[0] // parts, scales.shape[0] // parts, block[0], block[1], out.data_ptr(), out.stride(0), kind,
            _threads(height * width),
        )  # fmt: skip

    def quantize_round_trip(self, values: Tensor, group: int, floor: float) -> None:
        """Replace fp32 ``values`` ``[M, K]`` (contiguous rows) by what they are worth after 1 x ``group`` quantisation."""
        rows, cols = values.shape
        self._round_trip(
            values.data_ptr(), rows, cols, values.stride(0), group, floor, _threads(rows * cols)
        )


def _threads(elements: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // ELEMENTS_A_THREAD))


@functools.cache
def library() -> Library:
    """Return the library of this process, built and checked.

    Raises:
        PlatformError: no compiler, it fails, or no folder to keep a library in; says which and what to do.
    """
    compiler = _compiler()
    name = f"{_key(compiler)}.so"
    faults = []
    for folder in _folders():
        try:
            return _load_or_build(_private(folder) / name, compiler)
        except OSError as error:  # read-only, full, or mounted noexec: the next one
            faults.append(f"{folder}: {error.strerror or error}")
    raise PlatformError(
        f"no folder can keep the FP8 library ({'; '.join(faults)}); set MEGATRON_XORL_CACHE to a writable folder"
    )


def _compiler() -> list[str]:
    words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    found = shutil.which(words[0])
    if found is None:
        raise PlatformError(
            f"no C++ compiler: {words[0]!r} is not on PATH; install g++ (apt-get install g++) or set CXX to one"
        )
    return [found, *words[1:]]


def _key(compiler: list[str]) -> str:
    """Everything that decides the bytes of the library."""
    binary = Path(compiler[0]).resolve()
    status = binary.stat()
    parts = [*compiler, str(binary), str(status.st_size), str(status.st_mtime_ns), *FLAGS]
    parts += [platform.system(), platform.machine(), *platform.libc_ver()]
    return hashlib.sha256("\0".join(parts).encode() + SOURCE.read_bytes()).hexdigest()[:32]


def _folders() -> Iterator[Path]:
    if chosen := os.environ.get("MEGATRON_XORL_CACHE"):
        yield Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):  # "~" stays when the user has no home
        yield Path(home) / "megatron_xorl"
    yield Path(tempfile.gettempdir()) / f"megatron_xorl-{os.getuid()}"


def _private(folder: Path) -> Path:
    """Make the folder; refuse one that somebody else could put a library into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, "others may write to it")
    return folder


def _load_or_build(path: Path, compiler: list[str]) -> Library:
    if not _whole(path):
        _build(path, compiler)
    found = Library(path)
    _check(found)
    return found


def _whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _build(path: Path, compiler: list[str]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".so")
    os.close(handle)
    try:
        _compile([*compiler, *FLAGS, str(SOURCE), "-o", temporary])
        with open(temporary, "r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlatformError(
            f"the C++ compiler {command[0]} could not run ({error}); set CXX to another"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[0] if lines else "nothing")
        raise PlatformError(
            f"{command[0]} could not build {SOURCE.name} (exit {done.returncode}: {said[:200]}); it needs C++17, "
            "set CXX to a newer compiler"
        )


def _check(found: Library) -> None:
    """Compare every code, under an ordinary and a tiny scale, with torch; one differing bit refuses the library.

    One row is computed; a block of 32 rows may be looked up in a table, which is another loop.
    """
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 256)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes)  # NaN is refused when a weight is loaded
    scales = torch.tensor([[0.0123, 1e-40]])
    exact = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, dim=1)
    for kind, rows in itertools.product((BF16, FP32, FP32_OF_BF16), (1, 32)):
        expected = exact if kind == FP32 else exact.bfloat16()
        expected = expected.to(torch.bfloat16 if kind == BF16 else torch.float32).repeat(rows, 1)
        out = torch.empty_like(expected)
        found.dequantize(
            codes.repeat(rows, 1), scales, (rows, 128), out, rows=slice(0, rows), cols=slice(0, 256), kind=kind
        )  # fmt: skip
        if not torch.equal(out.view(torch.uint8), expected.view(torch.uint8)):
            raise PlatformError(
                f"{found.path} decodes FP8 otherwise than torch; set CXX to another compiler, "
                "or MEGATRON_XORL_FP8_BACKEND=reference"
            )
