"""Manifests: a directory is complete if and only if its manifest exists and every file it lists is what it says.

The manifest is one JSON document with, for each file, its size and SHA-256, and under ``manifest_sha256`` the hash of the
rest of itself. It is written last, after every file is on disk (fsync), so a killed writer leaves a directory that plainly is
not a checkpoint. Renaming is only tidiness.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_xorl.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "describe_files",
    "described_fault",
    "file_fault",
    "file_sha256",
    "parse_json",
    "read_manifest",
    "verify_files",
    "write_manifest",
]

MANIFEST = "manifest.json"
SELF = "manifest_sha256"

_PIECE = 2**20  # bytes hashed at a time
_SHA256 = re.compile("[0-9a-f]{64}")


def describe_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Flush ``names`` to disk and return ``{name: {"size", "sha256"}}``."""
    described = {}
    for name in names:
        path = directory / name
        _fsync(path)
        described[name] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    return described


def write_manifest(directory: Path, document: dict[str, Any]) -> None:
    """Write the manifest and flush it and the directory; ``document["files"]`` holds what :func:`describe_files` returned."""
    document = json.loads(
        json.dumps(document)
    )  # as it will be read back: tuples are lists, keys are strings
    path = directory / MANIFEST
    partial = directory / f"{MANIFEST}.partial"
    with open(partial, "w", encoding="utf-8") as stream:
        json.dump(document | {SELF: _document_sha256(document)}, stream, indent=1, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)
    _fsync(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of a directory.

    Raises:
        CheckpointError: there is none (the writer was killed, or this is not a checkpoint), or it is damaged.
    """
    path = directory / MANIFEST
    try:
        document = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: saving it was interrupted or it is no checkpoint; use another iteration"
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); the checkpoint is damaged: use another iteration"
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise CheckpointError(
            f"{path} is not a checkpoint manifest; the checkpoint is damaged: use another iteration"
        )
    if document.pop(SELF, None) != _document_sha256(document):
        raise CheckpointError(
            f"{path} has other content than it says of itself (SHA-256 differs); the checkpoint is damaged: use another iteration"
        )
    for name, described in document["files"].items():
        fault = _name_fault(name) or described_fault(described)
        if fault is not None:
            raise CheckpointError(
                f"{path}: files, {name!r}: {fault}; the checkpoint is damaged: use another iteration"
            )
    return document


def parse_json(content: bytes) -> Any:
    """Return what a JSON document holds.

    Raises:
        ValueError: it is no UTF-8 or no JSON, writes a key of an object twice, or is nested deeper than any document of ours.
    """
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One object of a document; JSON's own reader keeps the last of two values and says nothing."""
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {key!r} appears twice")
    return result


def file_fault(path: Path) -> str | None:
    """Say why a name is no file that can be read from front to back; None if it is one."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "is a link to nothing" if path.is_symlink() else "is missing"
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return f"is {kinds.get(stat.S_IFMT(mode), 'a device')}, expected a file"


def described_fault(described: Any) -> str | None:
    """Say what is wrong with a file's ``{"size", "sha256"}``, of which the hash may be absent; None if nothing is."""
    if not isinstance(described, dict):
        return f"found {type(described).__name__}, expected size and sha256"
    size, sha256 = described.get("size"), described.get("sha256", "0" * 64)
    if type(size) is not int or size < 0:
        return f"size is {size!r}, expected a number of bytes"
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        return "sha256 is not 64 hexadecimal digits"
    return None


def _name_fault(name: str) -> str | None:
    parts = PurePosixPath(name)
    plain = name and not parts.is_absolute() and ".." not in parts.parts and "\0" not in name
    return None if plain and str(parts) == name != "." else "names no file inside the directory"


def verify_files(
    directory: Path,
    files: dict[str, dict[str, Any]],
    *,
    hashes: bool = True,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Compare files on disk with a manifest's ``files``.

    Args:
        directory: that holds them.
        files: size and SHA-256 by name.
        hashes: compare the SHA-256; sizes are compared anyway.
        advance: told the bytes that were hashed, as they are.

    Raises:
        CheckpointError: names every file that is missing, of another size, or of other content.
    """
    faults = []
    for name, expected in files.items():
        path = directory / name
        if fault := file_fault(path):
            faults.append(f"{name} {fault}")
        elif path.stat().st_size != expected["size"]:
            faults.append(
                f"{name} has {path.stat().st_size} bytes, the manifest says {expected['size']}"
            )
        elif hashes and "sha256" not in expected:
            faults.append(
                f"{name} has no SHA-256 in the manifest, so its content cannot be checked"
            )
        elif hashes and file_sha256(path, advance) != expected["sha256"]:
            faults.append(f"{name} has other content than its manifest says (SHA-256 differs)")
    if faults:
        raise CheckpointError(f"{directory} is damaged: {'; '.join(faults)}; use another iteration")


def file_sha256(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file, 64 hexadecimal digits; ``advance`` is told the bytes that were read, as they are."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            digest.update(buffer[:size])
            if advance is not None:
                advance(size)
    return digest.hexdigest()


def _document_sha256(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
