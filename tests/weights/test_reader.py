"""Reading and checking a checkpoint: the values against safetensors itself, every damage named, an intact one accepted."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.convert.tiny import make_tiny
from megatron_xorl.errors import ConfigError, WeightsError
from megatron_xorl.weights.reader import HfCheckpoint, refuse_nonfinite
from megatron_xorl.weights.writer import INDEX_NAME, plan_shards, write_checkpoint

KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    """A private copy of the tiny checkpoint to damage."""
    return shutil.copytree(tiny_dir, tmp_path / "copy")


def complaint(directory: Path) -> str:
    """What validate says of a directory."""
    with pytest.raises(WeightsError) as caught:
        HfCheckpoint(directory).validate(load_glm_config(directory))
    return str(caught.value)


def shard_of(directory: Path, name: str) -> Path:
    return directory / json.loads((directory / INDEX_NAME).read_text())["weight_map"][name]


def rewrite(
    directory: Path,
    name: str,
    change: Callable[[dict[str, torch.Tensor]], None],
    *,
    index: bool = True,
) -> None:
    """Change the shard that holds ``name``; the index follows unless told not to."""
    path = shard_of(directory, name)
    before = load_file(path)
    tensors = dict(before)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    if index:
        document = json.loads((directory / INDEX_NAME).read_text())
        for gone in before.keys() - tensors.keys():
            del document["weight_map"][gone]
        document["weight_map"].update(dict.fromkeys(tensors.keys() - before.keys(), path.name))
        (directory / INDEX_NAME).write_text(json.dumps(document))


def edit_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    document = json.loads((directory / INDEX_NAME).read_text())
    change(document["weight_map"])
    (directory / INDEX_NAME).write_text(json.dumps(document))


def test_every_tensor_and_slice_equals_what_safetensors_reads(tiny_dir):
    checkpoint = HfCheckpoint(tiny_dir)
    seen = 0
    for shard in checkpoint.shards():
        with safe_open(str(tiny_dir / shard), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                expected = file.get_tensor(name)
                got = checkpoint.read(name)
                assert got.dtype == expected.dtype and checkpoint.shape(name) == tuple(
                    expected.shape
                )
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
                seen += 1
    assert seen == len(checkpoint.names())
    whole = checkpoint.read(KV_A)
    part = checkpoint.read(KV_A, (slice(32, 144), slice(64, 96)))
    assert whole.dtype == torch.float8_e4m3fn and checkpoint.dtype(KV_A) == "F8_E4M3"
    assert torch.equal(part.view(torch.uint8), whole.view(torch.uint8)[32:144, 64:96])
    assert torch.equal(
        checkpoint.read(KV_A, (slice(None, 32),)).view(torch.uint8), whole.view(torch.uint8)[:32]
    )


def test_a_slice_outside_the_tensor_is_refused(tiny_dir):
    checkpoint = HfCheckpoint(tiny_dir)
    for slices in [
        (slice(100, 145),),
        (slice(0, 8, 2),),
        (slice(-4, 8),),
        (slice(0, 1),) * 3,
        (slice(8, 8),),
    ]:
        with pytest.raises(WeightsError, match="reaches outside"):
            checkpoint.read(KV_A, slices)


def test_only_the_shard_that_is_asked_for_is_opened(copy):
    other = next(s for s in HfCheckpoint(copy).shards() if s != shard_of(copy, KV_A).name)
    (copy / other).unlink()
    assert HfCheckpoint(copy).read(KV_A).shape == (144, 128)


def test_an_intact_checkpoint_is_accepted_and_the_shipped_misspelling_is_no_warning(
    tiny_dir, tiny128_dir, caplog
):
    for directory in (tiny_dir, tiny128_dir):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "megatron_xorl"):
            HfCheckpoint(directory).validate(load_glm_config(directory))
        assert not caplog.records
        assert any(
            "indexers_proj" in name for name in load_glm_config(directory).modules_to_not_convert
        )


def list_unconverted(directory: Path, listed: object) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"]["modules_to_not_convert"] = listed
    path.write_text(json.dumps(raw))


def test_another_entry_that_names_no_module_is_a_warning(copy, caplog):
    list_unconverted(copy, ["lm_head", "model.layers.0.self_attn.indexers_proj", "lm_haed"])
    with caplog.at_level(logging.WARNING):
        HfCheckpoint(copy).validate(load_glm_config(copy))
    (record,) = caplog.records
    assert "1 entries name no module of the checkpoint (first: lm_haed)" in record.getMessage()


@pytest.mark.parametrize("listed", ["lm_head", 7, {"a": 1}, ["lm_head", None], [3]], ids=str)
def test_a_list_of_unconverted_modules_that_is_none_is_refused_by_name(copy, listed):
    list_unconverted(copy, listed)
    with pytest.raises(ConfigError, match=r"quantization_config\.modules_to_not_convert"):
        load_glm_config(copy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_with_inf_or_nan_is_refused_by_name(dtype):
    tensor = torch.ones(4, 3, dtype=dtype)
    refuse_nonfinite("model.norm.weight", tensor)
    tensor[1, 2], tensor[3, 0] = float("nan"), float("-inf")
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has 2 inf or NaN values of 12"):
        refuse_nonfinite("model.norm.weight", tensor)


def test_a_scale_in_another_shard_than_its_weight_is_found(copy):
    names = HfCheckpoint(copy).names()
    scales = {n: HfCheckpoint(copy).read(n).clone() for n in names if n.endswith("_scale_inv")}
    for shard in HfCheckpoint(copy).shards():
        save_file(
            {n: t for n, t in load_file(copy / shard).items() if n not in scales}, copy / shard
        )
    save_file(scales, copy / "scales.safetensors")
    edit_index(
        copy, lambda weight_map: weight_map.update(dict.fromkeys(scales, "scales.safetensors"))
    )
    HfCheckpoint(copy).validate(load_glm_config(copy))


def test_a_checkpoint_without_mtp_layer_is_accepted_when_the_config_has_none(copy):
    raw = json.loads((copy / "config.json").read_text())
    for name in [n for n in HfCheckpoint(copy).names() if n.startswith("model.layers.4.")]:
        rewrite(copy, name, lambda tensors, name=name: tensors.pop(name))
    assert "model.layers.4." in complaint(copy)
    (copy / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    HfCheckpoint(copy).validate(load_glm_config(copy))


def test_a_missing_shard_is_named_once_and_not_once_a_tensor(copy):
    shard_of(copy, KV_A).unlink()
    message = complaint(copy)
    assert "\n" not in message and "model-00001-of-00004.safetensors is missing" in message


@pytest.mark.parametrize(
    "keep", [0, 5, 1000, -1], ids=["zero bytes", "no header", "half a header", "one byte short"]
)
def test_a_truncated_shard_is_named(copy, keep):
    path = shard_of(copy, KV_A)
    path.write_bytes(path.read_bytes()[:keep])
    message = complaint(copy)
    assert (
        path.name in message
        and ("truncated" in message or "bytes" in message)
        and "\n" not in message
    )


def test_a_header_that_is_no_json_is_named(copy):
    path = shard_of(copy, KV_A)
    data = bytearray(path.read_bytes())
    data[8:12] = b"}}}}"
    path.write_bytes(data)
    assert "the safetensors header is damaged" in complaint(copy)


def _scale_with(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[KV_A + "_scale_inv"][1, 1] = value

    return change


STRAY = "model.layers.2.self_attn.indexer.wk.weight"
DAMAGES = {
    "FP8 without scale": (
        lambda t: t.pop(KV_A + "_scale_inv"),
        f"{KV_A} is FP8 without {KV_A}_scale_inv",
    ),
    "scale without weight": (
        lambda t: t.pop(KV_A),
        f"{KV_A}_scale_inv is a scale without its weight",
    ),
    "weight turned bf16": (
        lambda t: t.update({KV_A: t[KV_A].bfloat16()}),
        f"{KV_A}_scale_inv is a scale, but {KV_A} is BF16",
    ),
    "short grid": (
        lambda t: t.update({KV_A + "_scale_inv": t[KV_A + "_scale_inv"][:4].clone()}),
        f"{KV_A}_scale_inv has grid [4, 4], expected [5, 4] for {KV_A} [144, 128]",
    ),
    "bf16 scale": (
        lambda t: t.update({KV_A + "_scale_inv": t[KV_A + "_scale_inv"].bfloat16()}),
        f"{KV_A}_scale_inv is BF16, expected F32",
    ),
    "NaN scale": (_scale_with(float("nan")), "1 of 20 scales are not finite and positive"),
    "zero scale": (_scale_with(0.0), "1 of 20 scales are not finite and positive"),
    "another shape": (
        lambda t: t.update(
            {"model.layers.0.input_layernorm.weight": torch.ones(127, dtype=torch.bfloat16)}
        ),
        "model.layers.0.input_layernorm.weight has shape [127], the config gives [128]",
    ),
    "scale on a norm": (
        lambda t: t.update({"model.layers.0.input_layernorm.weight_scale_inv": torch.ones(1)}),
        "model.layers.0.input_layernorm.weight_scale_inv is a scale, but model.layers.0.input_layernorm.weight is BF16",
    ),
    "fp16 norm": (
        lambda t: t.update(
            {"model.layers.0.input_layernorm.weight": torch.ones(128, dtype=torch.float16)}
        ),
        "model.layers.0.input_layernorm.weight is F16, expected BF16",
    ),
    "missing tensor": (
        lambda t: t.pop("model.layers.0.input_layernorm.weight"),
        "model.layers.0.input_layernorm.weight is missing",
    ),
    "unknown tensor": (
        lambda t: t.update({"model.layers.0.self_attn.qq_proj.weight": torch.ones(1)}),
        "model.layers.0.self_attn.qq_proj.weight is no tensor of this config",
    ),
    "indexer on a shared layer": (
        lambda t: t.update({STRAY: torch.ones(32, 128)}),
        f"{STRAY} lies on a layer that shares another layer's indexer",
    ),
}


@pytest.mark.parametrize(("change", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_each_damage_is_named(copy, change, message):
    rewrite(copy, KV_A, change)
    assert message in complaint(copy)


def test_all_problems_are_in_one_error(copy):
    rewrite(
        copy,
        KV_A,
        lambda t: (t.pop(KV_A + "_scale_inv"), t.pop("model.layers.0.input_layernorm.weight")),
    )
    rewrite(
        copy,
        "lm_head.weight",
        lambda t: t.update({"lm_head.weight": torch.ones(2, 2, dtype=torch.bfloat16)}),
    )
    message = complaint(copy)
    assert message.splitlines()[0].endswith("3 problems:")
    parts = (
        f"{KV_A} is FP8 without",
        "input_layernorm.weight is missing",
        "lm_head.weight has shape",
    )
    assert all(part in message for part in parts)


def test_a_tensor_in_two_shards_is_named(copy):
    rewrite(copy, "lm_head.weight", lambda t: t.update({KV_A: torch.ones(1)}), index=False)
    assert f"{KV_A} is in two shards" in complaint(copy)


def test_an_index_that_names_what_the_shard_lacks_is_named(copy):
    first, last = shard_of(copy, KV_A).name, shard_of(copy, "lm_head.weight").name
    assert first != last
    edit_index(copy, lambda weight_map: weight_map.update({KV_A: last}))
    assert f"the index puts {KV_A} into {last}, which does not hold it" in complaint(copy)


@pytest.mark.parametrize(
    "file",
    ["../other.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "a\\b.safetensors"],
)
def test_an_index_that_leaves_the_directory_is_refused(copy, file):
    edit_index(copy, lambda weight_map: weight_map.update({KV_A: file}))
    with pytest.raises(WeightsError, match="outside the checkpoint"):
        HfCheckpoint(copy)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{"]
)
def test_a_damaged_index_is_refused(copy, text):
    (copy / INDEX_NAME).write_text(text)
    with pytest.raises(WeightsError, match=r"index|weight_map|file name"):
        HfCheckpoint(copy)


def test_pickled_weights_are_refused(copy, tmp_path):
    edit_index(copy, lambda weight_map: weight_map.update({KV_A: "pytorch_model.bin"}))
    with pytest.raises(WeightsError, match="pickled weights run code"):
        HfCheckpoint(copy)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match="loading them would run code"):
        HfCheckpoint(tmp_path / "only")
    (tmp_path / "only" / "pytorch_model.bin").unlink()
    with pytest.raises(WeightsError, match="neither"):
        HfCheckpoint(tmp_path / "only")


def test_a_bf16_router_bias_is_a_warning(copy, caplog):
    rewrite(copy, BIAS, lambda t: t.update({BIAS: t[BIAS].bfloat16()}))
    with caplog.at_level(logging.WARNING):
        HfCheckpoint(copy).validate(load_glm_config(copy))
    assert f"{BIAS} is bf16" in caplog.text


def test_fp8_in_the_config_alone_or_in_the_file_alone_is_one_line(tiny_dir, tmp_path):
    unquantised = dataclasses.replace(load_glm_config(tiny_dir), weight_block_size=None)
    with pytest.raises(
        WeightsError, match=r"the weights are FP8, but config\.json has no quantization_config"
    ) as caught:
        HfCheckpoint(tiny_dir).validate(unquantised)
    assert "\n" not in str(caught.value)
    bf16 = HfCheckpoint(make_tiny(tmp_path / "bf16", block=None))
    bf16.validate(unquantised)
    with pytest.raises(
        WeightsError, match=r"config\.json has a quantization_config, but no weight is FP8"
    ) as caught:
        bf16.validate(load_glm_config(tiny_dir))
    assert "\n" not in str(caught.value)


def test_another_block_size_in_the_config_is_a_grid_mismatch(tiny_dir):
    config = dataclasses.replace(load_glm_config(tiny_dir), weight_block_size=(16, 32))
    with pytest.raises(WeightsError, match=r"has grid .* weight_block_size does not fit the file"):
        HfCheckpoint(tiny_dir).validate(config)


def test_an_unknown_name_gets_the_nearest_ones(tiny_dir):
    with pytest.raises(
        WeightsError, match=r"nearest: model\.layers\.0\.self_attn\.kv_a_proj_with_mqa\.weight"
    ):
        HfCheckpoint(tiny_dir).read("model.layers.0.self_attn.kv_a_proj_mqa.weight")


def test_shards_are_filled_in_order_up_to_the_size():
    assert plan_shards({"a": 4, "b": 4, "c": 3, "d": 20, "e": 1}, 8) == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e"],
    ]


def test_the_writer_gives_a_true_total_and_refuses_a_used_directory(tmp_path):
    tensors = {
        name: torch.arange(n, dtype=torch.float32) for name, n in {"a": 10, "b": 20, "c": 3}.items()
    }
    paths = write_checkpoint(tmp_path / "out", tensors, max_bytes=90)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 132
    assert [p.name for p in paths] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(
        torch.equal(HfCheckpoint(tmp_path / "out").read(name), tensor)
        for name, tensor in tensors.items()
    )
    with pytest.raises(WeightsError, match="already holds"):
        write_checkpoint(tmp_path / "out", tensors, max_bytes=90)
