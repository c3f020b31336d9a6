"""The journal of a conversion: what is none of its own is refused and not touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_xorl.convert.journal import open_journal
from megatron_xorl.convert.origin import Origin
from megatron_xorl.errors import WeightsError

ORIGIN = Origin(Path("source"), {"verb": "import"}, {"model.safetensors": {"size": 1, "time": 2}})
MADE = {"model.safetensors": "2" * 64}
FILES = {f"__0_{k}.distcp" for k in range(10)}


def begin(out: Path) -> dict[str, dict[str, object]]:
    names = FILES | {"hf/shards.json", "config.json"}
    with open_journal(out, ORIGIN, FILES, names, hashed=True) as journal:
        for k in range(4):
            if f"__0_{k}.distcp" not in journal.noted:
                (out / f"__0_{k}.distcp").write_bytes(b"x")
                journal.append(f"__0_{k}.distcp", {"size": 1, "sha256": "1" * 64}, MADE)
        return journal.noted


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """An output with four finished files."""
    (tmp_path / "out").mkdir()
    begin(tmp_path / "out")
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_our_own_is_continued_and_its_partial_files_are_cleared(stopped: Path) -> None:
    """Control for the refusals."""
    (stopped / "__0_7.distcp.partial").write_bytes(b"half")
    assert len(begin(stopped)) == 4
    assert not (stopped / "__0_7.distcp.partial").exists()


FOREIGN = {
    "not JSON": (b"epoch 1\n", "line 1: no line of a conversion"),
    "not JSON and cut": (b"epoch 1", "line 1: no line of a conversion"),
    "empty": (b"", "line 1: no line of a conversion"),
    "a number": (b"7\n", "line 1: no line of a conversion"),
    "a list": (b"[]\n", "line 1: no line of a conversion"),
    "no conversion": (b'{"step": 1}\n', "line 1: no line of a conversion"),
    "deep": (b"[" * 100_000 + b"\n", "line 1: no line of a conversion"),
    "not UTF-8": (b"\xff\xfe\n", "line 1: no line of a conversion"),
    "no source": (b'{"conversion": {"verb": "import"}}\n', "does not say of which source"),
    "another verb": (
        b'{"conversion": {"verb": "export"}}\n',
        "is of `export`, and this is `import`",
    ),
    "another source": (
        b'{"conversion": {"verb": "import", "source": {"x": {}}}}\n',
        "model.safetensors is a new file of the source",
    ),
    "another size": (
        b'{"conversion": {"verb": "import", "source": {"model.safetensors": {"size": 7}}}}\n',
        "model.safetensors of the source had 7 bytes and has 1",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_directory_with_a_journal_of_something_else_is_refused_and_not_touched(
    name: str, stopped: Path
) -> None:
    text, complaint = FOREIGN[name]
    (stopped / "progress.jsonl").write_bytes(text)
    (stopped / "__0_9.distcp.partial").write_bytes(b"mine")
    before = contents(stopped)
    with pytest.raises(WeightsError, match=complaint) as caught:
        begin(stopped)
    assert "\n" not in str(caught.value)
    assert contents(stopped) == before


@pytest.mark.parametrize("name", ["notes.txt", "thesis.partial", "hf/notes", "data/x"])
def test_a_file_of_something_else_in_an_unfinished_output_is_refused(
    name: str, stopped: Path
) -> None:
    (stopped / name).parent.mkdir(exist_ok=True)
    (stopped / name).write_text("mine")
    before = contents(stopped)
    with pytest.raises(WeightsError, match="not of this conversion"):
        begin(stopped)
    assert contents(stopped) == before


LINES = {
    "a list": ([], "no line of a conversion"),
    "no file": ({"size": 1, "sha256": "0" * 64}, "file is None"),
    "file outside": ({"file": "../x", "size": 1, "sha256": "0" * 64}, r"file is '\.\./x'"),
    "file that is a list": ({"file": [], "size": 1, "sha256": "0" * 64}, "file is "),
    "no size": ({"file": "__0_1.distcp", "sha256": "0" * 64, "sources": MADE}, "size is None"),
    "no hash": ({"file": "__0_1.distcp", "size": 1}, "sha256 is missing"),
    "a hash of a kind": (
        {"file": "__0_1.distcp", "size": 1, "sha256": 5, "sources": MADE},
        "sha256 is not",
    ),
    "no sources": ({"file": "__0_1.distcp", "size": 1, "sha256": "0" * 64}, "sources are no files"),
    "sources of another": (
        {"file": "__0_1.distcp", "size": 1, "sha256": "0" * 64, "sources": {"x": None}},
        "sources are no files",
    ),
    "a source's hash of a kind": (
        {
            "file": "__0_1.distcp",
            "size": 1,
            "sha256": "0" * 64,
            "sources": {"model.safetensors": 3},
        },
        "sources: a sha256 is not",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_says_nonsense_is_refused_by_line_and_field(name: str, stopped: Path) -> None:
    line, complaint = LINES[name]
    with open(stopped / "progress.jsonl", "a") as journal:
        journal.write(json.dumps(line) + "\n")
    before = contents(stopped)
    with pytest.raises(WeightsError, match=f"progress.jsonl, line 6: {complaint}"):
        begin(stopped)
    assert contents(stopped) == before
