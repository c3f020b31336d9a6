"""A checkpoint that a test breaks, and the proof that a conversion refuses it: one line, exit 2, nothing begun."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_xorl.cli import main
from megatron_xorl.weights.dcp_metadata import read_items
from megatron_xorl.weights.manifest import read_manifest, write_manifest
from megatron_xorl.weights.writer import INDEX_NAME

FIRST, SECOND = (f"model-0000{n}-of-00004.safetensors" for n in (1, 2))


@dataclass
class Case:
    """A checkpoint that can be broken, and what is converted: arguments that the command gets."""

    source: Path
    out: Path
    verb: str
    flags: tuple[str, ...] = ()

    @property
    def index(self) -> dict[str, Any]:
        return json.loads((self.source / INDEX_NAME).read_text())

    def map(self, **names: str | None) -> None:
        """Change entries of the index; None takes one out."""
        index = self.index
        for name, file in names.items():
            index["weight_map"].pop(name, None)
            if file is not None:
                index["weight_map"][name] = file
        (self.source / INDEX_NAME).write_text(json.dumps(index))

    def shard(self, name: str) -> Path:
        return self.source / self.index["weight_map"][name]

    def tensor(self, name: str, value: torch.Tensor | None, file: str | None = None) -> None:
        """Write a tensor into its shard, or ``file``; None takes it out, of the index too."""
        path = self.source / file if file else self.shard(name)
        tensors = load_file(path)
        tensors.pop(name, None)
        if value is None:
            self.map(**{name: None})
        else:
            tensors[name] = value
        save_file(tensors, path, metadata={"format": "pt"})

    def header(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the JSON header of the first shard."""
        raw = (self.source / FIRST).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        data = raw[8 + length :]
        (self.source / FIRST).write_bytes(len(text).to_bytes(8, "little") + text + data)

    def config(self, change: Callable[[dict[str, Any]], Any]) -> None:
        raw = json.loads((self.source / "config.json").read_text())
        change(raw)
        (self.source / "config.json").write_text(json.dumps(raw))

    def metadata(self, content: bytes) -> None:
        """Replace ``.metadata`` and say so in the manifest."""
        self.replace(".metadata", content)

    def replace(self, name: str, content: bytes) -> None:
        (self.source / name).write_bytes(content)
        document = read_manifest(self.source)
        digest = hashlib.sha256(content).hexdigest()
        document["files"][name] = {"size": len(content), "sha256": digest}
        write_manifest(self.source, document)

    def items(self) -> list:
        return read_items(self.source / ".metadata")


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file()
    }


def convert(case: Case, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([case.verb, str(case.source), str(case.out), *case.flags])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def refused(case: Case, expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(case.source)
    present = listing(case.out)
    code, out, err = convert(case, capsys)
    assert (code, out) == (2, ""), err
    assert err.startswith("megatron-xorl: ")
    # One line; several faults at once are listed under it, a line each.
    assert err.count("\n") == 1 or " problems:\n  " in err, err
    for text in expected:
        assert text in err
    assert listing(case.source) == before
    assert listing(case.out) == present  # nothing was begun
