"""Adapter directories: complete or not written, sharded above a size, damaged ones refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_xorl.adapters.inventory import Inventory, build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import AdapterError
from megatron_xorl.weights.adapter_files import AdapterFile, write_adapter

ADAPTER = AdapterConfig(rank=2, alpha=4)


def inventory() -> Inventory:
    return build_inventory(load_glm_config("tiny"), ADAPTER, dtype="float32")


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f.name: torch.randn(f.shape, generator=generator) for f in inventory().factors}


def write(out: Path, tensors: dict[str, torch.Tensor] | None = None, **named: int) -> Path:
    return write_adapter(
        out,
        inventory().trainable,
        values() if tensors is None else tensors,
        ADAPTER,
        base_model="base",
        base_fingerprint="f" * 64,
        **named,
    )


@pytest.mark.parametrize("max_bytes", [None, 50_000, 1])
def test_sharded_or_not_the_content_is_the_same(tmp_path: Path, max_bytes: int | None) -> None:
    out = write(tmp_path / "a", **({} if max_bytes is None else {"max_bytes": max_bytes}))
    weights = sorted(path.name for path in out.glob("*.safetensors"))
    index = out / "adapter_model.safetensors.index.json"
    stored: dict[str, torch.Tensor] = {}
    for name in weights:
        part = load_file(out / name)
        assert not stored.keys() & part.keys()
        assert (
            max_bytes is None or len(part) == 1 or sum(t.nbytes for t in part.values()) <= max_bytes
        )
        stored |= part
    if max_bytes is None:
        assert (weights, index.exists()) == (["adapter_model.safetensors"], False)
    else:
        assert len(weights) > 1
        assert json.loads(index.read_text())["weight_map"].keys() == stored.keys()
    expected = values()
    assert len(stored) == len(expected)
    file = AdapterFile(out)
    file.check_keys(inventory().trainable)
    for factor in inventory().factors:
        assert torch.equal(file.read(factor), expected[factor.name])
    assert file.keys() == stored.keys()
    assert not list(tmp_path.glob("*.partial"))


def test_a_slice_is_read_without_the_rest(tmp_path: Path) -> None:
    factor = inventory().by_name["model.layers.1.mlp.experts.gate_proj.lora_B"]
    part = AdapterFile(write(tmp_path / "a")).read(factor, (slice(4, 8), slice(0, 64), slice(None)))
    assert torch.equal(part, values()[factor.name][4:8, :64])


def test_an_existing_output_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mine.txt").write_text("kept")
    with pytest.raises(AdapterError, match="exists; choose another output"):
        write(tmp_path / "a")
    assert (tmp_path / "a/mine.txt").read_text() == "kept"


B = "lm_head.lora_B"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop(B), f"{B} is missing"),
        (lambda t: t.update({B: torch.zeros(320, 3)}), r"lm_head.lora_B is \[320, 3\], expected \[320, 2\]"),
        (lambda t: t.update(other=torch.zeros(1)), "other is not a factor of this adapter"),
    ],
)  # fmt: skip
def test_an_incomplete_adapter_is_not_written(tmp_path: Path, change, complaint: str) -> None:
    tensors = values()
    change(tensors)
    with pytest.raises(AdapterError, match=complaint):
        write(tmp_path / "a", tensors)
    assert list(tmp_path.iterdir()) == []


def test_half_a_pair_is_not_written(tmp_path: Path) -> None:
    factors = tuple(factor for factor in inventory().factors if factor.name != B)
    tensors = {factor.name: values()[factor.name] for factor in factors}
    with pytest.raises(AdapterError, match="lm_head has only lora_A"):
        write_adapter(
            tmp_path / "a", factors, tensors, ADAPTER, base_model="b", base_fingerprint="f"
        )


def test_a_writer_that_is_killed_leaves_no_adapter_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    AdapterFile(write(tmp_path / "a")).check_keys(inventory().trainable)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_missing_shard_a_damaged_index_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    out = write(tmp_path / "a", max_bytes=50_000)
    shard = sorted(out.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(AdapterError, match=f"{shard.name} cannot be read"):
        AdapterFile(out)
    shard.write_bytes(content[:-7])
    with pytest.raises(AdapterError, match=f"{shard.name} cannot be read"):
        AdapterFile(out)
    shard.write_bytes(content)
    AdapterFile(out)
    for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}'):
        (out / "adapter_model.safetensors.index.json").write_text(text)
        with pytest.raises(AdapterError, match="index"):
            AdapterFile(out)
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        AdapterFile(tmp_path / "none")


@pytest.mark.parametrize(
    "section", [{"format": "sglang_shared_outer"}, {"format": "other"}, 3, None]
)
def test_a_config_that_lacks_what_loading_needs_is_refused(tmp_path: Path, section: object) -> None:
    out = write(tmp_path / "a")
    document = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(document | {"megatron_xorl": section}))
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        AdapterFile(out)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    out = write(tmp_path / "a")
    with pytest.raises(AdapterError, match="is a file; give the folder"):
        AdapterFile(out / "adapter_model.safetensors")


@pytest.mark.parametrize("name", [None, 3])
def test_a_config_that_does_not_name_its_base_is_refused(tmp_path: Path, name: object) -> None:
    out = write(tmp_path / "a")
    document = json.loads((out / "adapter_config.json").read_text())
    document["base_model_name_or_path"] = name
    if name is None:
        del document["base_model_name_or_path"]
    (out / "adapter_config.json").write_text(json.dumps(document))
    with pytest.raises(AdapterError, match="base_model_name_or_path is"):
        AdapterFile(out)


@pytest.mark.parametrize(
    ("key", "dtype", "complaint"),
    [
        ("x", torch.float32, "holds x, which is no LoRA factor"),
        ("base_model.model.model.norm.weight", torch.float32, "which is no LoRA factor"),
        ("base_model.model.lm_head.lora_C.weight", torch.float32, "which is no LoRA factor"),
        ("base_model.model.lm_head.lora_A.weight", torch.float64, "is F64, expected one of BF16"),
        ("base_model.model.lm_head.lora_A.weight", torch.int32, "is I32, expected one of BF16"),
    ],
)
def test_a_tensor_that_can_be_no_factor_is_refused_by_name(
    tmp_path: Path, key: str, dtype: torch.dtype, complaint: str
) -> None:
    out = write(tmp_path / "a")
    path = out / "adapter_model.safetensors"
    save_file(load_file(path) | {key: torch.ones(2, 2, dtype=dtype)}, path)
    with pytest.raises(AdapterError, match=complaint):
        AdapterFile(out)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_factor_with_inf_or_nan_is_refused_when_it_is_read(tmp_path: Path, value: float) -> None:
    factor, other = inventory().trainable[:2]
    tensors = values()
    tensors[factor.name][0, 1] = value
    file = AdapterFile(write(tmp_path / "a", tensors))
    file.read(other)
    with pytest.raises(AdapterError, match="has 1 inf or NaN values of"):
        file.read(factor)
