"""The spelling of adapter files, against keys written out by hand, and their tables, counted at full size."""

from __future__ import annotations

import pytest

from megatron_xorl.adapters.formats import (
    FORMATS,
    check_size,
    file_entries,
    file_size,
    inventory_hash,
)
from megatron_xorl.adapters.inventory import Inventory, build_inventory
from megatron_xorl.adapters.recovery import FILE_DTYPES, recover
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import AdapterError

ROOT = "base_model.model.model.layers.1.mlp"


def inventory(model: str = "tiny", **adapter: object) -> Inventory:
    return build_inventory(
        load_glm_config(model), AdapterConfig(**({"rank": 4, "alpha": 8} | adapter))
    )


def keys_of(name: str, format: str) -> list[str]:
    factors = inventory().factors
    return [entry.key for entry in file_entries(factors, format) if name in entry.sources]


WRITTEN = [
    ("lm_head.lora_A", "base_model.model.lm_head.lora_A.weight"),
    (
        "model.layers.0.self_attn.kv_a_proj_with_mqa.lora_B",
        "base_model.model.model.layers.0.self_attn.kv_a_proj_with_mqa.lora_B.weight",
    ),
    ("model.layers.0.mlp.gate_proj.lora_A", "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight"),
    ("model.layers.1.mlp.shared_experts.up_proj.lora_B", f"{ROOT}.shared_experts.up_proj.lora_B.weight"),
]  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("name", "key"), WRITTEN)
def test_an_ordinary_factor_is_spelled_as_peft_does_in_every_format(
    name: str, key: str, format: str
) -> None:
    assert keys_of(name, format) == [key]


BANKS = [
    ("gate_proj.lora_A", ["w1.lora_A"], "gate_proj.lora_A", "base_layer.lora_A"),
    ("up_proj.lora_B", ["w3.lora_B"], "up_proj.lora_B", "base_layer.lora_B"),
    ("down_proj.lora_A", ["w2.lora_A"], "down_proj.lora_A", "lora_A"),
]


@pytest.mark.parametrize(("factor", "shared", "single", "fused"), BANKS)
def test_a_bank_is_spelled_three_ways(
    factor: str, shared: list[str], single: str, fused: str
) -> None:
    name = f"model.layers.1.mlp.experts.{factor}"
    assert keys_of(name, "sglang_shared_outer") == [
        f"{ROOT}.experts.{key}.weight" for key in shared
    ]
    assert keys_of(name, "hf_peft") == [f"{ROOT}.experts.{e}.{single}.weight" for e in range(8)]
    assert keys_of(name, "hf_peft_fused") == [f"{ROOT}.experts.{fused}.weight"]


# 1,250 ordinary factors; 75 layers of 6 bank factors; each once an expert; two parameters a layer, A and B.
COUNTS = {
    "sglang_shared_outer": 1250 + 75 * 6,
    "hf_peft": 1250 + 75 * 6 * 256,
    "hf_peft_fused": 1250 + 75 * 4,
}


@pytest.mark.parametrize("format", FORMATS)
def test_at_full_size_every_key_is_one_tensor_and_every_factor_is_covered(format: str) -> None:
    factors = inventory("glm-5.2", rank=64).factors
    entries = file_entries(factors, format)
    assert len({entry.key for entry in entries}) == len(entries) == COUNTS[format]
    assert {name for entry in entries for name in entry.sources} == {f.name for f in factors}
    holders = [(name, entry.expert) for entry in entries for name in entry.sources]
    assert len(set(holders)) == len(holders)


@pytest.mark.parametrize("format", FORMATS)
def test_at_full_size_the_factors_are_told_from_keys_and_shapes(format: str) -> None:
    factors = inventory("glm-5.2", rank=64).factors
    spelled = {dtype: name for name, dtype in FILE_DTYPES.items()}
    shapes = {e.key: (e.shape, spelled[e.dtype]) for e in file_entries(factors, format)}
    document = {"r": 64, "rank_pattern": {r".*\.gate_up_proj": 128}}
    found = recover(shapes, document, "file")
    assert (found.format, found.factors) == (format, factors)


