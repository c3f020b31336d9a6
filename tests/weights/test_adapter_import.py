"""Adapters that this package did not write, and conversions between the forms."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_xorl.adapters.formats import FORMATS
from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import AdapterError
from megatron_xorl.weights.adapter_files import AdapterFile
from megatron_xorl.weights.adapter_import import import_adapter
from megatron_xorl.weights.adapter_writer import write_adapter

ADAPTER = AdapterConfig(rank={"routed_experts": 2, "default": 3}, alpha=6)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def written(out: Path, format: str = "sglang_shared_outer", **changes: Any) -> Path:
    adapter = AdapterConfig(**(ADAPTER.to_dict() | changes))
    factors = build_inventory(load_glm_config("tiny"), adapter, dtype="float32").trainable
    generator = torch.Generator().manual_seed(0)
    return write_adapter(
        out,
        factors,
        {factor.name: torch.randn(factor.shape, generator=generator) for factor in factors},
        adapter,
        base_model="base",
        base_fingerprint="f" * 64,
        forward={"mode": "w8a16"},
        format=format,
    )


def foreign(directory: Path, **changes: Any) -> Path:
    """Make a directory as its writer would have, who does not know this package."""
    document = json.loads((directory / CONFIG).read_text())
    del document["megatron_xorl"]
    (directory / CONFIG).write_text(json.dumps(document | changes))
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_a_conversion_there_and_back_gives_the_same_bytes(
    tmp_path: Path, first: str, second: str
) -> None:
    start = written(tmp_path / "start", first)
    report = import_adapter(start, tmp_path / "there", second)
    assert (report["source_format"], report["format"]) == (first, second)
    assert content(written(tmp_path / "straight", second)) == content(tmp_path / "there")
    import_adapter(tmp_path / "there", tmp_path / "back", first)
    assert content(tmp_path / "back") == content(start)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rslora", [False, True])
def test_without_our_section_ranks_and_scales_are_those_of_the_file(
    tmp_path: Path, format: str, rslora: bool
) -> None:
    mine = AdapterFile(written(tmp_path / "a", format, rslora=rslora))
    file = AdapterFile(foreign(tmp_path / "a"))
    assert (file.own, file.base_fingerprint) == (False, None)
    assert file.factors == mine.factors
    for factor in file.factors:
        expected = 6 / (math.sqrt(factor.rank) if rslora else factor.rank)
        assert file.adapter.scale_of(factor.rank) == pytest.approx(expected, rel=1e-9)
    built = build_inventory(load_glm_config("tiny"), file.adapter, dtype="float32")
    assert built.trainable == file.factors


def test_a_peft_config_with_leaf_targets_means_what_peft_makes_of_it(tmp_path: Path) -> None:
    """PEFT doubles rank and alpha of gate and up itself where the targets are leaf names."""
    out = foreign(
        written(tmp_path / "a", "hf_peft", rank=2, glm52_lora_scope="routed_experts"),
        target_modules=["gate_proj", "up_proj", "down_proj"],
        target_parameters=None,
        rank_pattern={},
        alpha_pattern={},
        peft_version="0.21.2",
    )
    file = AdapterFile(out)
    assert {file.adapter.scale_of(factor.rank) for factor in file.factors} == {3.0}
    assert file.adapter.glm52_lora_scope == "routed_experts"


def test_xorls_directory_imports(tmp_path: Path) -> None:
    """One rank, leaf targets unsorted, its two extras, and the head under the name of an embedding."""
    plain = written(tmp_path / "plain", rank=2)
    out = foreign(written(tmp_path / "a", rank=2), target_modules=["w1", "q_a_proj", "lm_head"])
    tensors = load_file(out / WEIGHTS)
    for side in "AB":
        head = tensors.pop(f"base_model.model.lm_head.lora_{side}.weight")
        tensors[f"base_model.model.lm_head.lora_embedding_{side}"] = head
    save_file(tensors, out / WEIGHTS)
    import_adapter(out, tmp_path / "imported")
    assert content(tmp_path / "imported")[WEIGHTS] == content(plain)[WEIGHTS]
    file, mine = AdapterFile(tmp_path / "imported"), AdapterFile(plain)
    assert file.factors == mine.factors
    assert file.adapter.scale_of(2) == mine.adapter.scale_of(2)


def both(out: Path) -> None:
    tensors = load_file(out / WEIGHTS)
    tensors["base_model.model.lm_head.lora_embedding_A"] = tensors[
        "base_model.model.lm_head.lora_A.weight"
    ].clone()
    save_file(tensors, out / WEIGHTS)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is True, which is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"bias": "all"}, "bias is 'all', expected 'none'"),
    ({"peft_type": "LOKR"}, "peft_type is 'LOKR', expected 'LORA'"),
    ({"peft_type": None}, "peft_type is None, expected 'LORA'"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is \[1\]"),
    ({"some_new_method": 3}, "some_new_method is 3, which is not supported"),
    ({"r": 4}, "has rank 4, its tensors have 3"),
    ({"r": "3"}, "r is '3', expected a positive number"),
    ({"r": True}, "r is True"),
    ({"lora_alpha": 0}, "lora_alpha is 0"),
    ({"lora_alpha": None}, "lora_alpha is None"),
    ({"alpha_pattern": {"lm_head": 12}}, "model.layers.0.self_attn.q_a_proj with alpha 6 and lm_head with alpha 12"),
    ({"alpha_pattern": {"lm_head": "12"}}, "alpha of lm_head is '12'"),
    ({"alpha_pattern": {"(": 12}}, "no regular expression"),
    ({"rank_pattern": {"lm_head": 2}}, "rank 2, its tensors have 3|rank 3, its tensors have 2"),
    ({"rank_pattern": [2]}, "expected an object"),
    ({"_sglang_lora_format": "other"}, "_sglang_lora_format is 'other'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "complaint"), REFUSED)
def test_a_setting_that_would_change_the_product_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    out = foreign(written(tmp_path / "a"), **changes)
    with pytest.raises(AdapterError, match=complaint) as caught:
        AdapterFile(out)
    assert "\n" not in str(caught.value)


def test_the_head_under_both_names_is_refused(tmp_path: Path) -> None:
    out = foreign(written(tmp_path / "a"))
    both(out)
    with pytest.raises(AdapterError, match="which are the same factor; keep one"):
        AdapterFile(out)


def other_layer(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    moved = {key.replace("layers.0.", "layers.9."): value for key, value in tensors.items()}
    save_file(moved, directory / WEIGHTS)


def fewer_experts(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    kept = {key: value for key, value in tensors.items() if ".experts.7." not in key}
    save_file(kept, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("format", "damage", "complaint"),
    [
        ("sglang_shared_outer", other_layer, "layers.9.*which the base does not have"),
        ("hf_peft", fewer_experts, r"is \[7, .*\], the base needs \[8, "),
    ],
)
def test_an_adapter_of_another_base_is_refused_when_the_base_is_at_hand(
    tmp_path: Path, format: str, damage: Callable[[Path], None], complaint: str
) -> None:
    out = foreign(written(tmp_path / "a", format))
    damage(out)
    base = (load_glm_config("tiny"), "e" * 64, "tiny")
    with pytest.raises(AdapterError, match=complaint):
        import_adapter(out, tmp_path / "b", base=base)
    assert not (tmp_path / "b").exists()


def test_the_base_at_hand_is_recorded_and_another_fingerprint_is_refused(tmp_path: Path) -> None:
    base = (load_glm_config("tiny"), "e" * 64, "tiny")
    with pytest.raises(
        AdapterError, match="base with fingerprint ffffffffffff, tiny is eeeeeeeeeeee"
    ):
        import_adapter(written(tmp_path / "a"), tmp_path / "b", base=base)
    import_adapter(foreign(tmp_path / "a"), tmp_path / "b", base=base)
    file = AdapterFile(tmp_path / "b")
    assert (file.base_fingerprint, file.base_model) == ("e" * 64, "tiny")


def test_a_fault_found_midway_leaves_nothing(tmp_path: Path) -> None:
    out = written(tmp_path / "a")
    tensors = load_file(out / WEIGHTS)
    tensors["base_model.model.lm_head.lora_B.weight"][0, 0] = float("nan")
    save_file(tensors, out / WEIGHTS)
    with pytest.raises(AdapterError, match="1 inf or NaN"):
        import_adapter(out, tmp_path / "b", "hf_peft")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
