"""Manifests: a directory is complete exactly when every byte is what was written, the manifest's own included."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from megatron_xorl.errors import CheckpointError
from megatron_xorl.weights.manifest import (
    describe_files,
    read_manifest,
    verify_files,
    write_manifest,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(b"some bytes")
    (tmp_path / "b.bin").write_bytes(b"")
    files = describe_files(tmp_path, ["a.bin", "b.bin"])
    write_manifest(tmp_path, {"files": files, "numbers": (1, 2), "by step": {10: "x", 9: "y"}})
    return tmp_path


def test_files_are_described_by_size_and_sha256(directory: Path) -> None:
    expected = {"size": 10, "sha256": hashlib.sha256(b"some bytes").hexdigest()}
    assert read_manifest(directory)["files"]["a.bin"] == expected


def test_a_manifest_reads_back_as_plain_json(directory: Path) -> None:
    document = read_manifest(directory)
    assert document["numbers"] == [1, 2]
    assert document["by step"] == {"10": "x", "9": "y"}
    verify_files(directory, document["files"])


def test_every_single_bit_of_a_manifest_matters(directory: Path) -> None:
    path = directory / "manifest.json"
    content = path.read_bytes()
    whole = json.loads(content)
    accepted = []
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            read_manifest(directory)
        except CheckpointError as error:
            assert "manifest.json" in str(error)
        else:
            accepted.append(bytes(damaged))
    # White space between tokens carries nothing.
    assert all(json.loads(damaged) == whole for damaged in accepted)
    path.write_bytes(content)
    assert read_manifest(directory)["numbers"] == [1, 2]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "has no manifest.json: saving it was interrupted"),
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "is not a checkpoint manifest"),
        (b'{"files": []}', "is not a checkpoint manifest"),
        (b'{"files": {}}', "SHA-256 differs"),
    ],
)
def test_what_is_no_manifest_is_refused(
    directory: Path, content: bytes | None, complaint: str
) -> None:
    path = directory / "manifest.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        read_manifest(directory)


def test_every_damaged_file_is_named_once(directory: Path) -> None:
    files = read_manifest(directory)["files"]
    (directory / "a.bin").write_bytes(b"Some bytes")
    (directory / "b.bin").unlink()
    with pytest.raises(CheckpointError, match=r"a\.bin has other content.*b\.bin is missing"):
        verify_files(directory, files)
    with pytest.raises(CheckpointError, match=r"damaged: b\.bin is missing; use"):
        verify_files(directory, files, hashes=False)
    (directory / "a.bin").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"a\.bin has 5 bytes, the manifest says 10"):
        verify_files(directory, files)


def test_a_writer_that_is_killed_before_the_rename_leaves_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_manifest(tmp_path, {"files": {}})
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        read_manifest(tmp_path)


def test_files_are_flushed_before_they_are_hashed_and_the_manifest_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync = os.fsync

    def recorded(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    (tmp_path / "a.bin").write_bytes(b"a")
    write_manifest(tmp_path, {"files": describe_files(tmp_path, ["a.bin"])})
    assert order == ["a.bin", "manifest.json.partial", tmp_path.name]