def test_sharing_shows_in_the_leading_axis_alone() -> None:
    factors = inventory("glm-5.2").factors
    leading = {
        entry.key.split("experts.")[1]: entry.shape[0]
        for entry in file_entries(factors, "sglang_shared_outer")
        if ".layers.7.mlp.experts." in entry.key
    }
    assert leading == {
        "w1.lora_A.weight": 1,
        "w1.lora_B.weight": 256,
        "w3.lora_A.weight": 1,
        "w3.lora_B.weight": 256,
        "w2.lora_A.weight": 256,
        "w2.lora_B.weight": 1,
    }


def test_sizes_are_those_that_were_worked_out_by_hand() -> None:
    """Bytes in bf16 at rank 64: 1,250 ordinary factors have 563.5 M parameters, the rest is banks."""
    factors = inventory("glm-5.2", rank=64).factors
    bank = 75 * 2 * 64 * (256 * 3 * (6144 + 2048))
    plain = 2 * 64 * (6_634_368 + 165_888 + 1_843_200 + 161_024)
    assert file_size(factors, "hf_peft") == plain + bank
    halves = 75 * 2 * 64 * 256 * (2 * 6144 + 4 * 2048 + 6144 + 2048)
    assert file_size(factors, "hf_peft_fused") == plain + halves
    assert file_size(factors, "sglang_shared_outer") == 2 * 64 * 128_151_680


def test_an_expanded_form_far_above_the_shared_one_needs_permission_and_both_sizes_are_told() -> (
    None
):
    factors = inventory("glm-5.2", rank=64).factors
    for format, told in (("hf_peft", "61.5 GB"), ("hf_peft_fused", "71.6 GB")):
        with pytest.raises(AdapterError, match=rf"{told} .* 16.4 GB.*--allow-expanded"):
            check_size(factors, format)
        assert check_size(factors, format, allow_expanded=True) == file_size(factors, format)
    assert check_size(factors, "sglang_shared_outer") == file_size(factors, "sglang_shared_outer")


def test_a_miniature_and_a_narrow_adapter_need_no_permission() -> None:
    assert check_size(inventory(rank=64).factors, "hf_peft") > 0
    narrow = inventory(
        "glm-5.2", rank=64, targets=["q_a_proj", "shared_experts.*", "*.shared_experts.*"][:1]
    )
    assert check_size(narrow.factors, "hf_peft") == file_size(narrow.factors, "sglang_shared_outer")


BANK = "*.mlp.experts."


@pytest.mark.parametrize(
    ("targets", "format", "complaint"),
    [
        ([f"{BANK}gate_proj"], "hf_peft", "gate_proj without up_proj"),
        ([f"{BANK}up_proj", f"{BANK}down_proj"], "hf_peft_fused", "up_proj without gate_proj"),
        ([f"{BANK}gate_proj", f"{BANK}up_proj"], "hf_peft", "without down_proj"),
        (
            [{"pattern": f"{BANK}gate_proj", "rank": 2}, {"pattern": f"{BANK}up_proj", "rank": 4}],
            "hf_peft_fused",
            "rank 2 for gate_proj and 4 for up_proj",
        ),
    ],
)
def test_what_peft_cannot_hold_is_refused_with_the_form_that_can(
    targets: list[object], format: str, complaint: str
) -> None:
    factors = inventory(targets=targets).factors
    with pytest.raises(AdapterError, match=f"{complaint}.*sglang_shared_outer"):
        file_entries(factors, format)
    assert file_entries(factors, "sglang_shared_outer")


def test_banks_of_gate_and_up_alone_are_not_nested() -> None:
    factors = inventory(targets=[f"{BANK}gate_proj", f"{BANK}up_proj"]).factors
    keys = [entry.key for entry in file_entries(factors, "hf_peft_fused")]
    assert keys[:2] == [f"{ROOT}.experts.lora_A.weight", f"{ROOT}.experts.lora_B.weight"]


def test_an_unknown_format_is_refused_with_the_nearest() -> None:
    with pytest.raises(AdapterError, match="did you mean 'hf_peft'"):
        file_entries(inventory().factors, "hf_peff")


def test_the_hash_of_an_inventory_sees_names_shapes_and_order() -> None:
    factors = inventory().factors
    hashes = {
        inventory_hash(factors),
        inventory_hash(inventory(rank=8).factors),
        inventory_hash(factors[::-1]),
        inventory_hash(factors[:-1]),
    }
    assert len(hashes) == 4
    assert inventory_hash(factors) == inventory_hash(inventory(alpha=16).factors)
