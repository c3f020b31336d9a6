"""Wrong inputs of import and export: one clear line, exit 2, the source untouched, and no output that could be taken for whole.

Every case starts from a checkpoint that converts; that is the control.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.archive import plain_archive
from megatron_xorl.weights.dcp_metadata import metadata_bytes
from megatron_xorl.weights.opening import open_checkpoint
from megatron_xorl.weights.writer import INDEX_NAME
from tests.convert.broken import FIRST, SECOND, Case, convert, flip, refused

WEIGHT = "model.layers.1.self_attn.q_a_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


def swap_out(case: Case, out: Path) -> None:
    case.out = out


def first_expert_offset(header: dict[str, Any]) -> None:
    entry = next(v for k, v in header.items() if k != "__metadata__" and v["data_offsets"][0] > 0)
    entry["data_offsets"] = [edge - 1 for edge in entry["data_offsets"]]


def exchange(one: Path, other: Path) -> None:
    one.rename(one.with_suffix(".x"))
    other.rename(one)
    one.with_suffix(".x").rename(other)


class Payload:
    """Would run a command when unpickled."""

    def __reduce__(self):
        return os.system, ("true",)


def saved(value: object) -> bytes:
    """What torch.save writes."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


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
    "many pickles": (
        lambda c: [(c.source / f"x{n}.bin").write_bytes(b"x") for n in range(7)],
        ("holds pickled files: x0.bin, x1.bin, x2.bin, x3.bin, x4.bin and 2 more;",),
    ),
    "exchanged shards": (
        lambda c: exchange(c.source / FIRST, c.source / SECOND),
        (
            ": 2 problems:",
            f"more into {FIRST}, which does not hold them: {SECOND} does; the shards were exchanged",
        ),
    ),
    "a pipe for a shard": (
        lambda c: ((c.source / SECOND).unlink(), os.mkfifo(c.source / SECOND)),
        (f"{SECOND} is a pipe, expected a file",),
    ),
    "a device for a shard": (
        lambda c: (
            (c.source / SECOND).unlink(),
            (c.source / SECOND).symlink_to("/dev/zero"),
        ),
        (f"{SECOND} is a device, expected a file",),
    ),
    "a folder for a shard": (
        lambda c: ((c.source / SECOND).unlink(), (c.source / SECOND).mkdir()),
        (f"{SECOND} is a folder, expected a file",),
    ),
    "a link to nothing for a shard": (
        lambda c: ((c.source / SECOND).unlink(), (c.source / SECOND).symlink_to("nowhere")),
        (f"{SECOND} is a link to nothing",),
    ),
    "a folder for the index": (
        lambda c: ((c.source / INDEX_NAME).unlink(), (c.source / INDEX_NAME).mkdir()),
        (f"{INDEX_NAME} is a folder, expected a file",),
    ),
    "negative offsets": (
        lambda c: c.header(
            lambda h: next(v for k, v in h.items() if k != "__metadata__").update(
                data_offsets=[-8, 0]
            )
        ),
        (FIRST, "has data_offsets [-8, 0], expected 0 <= begin <= end"),
    ),
    "a name twice in the index": (
        lambda c: (c.source / INDEX_NAME).write_text(
            (c.source / INDEX_NAME)
            .read_text()
            .replace('"weight_map": {', f'"weight_map": {{"{WEIGHT}": "{FIRST}",')
        ),
        (f"key '{WEIGHT}' appears twice",),
    ),
    "a Megatron document beside": (
        lambda c: (c.source / "metadata.json").write_text("{}"),
        ("files of two forms", INDEX_NAME, "metadata.json", "take the files"),
    ),
    "a Megatron file beside": (
        lambda c: (c.source / "__0_0.distcp").write_bytes(b"x"),
        ("files of two forms", INDEX_NAME, "__0_0.distcp"),
    ),
    "index that is no JSON": (
        lambda c: (c.source / INDEX_NAME).write_text("{"),
        ("no", "safetensors index"),
    ),
    "pickled weights beside": (
        lambda c: (c.source / "pytorch_model.bin").write_bytes(b"x"),
        ("source holds pickled files: pytorch_model.bin;",),
    ),
    "a .pt file beside": (
        lambda c: (c.source / "consolidated.00.pth").write_bytes(b"x"),
        ("source holds pickled files: consolidated.00.pth;",),
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
    "a Hugging Face shard beside": (
        lambda c: (c.source / FIRST).write_bytes(b"x"),
        ("files of two forms", FIRST, ".metadata"),
    ),
    "a pipe for a file": (
        lambda c: ((c.source / "__0_1.distcp").unlink(), os.mkfifo(c.source / "__0_1.distcp")),
        ("__0_1.distcp is a pipe, expected a file",),
    ),
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
    "code in common.pt": (
        lambda c: c.replace("common.pt", saved(Payload())),
        ("common.pt", "posix.system", "do not trust"),
    ),
    "tensors in common.pt": (
        lambda c: c.replace("common.pt", saved(torch.zeros(2))),
        ("common.pt: it names torch._utils",),
    ),
    "a damaged common.pt": (
        lambda c: c.replace("common.pt", plain_archive({})[:100]),
        ("common.pt is damaged",),
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


@pytest.mark.parametrize("name", ["hf", "hf/x", "a.partial", "PYTORCH.BIN", "old/model.Pth"])
def test_a_name_of_the_output_or_a_pickle_anywhere_in_the_source_is_refused(
    name: str, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_dir, tmp_path / "source")
    (tmp_path / "source" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "source" / name).write_text("x")
    said = (
        f"holds pickled files: {name};" if "." in name and "partial" not in name else "of its own"
    )
    refused(Case(tmp_path / "source", tmp_path / "out", "import"), (said,), capsys)


def test_what_is_not_carried_over_is_named_in_one_warning(tiny_dir, tmp_path, caplog) -> None:
    from megatron_xorl.convert.importer import import_checkpoint

    source = tmp_path / "source"
    shutil.copytree(tiny_dir, source)
    (source / "figures").mkdir()
    (source / ".gitattributes").write_text("x")
    (source / "LICENSE").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    import_checkpoint(source, tmp_path / "out")
    warnings = [record.getMessage() for record in caplog.records if "left out" in record.msg]
    assert len(warnings) == 1
    assert warnings[0].endswith("are: .gitattributes, LICENSE, figures, pipe")
