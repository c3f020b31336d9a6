"""``progress.jsonl``: what an unfinished conversion has done, and whose output a directory is.

The one idea: the file only grows. Its first line says what is being converted and how, and every finished file adds a line once
it is on disk, with the hashes of the source files that it was made of, so a kill costs at most the line that was being written; a
later run cuts that one and nothing else. Whoever writes holds a lock on the file.

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
from megatron_xorl.convert.origin import Hashes, Origin
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.completeness import PROGRESS_NAME
from megatron_xorl.weights.manifest import MANIFEST, described_fault, parse_json

__all__ = ["Described", "Journal", "open_journal"]

Described = dict[str, dict[str, Any]]
"""``size``, and ``sha256`` where it is known, by file name."""


class Journal(NamedTuple):
    """An open journal, the files that earlier runs noted in it, and the hashes of what those were made of."""

    stream: BinaryIO
    noted: Described
    sources: Hashes

    def append(self, file: str, described: dict[str, Any], sources: Hashes) -> None:
        """Note a finished file and what it was made of; it is on disk when this returns."""
        _append(self.stream, {"file": file, **described, "sources": sources})


@contextlib.contextmanager
def open_journal(
    out: Path, origin: Origin, files: Set[str], names: Set[str], *, hashed: bool
) -> Iterator[Journal]:
    """Open the journal of ``out``, alone, and clear away what a killed run had in hand.

    Args:
        out: directory of the output; it exists.
        origin: of the conversion, for its first line.
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
        first = {"conversion": origin.document()}
        whole = content[: content.rfind(b"\n") + 1]
        fresh = (
            not whole and _line(first).startswith(content) and os.listdir(out) == [PROGRESS_NAME]
        )
        noted, sources = ({}, {}) if fresh else _read(path, whole or content, origin, files, hashed)
        stream.truncate(len(whole))
        if fresh:
            _append(stream, first)
        for name in own:
            if name.endswith(PARTIAL):
                (out / name).unlink(missing_ok=True)
        sync_directory(out)
        yield Journal(stream, noted, sources)


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
    path: Path, content: bytes, origin: Origin, files: Set[str], hashed: bool
) -> tuple[Described, Hashes]:
    noted: Described = {}
    sources: Hashes = {}
    first, *others = [
        _parsed(path, number, text)
        for number, text in enumerate(content.split(b"\n")[:-1] or [content], 1)
    ]
    before = first.get("conversion")
    if not isinstance(before, dict):
        raise WeightsError(f"{path}, line 1: {_NO_LINE}")
    if (fault := origin.differs(before)) is not None:
        raise WeightsError(_another(path.parent, fault))
    for number, line in enumerate(others, 2):
        if (fault := _line_fault(line, files, origin, hashed)) is not None:
            raise WeightsError(
                f"{path}, line {number}: {fault}; choose a new directory for the output"
            )
        sources |= line.pop("sources")
        noted[line.pop("file")] = line
    if (fault := origin.changed(before["source"], sources)) is not None:
        raise WeightsError(_another(path.parent, fault))
    return noted, sources


_NO_LINE = "no line of a conversion; choose a new directory for the output"


def _parsed(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = parse_json(text)
    except ValueError:
        line = None
    if not isinstance(line, dict):
        raise WeightsError(f"{path}, line {number}: {_NO_LINE}")
    return line


def _line_fault(line: dict[str, Any], files: Set[str], origin: Origin, hashed: bool) -> str | None:
    """Say what is wrong with a line of a finished file."""
    file, sources = line.get("file"), line.get("sources")
    if not isinstance(file, str) or file not in files:
        return f"file is {file!r}, no file of this conversion"
    if hashed and "sha256" not in line:
        return "sha256 is missing"
    if not isinstance(sources, dict) or not sources.keys() <= origin.files.keys():
        return "sources are no files of this conversion"
    for value in sources.values():
        if value is not None and described_fault({"size": 0, "sha256": value}):
            return "sources: a sha256 is not 64 hexadecimal digits"
    return described_fault(line)


def _another(out: Path, fault: str) -> str:
    return (
        f"{out} holds an unfinished conversion of another source, or with other options: {fault}; "
        "finish that one, or choose a new directory"
    )


def _line(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _append(stream: BinaryIO, line: dict[str, Any]) -> None:
    stream.write(_line(line))
    stream.flush()
    os.fsync(stream.fileno())
