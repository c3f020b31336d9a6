"""``verify``: equal means every byte, or every value; what differs is named, all of it at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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
            assert report["metrics"]["max_abs"] == 0


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
    with pytest.raises(WeightsError, match="its container is damaged"):
        verify(fp8_megatron, other, hashed=False)
