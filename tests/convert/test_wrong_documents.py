"""Documents of a checkpoint that are whole and say something false: its manifest, its shard layout, and small files by hash."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.dcp_metadata import metadata_bytes, read_items
from megatron_xorl.weights.manifest import read_manifest, write_manifest
from megatron_xorl.weights.opening import open_checkpoint
from megatron_xorl.weights.writer import INDEX_NAME
from tests.convert.broken import FIRST, Case, flip, refused


def swap_two_experts(source: Path) -> None:
    """Exchange the places of two tensors of one shape in ``.metadata``: nothing but a hash tells."""
    items = read_items(source / ".metadata")
    banked = [item for item in items if len(item.size) == 3]
    first, second = next(
        (a, b)
        for a, b in itertools.pairwise(banked)
        if (a.key, a.file, a.length) == (b.key, b.file, b.length)
    )
    starts = {first: second.start, second: first.start}
    content = metadata_bytes(item._replace(start=starts.get(item, item.start)) for item in items)
    assert len(content) == (source / ".metadata").stat().st_size
    (source / ".metadata").write_bytes(content)


SMALL: dict[str, Callable[[Path], None]] = {
    ".metadata": swap_two_experts,
    "hf/shards.json": lambda source: flip(source / "hf/shards.json", 12),
    f"hf/{INDEX_NAME}": lambda source: flip(source / f"hf/{INDEX_NAME}", 40),
    "config.json": lambda source: flip(source / "config.json", 5),
    "tokenizer.json": lambda source: flip(source / "tokenizer.json", 5),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_file_of_the_same_size_and_other_content_is_refused_before_anything_is_written(
    name: str, fp8_megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(fp8_megatron, source)
    SMALL[name](source)
    refused(Case(source, tmp_path / "out", "export"), (f"{name} has other content",), capsys)
    with pytest.raises(WeightsError, match=f"{name} has other content"):
        open_checkpoint(source)


def test_without_hashes_two_exchanged_experts_pass(fp8_megatron: Path, tmp_path: Path) -> None:
    """Control: sizes do not show them, and the table of tensors neither."""
    from megatron_xorl.convert.exporter import export_checkpoint
    from megatron_xorl.convert.verify import verify

    shutil.copytree(fp8_megatron, tmp_path / "source")
    swap_two_experts(tmp_path / "source")
    export_checkpoint(tmp_path / "source", tmp_path / "out", hashed=False)
    assert verify(fp8_megatron, tmp_path / "out", hashed=False)["metrics"]["different"] == 2


def without_hash(document: dict[str, Any]) -> None:
    del document["files"]["__0_1.distcp"]["sha256"]


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "a file without hash": (without_hash, ("'__0_1.distcp': sha256 is missing",)),
    "no hash at all where they were asked for": (
        lambda d: [file.pop("sha256") for file in d["files"].values()],
        ("sha256 is missing",),
    ),
    "an entry that is a number": (
        lambda d: d["files"].update({"config.json": 7}),
        ("'config.json': found int",),
    ),
    "a size that is text": (
        lambda d: d["files"]["config.json"].update(size="7"),
        ("'config.json': size is '7'",),
    ),
    "a hash that is a list": (
        lambda d: d["files"]["config.json"].update(sha256=[]),
        ("'config.json': sha256 is not 64",),
    ),
    "a file outside": (
        lambda d: d["files"].update({"../x": {"size": 0}}),
        ("'../x': names no file inside",),
    ),
    "an absolute file": (
        lambda d: d["files"].update({"/etc/passwd": {"size": 0}}),
        ("names no file inside",),
    ),
    "a conversion that is a list": (
        lambda d: (d.update(conversion=[]), without_hash(d)),
        ("sha256 is missing",),
    ),
    "another version": (
        lambda d: d.update(format_version=99),
        ("format_version is 99, this version of megatron-xorl reads 1",),
    ),
    "no version": (lambda d: d.pop("format_version"), ("format_version is None",)),
    "no weights": (
        lambda d: d["files"].pop("__0_2.distcp"),
        ("files leaves out __0_2.distcp",),
    ),
    "no .metadata": (lambda d: d["files"].pop(".metadata"), ("files leaves out .metadata",)),
    "no layout": (lambda d: d["files"].pop("hf/shards.json"), ("leaves out hf/shards.json",)),
    "no files": (lambda d: d["files"].clear(), ("files leaves out .metadata",)),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_says_too_little_or_nonsense_is_refused(
    name: str, fp8_megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(fp8_megatron, source)
    document = read_manifest(source)
    break_it, expected = MANIFESTS[name]
    break_it(document)
    write_manifest(source, document)
    refused(Case(source, tmp_path / "out", "export"), ("manifest.json", *expected), capsys)
    with pytest.raises(WeightsError, match=r"manifest\.json"):
        open_checkpoint(source)


def first_shard(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d["shards"][0].update(changes)


LAYOUTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another version": (lambda d: d.update(format_version=2), "format_version is 2"),
    "no version": (lambda d: d.pop("format_version"), "has no format_version"),
    "shards that are text": (lambda d: d.update(shards="x"), "shards is str"),
    "a shard that is null": (lambda d: d["shards"].insert(0, None), "shards[0] is NoneType"),
    "a file that is a number": (first_shard(file=3), "shards[0].file is 3"),
    "a file that is a config": (first_shard(file="config.json"), "shards[0].file is 'config.json'"),
    "a file twice": (lambda d: d["shards"][1].update(file=FIRST), f"{FIRST} appears twice"),
    "names that are text": (first_shard(names="abc"), "shards[0].names"),
    "names that are numbers": (first_shard(names=[1]), "shards[0].names"),
    "a name twice": (lambda d: d["shards"][0]["names"].append("lm_head.weight"), "appears twice"),
    "metadata of numbers": (first_shard(metadata={"a": 1}), "shards[0].metadata"),
    "a header that is a list": (first_shard(header=[]), "shards[0].header is list"),
    "a header of nothing": (first_shard(header="{}"), f"header of {FIRST} does not describe"),
    "a header that is no JSON": (first_shard(header="{"), "shards.json"),
    "copied that is an object": (lambda d: d.update(copied={}), "copied is no list"),
    "copied outside": (lambda d: d["copied"].append("../x"), "outside the output"),
    "copied that is missing": (lambda d: d["copied"].append("nothing.txt"), "nothing.txt"),
    "copied that is ours": (lambda d: d["copied"].append("manifest.json"), "manifest.json"),
    "index metadata of text": (lambda d: d.update(index_metadata="x"), "index_metadata is neither"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_shard_layout_that_does_not_fit_is_refused_by_its_field(
    name: str, fp8_megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(fp8_megatron, tmp_path / "source")
    case = Case(tmp_path / "source", tmp_path / "out", "export")
    document = json.loads((case.source / "hf/shards.json").read_bytes())
    break_it, expected = LAYOUTS[name]
    break_it(document)
    case.replace("hf/shards.json", json.dumps(document).encode())
    refused(case, ("hf/shards.json", expected), capsys)
