"""Wrong inputs of import and export: one clear line, exit 2, the source untouched, and no output that could be taken for whole.

Every case starts from a checkpoint that converts; that is the control.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_xorl.cli import main
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.dcp_metadata import check_pickle, metadata_bytes, read_items
from megatron_xorl.weights.manifest import read_manifest, write_manifest
from megatron_xorl.weights.opening import open_checkpoint
from megatron_xorl.weights.writer import INDEX_NAME

WEIGHT = "model.layers.1.self_attn.q_a_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"
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


def swap_out(case: Case, out: Path) -> None:
    case.out = out


def first_expert_offset(header: dict[str, Any]) -> None:
    entry = next(v for k, v in header.items() if k != "__metadata__" and v["data_offsets"][0] > 0)
    entry["data_offsets"] = [edge - 1 for edge in entry["data_offsets"]]


class Payload:
    """Would run a command when unpickled."""

    def __reduce__(self):
        return os.system, ("true",)


IMPORTS: dict[str, tuple[Callable[[Case], Any], tuple[str, ...]]] = {
    "missing shard": (lambda c: c.shard(WEIGHT).unlink(), ("is missing", "fetch it")),
    "truncated shard": (lambda c: os.truncate(c.source / SECOND, 5000), (SECOND, "truncated")),
    "zero-byte shard": (lambda c: os.truncate(c.source / SECOND, 0), (SECOND, "has 0 bytes")),
    "shard cut in its data": (
        lambda c: os.truncate(c.source / SECOND, (c.source / SECOND).stat().st_size - 1),
        (SECOND, "truncated"),
    ),
    "bytes behind the last tensor": (
        lambda c: (c.source / SECOND).open("ab").write(b"x"),
        (SECOND, "1 bytes follow"),
    ),
    "header longer than the file": (
        lambda c: (c.source / FIRST).open("r+b").write((2**40).to_bytes(8, "little")),
        (FIRST, "header claims"),
    ),
    "header that is no JSON": (
        lambda c: flip(c.source / FIRST, 8),
        (FIRST, "header is damaged"),
    ),
    "tensors that overlap": (lambda c: c.header(first_expert_offset), (FIRST, "overlaps")),
    "a scale in UE8M0": (
        lambda c: c.header(
            lambda h: h.update(
                {SCALE: h.get(SCALE, {"shape": [1], "data_offsets": [0, 1]}) | {"dtype": "F8_E8M0"}}
            )
        ),
        (SCALE, "F8_E8M0"),
    ),
    "UE8M0 in the config": (
        lambda c: c.config(lambda raw: raw["quantization_config"].update(scale_fmt="ue8m0")),
        ("scale_fmt", "ue8m0"),
    ),
    "duplicated tensor": (
        lambda c: c.tensor("lm_head.weight", torch.zeros(320, 128).bfloat16(), FIRST),
        ("lm_head.weight", "two shards"),
    ),
    "extra shard": (
        lambda c: shutil.copy(c.source / FIRST, c.source / "model-00005-of-00004.safetensors"),
        ("index does not name", "model-00005"),
    ),
    "index names an absent tensor": (
        lambda c: c.map(**{"model.layers.0.ghost.weight": FIRST}),
        ("model.layers.0.ghost.weight",),
    ),
    "index names an absent file": (
        lambda c: c.map(**{WEIGHT: "model-9.safetensors"}),
        ("model-9.safetensors", "missing"),
    ),
    "path traversal": (
        lambda c: c.map(**{WEIGHT: f"../{FIRST}"}),
        ("outside the checkpoint",),
    ),
    "absolute path": (lambda c: c.map(**{WEIGHT: f"/{FIRST}"}), ("outside the checkpoint",)),
    "index to a pickle": (lambda c: c.map(**{WEIGHT: "model.bin"}), ("pickled weights run code",)),
    "index that is no JSON": (
        lambda c: (c.source / INDEX_NAME).write_text("{"),
        ("no", "safetensors index"),
    ),
    "pickled weights beside": (
        lambda c: (c.source / "pytorch_model.bin").write_bytes(b"x"),
        ("pytorch_model.bin is pickled",),
    ),
    "a .pt file beside": (
        lambda c: (c.source / "consolidated.00.pth").write_bytes(b"x"),
        ("consolidated.00.pth is pickled",),
    ),
    "FP8 without scale": (lambda c: c.tensor(SCALE, None), (WEIGHT, "FP8 without")),
    "scale without weight": (lambda c: c.tensor(WEIGHT, None), (WEIGHT,)),
    "grid of another block": (lambda c: c.tensor(SCALE, torch.ones(4, 5)), ("[4, 5]", "[4, 4]")),
    "NaN scale": (
        lambda c: c.tensor(SCALE, torch.full((4, 4), torch.nan)),
        (SCALE, "16 of 16 scales"),
    ),
    "bf16 scale": (lambda c: c.tensor(SCALE, torch.ones(4, 4).bfloat16()), (SCALE, "BF16")),
    "another shape": (
        lambda c: c.tensor("model.norm.weight", torch.ones(64).bfloat16()),
        ("model.norm.weight", "[64]", "[128]"),
    ),
    "no quantization_config": (
        lambda c: c.config(lambda raw: raw.pop("quantization_config")),
        ("no quantization_config",),
    ),
    "no config": (lambda c: (c.source / "config.json").unlink(), ("config.json",)),
    "one more layer in the config": (
        lambda c: c.config(lambda raw: raw.update(num_nextn_predict_layers=0)),
        ("model.layers.4", "no tensor of this config"),
    ),
    "no such directory": (
        lambda c: shutil.rmtree(c.source),
        ("is not a directory",),
    ),
    "output is the source": (lambda c: swap_out(c, c.source), ("lie in each other",)),
    "output in the source": (lambda c: swap_out(c, c.source / "out"), ("lie in each other",)),
    "output is a file": (lambda c: c.out.write_text("x"), ("is a file",)),
    "output in a file": (lambda c: swap_out(c, Path("/dev/null/out")), ("is a file",)),
    "output is not empty": (
        lambda c: (c.out.mkdir(), (c.out / "notes").write_text("x")),
        ("is not empty", "notes"),
    ),
    "unknown dtype": (
        lambda c: setattr(c, "flags", ("--dtype", "fp16")),
        ("fp16", "keep, bf16, fp32"),
    ),
    "quantising FP8": (lambda c: setattr(c, "flags", ("--quantize",)), ("is FP8 already",)),
    "two wishes": (
        lambda c: setattr(c, "flags", ("--quantize", "--dtype", "bf16")),
        ("cannot be combined",),
    ),
    "export of a Hugging Face directory": (
        lambda c: setattr(c, "verb", "export"),
        ("is no Megatron checkpoint",),
    ),
}

EXPORTS: dict[str, tuple[Callable[[Case], Any], tuple[str, ...]]] = {
    "no manifest": (
        lambda c: (c.source / "manifest.json").unlink(),
        ("has no manifest.json", "import it again"),
    ),
    "unfinished import": (
        lambda c: (
            (c.source / "manifest.json").unlink(),
            (c.source / "progress.jsonl").write_text("{}\n"),
        ),
        ("unfinished conversion",),
    ),
    "damaged manifest": (
        lambda c: flip(c.source / "manifest.json", 100),
        ("manifest.json",),
    ),
    "missing file": (lambda c: (c.source / "__0_1.distcp").unlink(), ("__0_1.distcp is missing",)),
    "truncated file": (
        lambda c: os.truncate(c.source / "__0_1.distcp", 5000),
        ("__0_1.distcp has 5000 bytes",),
    ),
    "zero-byte file": (
        lambda c: os.truncate(c.source / "__0_1.distcp", 0),
        ("__0_1.distcp has 0 bytes",),
    ),
    "missing tokenizer": (
        lambda c: (c.source / "tokenizer.json").unlink(),
        ("tokenizer.json is missing",),
    ),
    "code in .metadata": (
        lambda c: c.metadata(pickle.dumps(Payload())),
        (".metadata", "posix.system", "do not trust"),
    ),
    "damaged .metadata": (lambda c: c.metadata(b"\x80\x04abc"), (".metadata is damaged",)),
    "file outside in .metadata": (
        lambda c: c.metadata(
            metadata_bytes([item._replace(file=f"../{item.file}") for item in c.items()])
        ),
        ("outside the checkpoint",),
    ),
    "a tensor less in .metadata": (
        lambda c: c.metadata(metadata_bytes([i for i in c.items() if "final" not in i.key])),
        ("do not name the same tensors", "model.norm.weight"),
    ),
    "a tensor more in .metadata": (
        lambda c: c.metadata(
            metadata_bytes([*c.items(), c.items()[0]._replace(key="decoder.ghost")])
        ),
        ("decoder.ghost",),
    ),
    "a range behind the end": (
        lambda c: c.metadata(
            metadata_bytes([i._replace(start=i.start + 10**9) for i in c.items()])
        ),
        ("truncated",),
    ),
    "traversal in the shard layout": (
        lambda c: c.replace(
            "hf/shards.json",
            (c.source / "hf/shards.json").read_bytes().replace(b'"model-', b'"../model-'),
        ),
        ("outside the output",),
    ),
    "damaged shard layout": (lambda c: c.replace("hf/shards.json", b"[]"), ("shards.json",)),
    "import of a Megatron checkpoint": (
        lambda c: setattr(c, "verb", "import"),
        ("is a Megatron checkpoint already",),
    ),
}


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


@pytest.mark.parametrize("name", IMPORTS)
def test_a_wrong_source_of_an_import_is_one_line_and_nothing_is_begun(
    name: str, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_dir, tmp_path / "source")
    case = Case(tmp_path / "source", tmp_path / "out", "import")
    break_it, expected = IMPORTS[name]
    break_it(case)
    refused(case, expected, capsys)


@pytest.mark.parametrize("name", EXPORTS)
def test_a_wrong_source_of_an_export_is_one_line_and_nothing_is_begun(
    name: str, fp8_megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(fp8_megatron, tmp_path / "source")
    case = Case(tmp_path / "source", tmp_path / "out", "export")
    break_it, expected = EXPORTS[name]
    break_it(case)
    refused(case, expected, capsys)


def test_the_checkpoints_that_they_all_start_from_convert(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(tiny_dir, tmp_path / "megatron", "import")
    code, out, err = convert(case, capsys)
    assert (code, err) == (0, "")
    assert "328 tensors" in out
    code, _, err = convert(Case(case.out, tmp_path / "back", "export"), capsys)
    assert (code, err) == (0, "")


def test_a_changed_byte_is_found_by_its_hash_and_the_output_stays_unfinished(
    fp8_megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(fp8_megatron, tmp_path / "source")
    flip(tmp_path / "source/__0_2.distcp", 100_000)
    case = Case(tmp_path / "source", tmp_path / "out", "export")
    code, _, err = convert(case, capsys)
    assert code == 2
    assert err.count("\n") == 1
    assert "__0_2.distcp has other content than its manifest says" in err
    assert "is incomplete (2 of 4 files)" in err
    with pytest.raises(WeightsError, match="unfinished conversion"):
        open_checkpoint(case.out)
    # Control: without hashes the byte passes, and goes into the export.
    case = Case(tmp_path / "source", tmp_path / "unhashed", "export", ("--no-hash",))
    assert convert(case, capsys)[0] == 0
    with pytest.raises(WeightsError, match=r"__0_2\.distcp has other content"):
        open_checkpoint(tmp_path / "source", hashes=True)


def test_a_wrong_total_in_the_index_is_said_and_corrected(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_xorl.convert.exporter import export_checkpoint
    from megatron_xorl.convert.importer import import_checkpoint

    shutil.copytree(tiny_dir, tmp_path / "source")
    path = tmp_path / "source" / INDEX_NAME
    index = json.loads(path.read_text())
    true = index["metadata"]["total_size"]
    index["metadata"]["total_size"] = true + 1
    path.write_text(json.dumps(index))
    import_checkpoint(tmp_path / "source", tmp_path / "megatron")
    assert "the true value is written" in caplog.text
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    found = json.loads((tmp_path / "back" / INDEX_NAME).read_text())
    assert found["metadata"]["total_size"] == true
    assert found["weight_map"] == index["weight_map"]


def swap_two_experts(source: Path) -> None:
    """Exchange the places of two tensors of one shape in ``.metadata``: nothing but a hash tells."""
    metadata = check_pickle(source / ".metadata")
    banked = [item for item in read_items(source / ".metadata") if len(item.size) == 3]
    first, second = next(
        (a, b)
        for a, b in itertools.pairwise(banked)
        if (a.key, a.file, a.length) == (b.key, b.file, b.length)
    )
    places = metadata.storage_data
    for item, other in ((first, second), (second, first)):
        index = MetadataIndex(item.key, item.offset)
        places[index] = dataclasses.replace(places[index], offset=other.start)
    content = pickle.dumps(metadata)
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


@pytest.mark.parametrize("name", ["hf", "hf/x", "a.partial", "PYTORCH.BIN", "old/model.Pth"])
def test_a_name_of_the_output_or_a_pickle_anywhere_in_the_source_is_refused(
    name: str, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_dir, tmp_path / "source")
    (tmp_path / "source" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "source" / name).write_text("x")
    said = "is pickled" if "." in name and "partial" not in name else "of its own"
    refused(Case(tmp_path / "source", tmp_path / "out", "import"), (said,), capsys)


def test_what_is_not_carried_over_is_named_in_one_warning(tiny_dir, tmp_path, caplog) -> None:
    from megatron_xorl.convert.importer import import_checkpoint

    source = tmp_path / "source"
    shutil.copytree(tiny_dir, source)
    (source / "figures").mkdir()
    (source / ".gitattributes").write_text("x")
    (source / "LICENSE").symlink_to("nowhere")
    import_checkpoint(source, tmp_path / "out")
    warnings = [record.getMessage() for record in caplog.records if "left out" in record.msg]
    assert len(warnings) == 1
    assert warnings[0].endswith("are: .gitattributes, LICENSE, figures")
