"""``progress.jsonl``: what an unfinished conversion has done, and whose output a directory is.

The one idea: the file only grows. Its first line says what is being converted and how, and every finished file adds a line once
it is on disk, so a kill costs at most the line that was being written; a later run cuts that one and nothing else. Whoever writes
holds a lock on the file.

Refused, with nothing changed: a directory that holds anything but this conversion's own files, a journal of another conversion or
of none, a line that does not say what a finished file is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_xorl.convert.files import PARTIAL, sync_directory
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.completeness import PROGRESS_NAME
from megatron_xorl.weights.manifest import MANIFEST, described_fault, parse_json

__all__ = ["Described", "Journal", "open_journal"]

Described = dict[str, dict[str, Any]]
"""``size``, and ``sha256`` where it is known, by file name."""


class Journal(NamedTuple):
    """An open journal, and the files that earlier runs noted in it."""

    stream: BinaryIO
    noted: Described

    def append(self, file: str, described: dict[str, Any]) -> None:
        """Note a finished file; it is on disk when this returns."""
        _append(self.stream, {"file": file, **described})


@contextlib.contextmanager
def open_journal(
    out: Path, identity: dict[str, Any], files: Set[str], names: Set[str], *, hashed: bool
) -> Iterator[Journal]:
    """Open the journal of ``out``, alone, and clear away what a killed run had in hand.

    Args:
        out: directory of the output; it exists.
        identity: of the conversion, as its first line.
        files: that the journal may note.
        names: of everything that the conversion writes, relative to ``out``; holds ``files``.
        hashed: every line must have a hash.

    Raises:
        WeightsError: see the module's list of refusals; also where another process holds the lock.
    """
    path = out / PROGRESS_NAME
    own = {name + end for name in (*names, MANIFEST) for end in ("", PARTIAL)} | {PROGRESS_NAME}
    _refuse_foreign(out, own)
    with open(path, "a+b") as stream:
        _lock(stream, path)
        stream.seek(0)
        content = stream.read()
        first = _line({"conversion": identity})
        whole = content[: content.rfind(b"\n") + 1]
        fresh = not whole and first.startswith(content) and os.listdir(out) == [PROGRESS_NAME]
        noted = {} if fresh else _read(path, whole or content, json.loads(first), files, hashed)
        stream.truncate(len(whole))
        if fresh:
            _append(stream, {"conversion": identity})
        for name in own:
            if name.endswith(PARTIAL):
                (out / name).unlink(missing_ok=True)
        sync_directory(out)
        yield Journal(stream, noted)


def _refuse_foreign(out: Path, own: Set[str]) -> None:
    """Check that a directory is empty or has a journal and this conversion's files alone."""
    folders = {str(Path(name).parent) for name in own}
    found = []
    for folder, inside, held in os.walk(out):
        at = Path(folder).relative_to(out)
        found += [str(at / name) for name in held if str(at / name) not in own]
        found += [str(at / name) for name in inside if str(at / name) not in folders]
    path = out / PROGRESS_NAME
    started = path.is_file() and not path.is_symlink()
    if not started:
        found += os.listdir(out)
    if found:
        raise WeightsError(
            f"{out} is not empty (it holds {min(found)}, which is not of this conversion); "
            "choose a new directory for the output"
        )


def _lock(stream: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that finished between opening and locking has taken the name away.
        ours = path.stat().st_ino == os.fstat(stream.fileno()).st_ino
    except OSError:
        ours = False
    if not ours:
        raise WeightsError(
            f"{path.parent} is being written by another conversion; wait for it or choose another directory"
        )


def _read(
    path: Path, content: bytes, first: dict[str, Any], files: Set[str], hashed: bool
) -> Described:
    noted: Described = {}
    for number, text in enumerate(content.split(b"\n")[:-1] or [content], 1):
        try:
            line = parse_json(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise WeightsError(
                f"{path}, line {number}: no line of a conversion; choose a new directory for the output"
            )
        if number == 1:
            _check_identity(path, line, first)
            continue
        file = line.pop("file", None)
        if not isinstance(file, str) or file not in files:
            fault: str | None = f"file is {file!r}, no file of this conversion"
        elif hashed and "sha256" not in line:
            fault = "sha256 is missing"
        else:
            fault = described_fault(line)
        if fault is not None:
            raise WeightsError(
                f"{path}, line {number}: {fault}; choose a new directory for the output"
            )
        noted[file] = line
    return noted


def _check_identity(path: Path, line: dict[str, Any], first: dict[str, Any]) -> None:
    if not isinstance(line.get("conversion"), dict):
        raise WeightsError(
            f"{path}, line 1: no line of a conversion; choose a new directory for the output"
        )
    if line != first:
        raise WeightsError(
            f"{path.parent} holds an unfinished conversion of another source, or with other options; "
            "finish that one, or choose a new directory"
        )


def _line(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _append(stream: BinaryIO, line: dict[str, Any]) -> None:
    stream.write(_line(line))
    stream.flush()
    os.fsync(stream.fileno())
