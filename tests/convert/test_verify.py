"""``verify``: equal means every byte, or every value; what differs is named, all of it at once."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_xorl.cli import main
from megatron_xorl.convert.exporter import export_checkpoint
from megatron_xorl.convert.importer import import_checkpoint
from megatron_xorl.convert.plan import Options
from megatron_xorl.convert.tiny import make_tiny
from megatron_xorl.convert.verify import verify
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint

NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def changed(tiny_dir: Path, tmp_path: Path):
    """Copy the FP8 checkpoint with one tensor changed by a function, or taken out where it returns None."""

    def make(change, name: str = NAME) -> Path:
        out = tmp_path / "changed"
        shutil.copytree(tiny_dir, out)
        path = out / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        shard = out / index["weight_map"][name]
        tensors = load_file(shard)
        value = change(tensors.pop(name))
        if value is None:
            del index["weight_map"][name]
            path.write_text(json.dumps(index))
        else:
            tensors[name] = value
        save_file(tensors, shard, metadata={"format": "pt"})
        return out

    return make


def test_the_forms_of_one_checkpoint_are_equal_in_any_mix(tiny_dir, fp8_megatron, tmp_path) -> None:
    resharded = make_tiny(tmp_path / "resharded", shard_bytes=200_000)
    for a, b in ((tiny_dir, fp8_megatron), (fp8_megatron, resharded), (resharded, tiny_dir)):
        for values in (False, True):
            report = verify(a, b, values=values)
            assert report["equal"], report
            assert report["metrics"]["compared"] == (186 if values else 328)
            assert report["metrics"].get("max_abs") == (0 if values else None)


def test_one_bit_is_found_with_its_place_and_both_values(changed, tiny_dir) -> None:
    def flip(value: torch.Tensor) -> torch.Tensor:
        codes = value.view(torch.uint8).clone()
        codes[17, 5] ^= 1
        return codes.view(torch.float8_e4m3fn)

    original = load_one(tiny_dir, NAME)
    other = changed(flip)
    report = verify(tiny_dir, other)
    assert not report["equal"]
    (found,) = report["differences"]
    assert (found["tensor"], found["index"], found["count"]) == (NAME, [17, 5], 1)
    assert found["a"] == float(original[17, 5].float())
    assert found["b"] != found["a"]
    assert "max_abs" not in report["metrics"]  # a code is no value without its scale
    in_value = verify(tiny_dir, other, values=True)
    assert [item["index"] for item in in_value["differences"]] == [[17, 5]]
    assert in_value["metrics"]["max_abs"] == abs(
        in_value["differences"][0]["a"] - in_value["differences"][0]["b"]
    )


def load_one(directory: Path, name: str) -> torch.Tensor:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return load_file(directory / index["weight_map"][name])[name]


def test_a_changed_scale_is_a_difference_in_bytes_and_in_values(changed, tiny_dir) -> None:
    other = changed(lambda scale: scale * 2, f"{NAME}_scale_inv")
    assert [d["tensor"] for d in verify(tiny_dir, other)["differences"]] == [f"{NAME}_scale_inv"]
    assert [d["tensor"] for d in verify(tiny_dir, other, values=True)["differences"]] == [NAME]


def test_missing_and_extra_tensors_are_both_listed(changed, tiny_dir) -> None:
    other = changed(lambda _: None)
    report = verify(tiny_dir, other)
    assert (report["missing"], report["extra"]) == ([NAME], [])
    report = verify(other, tiny_dir)
    assert (report["missing"], report["extra"]) == ([], [NAME])
    assert not report["equal"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_other_dtypes_are_equal_in_value_and_not_in_bytes(dtype, tiny_dir, fp8_megatron, tmp_path):
    export_checkpoint(fp8_megatron, tmp_path / dtype, Options(dtype))
    for pair in ((tiny_dir, tmp_path / dtype), (tmp_path / dtype, fp8_megatron)):
        assert verify(*pair, values=True)["equal"]
        report = verify(*pair)
        assert not report["equal"]
        assert report["metrics"]["different"] >= 142
        assert "weight_block_size" in report["config"]


def test_quantising_is_a_difference_in_value_of_the_size_that_e4m3_has(bf16_dir, tmp_path) -> None:
    import_checkpoint(bf16_dir, tmp_path / "fp8", Options(quantize=True))
    report = verify(bf16_dir, tmp_path / "fp8", values=True)
    assert not report["equal"]
    assert report["metrics"]["different"] == 142
    assert 0 < report["metrics"]["max_abs"] < 0.1


def test_another_config_alone_is_a_difference(tiny_dir, tmp_path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_dir, other)
    raw = json.loads((other / "config.json").read_text())
    raw["routed_scaling_factor"] = 1.5
    (other / "config.json").write_text(json.dumps(raw))
    report = verify(tiny_dir, other)
    assert not report["equal"]
    assert report["config"] == {"routed_scaling_factor": [2.5, 1.5]}
    assert report["metrics"]["different"] == 0


def test_a_file_that_is_not_what_its_manifest_says_is_an_error(fp8_megatron, tmp_path) -> None:
    other = tmp_path / "other"
    shutil.copytree(fp8_megatron, other)
    entry = MegatronCheckpoint(other).entry(NAME)
    with open(other / "__0_1.distcp", "r+b") as file:
        file.seek(entry.start)
        file.write(b"\x00\x01\x02")
    with pytest.raises(WeightsError, match=r"__0_1\.distcp has other content"):
        verify(fp8_megatron, other)
    assert [d["tensor"] for d in verify(fp8_megatron, other, hashed=False)["differences"]] == [NAME]
    with open(other / "__0_1.distcp", "r+b") as file:  # behind the values, where torch.load looks
        file.seek(entry.stop + 100)
        file.write(b"\x00" * 300)
    report = verify(fp8_megatron, other, hashed=False)
    (line,) = report["problems"]
    assert line.startswith("B: ")
    assert "its container is damaged" in line
    assert report["metrics"]["missing"] == len(
        MegatronCheckpoint(fp8_megatron).header("__0_1.distcp")
    )
    assert not report["equal"]


NORM = "model.norm.weight"


def strict(text: str) -> dict:
    """JSON as the standard has it: Python's parser takes Infinity and NaN unless told not to."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize(
    ("value", "shown", "apart"),
    [(math.inf, "inf", "inf"), (-math.inf, "-inf", "inf"), (math.nan, "nan", "inf")],
)
@pytest.mark.parametrize("mode", [(), ("--values",)], ids=["bytes", "values"])
def test_the_json_of_values_that_json_lacks_is_json(
    value, shown, apart, mode, changed, tiny_dir, capsys
) -> None:
    def put(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.clone()
        weight[3] = value
        return weight

    other = changed(put, NORM)
    with pytest.raises(SystemExit) as end:
        main(["verify", str(tiny_dir), str(other), "--json", *mode])
    report = strict(capsys.readouterr().out)
    assert end.value.code == 1
    (found,) = report["differences"]
    assert (found["index"], found["a"], found["b"], found["count"]) == (
        [3],
        float(load_one(tiny_dir, NORM)[3]),
        shown,
        1,
    )
    assert report["metrics"].get("max_abs") == (apart if mode else None)
    assert verify(other, other, values=bool(mode))["equal"]  # an inf is equal to itself, and a NaN


def test_equal_infinities_do_not_count_in_max_abs(changed, tiny_dir, tmp_path) -> None:
    """inf - inf is NaN, which must not pass for the largest difference of a tensor that also differs by 1."""

    def start(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.clone()
        weight[0], weight[1] = math.inf, 2.0
        return weight

    other = changed(start, NORM)
    shutil.copytree(other, tmp_path / "third")
    edit(tmp_path / "third", NORM, lambda weight: weight[1].fill_(3.0))
    assert verify(other, tmp_path / "third", values=True)["metrics"]["max_abs"] == 1.0


def shard_of(directory: Path, name: str) -> str:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return index["weight_map"][name]


def edit(directory: Path, name: str, change) -> None:
    shard = directory / shard_of(directory, name)
    tensors = load_file(shard)
    change(tensors[name])
    save_file(tensors, shard, metadata={"format": "pt"})


@pytest.mark.parametrize("values", [False, True])
def test_one_report_has_every_fault_of_both_sides(values, changed, tiny_dir, tmp_path) -> None:
    """A changed value, a tensor the index does not name, one the shard lacks, a lost shard and a stray one, all at once."""
    a = tmp_path / "a"
    shutil.copytree(tiny_dir, a)
    (a / "model-stray.safetensors").write_bytes((a / shard_of(a, NORM)).read_bytes())
    b = changed(lambda scale: scale * 2, f"{NAME}_scale_inv")
    path = b / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = [name for name, file in index["weight_map"].items() if file == shard_of(b, NAME)]
    unnamed, absent = [n for n in names if n.endswith(".weight") and n != NAME][:2]
    del index["weight_map"][unnamed]
    lost = next(
        file for file in sorted(set(index["weight_map"].values())) if file != shard_of(b, NAME)
    )
    (b / lost).unlink()
    path.write_text(json.dumps(index))
    tensors = load_file(b / shard_of(b, NAME))
    del tensors[absent]
    save_file(tensors, b / shard_of(b, NAME), metadata={"format": "pt"})
    report = verify(a, b, values=values)
    gone = {unnamed, absent} | {name for name, file in index["weight_map"].items() if file == lost}
    counted = [name for name in gone if not (values and name.endswith("_scale_inv"))]
    assert report["metrics"]["missing"] == len(counted)
    assert set(report["missing"]) <= set(counted)
    assert report["extra"] == []
    expected = NAME if values else f"{NAME}_scale_inv"
    assert expected in [item["tensor"] for item in report["differences"]]
    assert not report["equal"]
    assert report["metrics"]["problems"] == len(report["problems"]) == 4
    for side, *words in (
        ("A", "model-stray.safetensors"),
        ("B", lost, "is missing"),
        ("B", shard_of(b, NAME), f"holds {unnamed}, which the index does not name"),
        ("B", shard_of(b, NAME), f"puts {absent} into", "does not hold it"),
    ):
        found = [line for line in report["problems"] if all(word in line for word in words)]
        assert len(found) == 1, (words, report["problems"])
        assert found[0].startswith(f"{side}: ")


def test_a_stray_shard_alone_makes_two_checkpoints_differ(tiny_dir, fp8_megatron, tmp_path) -> None:
    for source, name in ((tiny_dir, "left-over.safetensors"), (fp8_megatron, "__9_9.distcp")):
        other = tmp_path / name
        shutil.copytree(source, other)
        assert verify(source, other)["equal"]
        (other / name).write_bytes(b"")
        report = verify(source, other)
        assert not report["equal"]
        assert report["problems"] == [f"B: {name} is a shard that the index does not name"]


def test_a_weight_whose_scale_is_gone_does_not_end_a_comparison_in_value(changed, tiny_dir) -> None:
    other = changed(lambda _: None, f"{NAME}_scale_inv")
    edit(other, NORM, lambda weight: weight[1].fill_(9.0))
    report = verify(tiny_dir, other, values=True)
    assert {item["tensor"] for item in report["differences"]} == {NAME, NORM}
    (unknown,) = (item for item in report["differences"] if item["tensor"] == NAME)
    assert "its scale or weight_block_size is missing" in unknown["what"]


def test_what_is_wrong_with_both_sides_is_one_error(tmp_path) -> None:
    with pytest.raises(
        WeightsError, match=r"(?s)first is not a directory.*second is not a directory"
    ):
        verify(tmp_path / "first", tmp_path / "second")


def test_short_reads_of_either_file_change_nothing(changed, tiny_dir, monkeypatch) -> None:
    """A file system may return fewer bytes than asked for, and other numbers of them for each file."""
    other = changed(lambda scale: scale * 2, f"{NAME}_scale_inv")
    whole = verify(tiny_dir, other)
    real, calls = os.preadv, []

    def short(handle: int, buffers: list, at: int) -> int:
        calls.append(at)
        (view,) = buffers
        return real(handle, [memoryview(view)[: 1 + (997 * len(calls)) % 5000]], at)

    monkeypatch.setattr(os, "preadv", short)
    assert verify(tiny_dir, other) == whole
    assert len(calls) > 2 * whole["metrics"]["compared"]


def test_a_file_that_ends_while_it_is_read_is_named(changed, tiny_dir, monkeypatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, at: 0)
    with pytest.raises(WeightsError, match=r"model-0000\d-of-\d+\.safetensors ends at byte \d+"):
        verify(tiny_dir, tiny_dir)
