"""The adapter configuration: strict, and XoRL's spellings move over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.config.adapter import AdapterConfig, TargetEntry, load_adapter_config
from megatron_xorl.config.yaml import parse_yaml
from megatron_xorl.errors import ConfigError

BASE: dict[str, Any] = {"rank": 8, "alpha": 16}


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        AdapterConfig.from_dict(BASE | changes, "a.yaml")
    assert str(caught.value).startswith("a.yaml: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_those_of_the_documentation() -> None:
    adapter = AdapterConfig(rank=8, alpha=16)
    assert adapter.glm52_lora_scope == "all"
    assert adapter.lora_target_modules is None
    assert (adapter.dropout, adapter.frozen_factors, adapter.indexer) == (0.0, "keep", "frozen")
    assert (adapter.export_format, adapter.allow_nonzero_frozen) == ("sglang_shared_outer", False)
    assert adapter.scale_for("attention") == 2.0


@pytest.mark.parametrize("key", ["alpha", "rank"])
def test_a_missing_rank_or_alpha_is_an_error(key: str) -> None:
    values = {name: value for name, value in BASE.items() if name != key}
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        AdapterConfig(**values)


# What PyYAML 6 reads as strings and as floats, all of them numbers to a person.
SPELLINGS = ["1e1", "1E1", "1e+1", "1.0e1", "1.0e+1", "1.e+1", "10", "10.0", "'10'"]


@pytest.mark.parametrize("text", SPELLINGS)
@pytest.mark.parametrize("key", ["rank", "alpha"])
def test_a_number_is_read_however_it_is_spelled(key: str, text: str) -> None:
    adapter = AdapterConfig(**BASE | parse_yaml(f"{key}: {text}"))
    assert getattr(adapter, key) == 10


def test_a_small_number_as_a_string_is_read_in_every_number_field() -> None:
    assert AdapterConfig(**BASE | parse_yaml("dropout: 1e-4")).dropout == 1e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank", True),
        ("alpha", False),
        ("rank", 1.5),
        ("alpha", "a lot"),
        ("alpha", "nan"),
        ("dropout", "inf"),
    ],
)
def test_what_is_not_a_number_is_refused_by_field(key: str, value: Any) -> None:
    assert f"{key}: found" in refused(**{key: value})


def test_an_unquoted_on_is_said_to_be_a_boolean() -> None:
    message = refused(**parse_yaml("scope: on"))
    assert "the boolean true" in message
    assert "all, moe, shared_experts, routed_experts" in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lora_target_module", "lora_target_modules"),
        ("rnak", "rank"),
        ("glm52_scope", "glm52_lora_scope"),
        ("lora_alfa", "lora_alpha"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, meant: str) -> None:
    assert f"unknown key '{key}'; did you mean '{meant}'?" in refused(**{key: 1})


def test_an_unknown_word_is_refused_with_the_nearest() -> None:
    assert "did you mean 'routed_experts'" in refused(glm52_lora_scope="routed_expert")


def test_rank_may_differ_by_region() -> None:
    adapter = AdapterConfig(rank={"routed_experts": "4", "default": 16}, alpha=32)
    assert (adapter.rank_for("routed_experts"), adapter.rank_for("attention")) == (4, 16)
    assert (adapter.scale_for("routed_experts"), adapter.scale_for("attention")) == (8.0, 2.0)
    assert "no rank for dense_mlp" in refused(rank={"attention": 4, "lm_head": 4})
    assert "did you mean 'routed_experts'" in refused(rank={"routed_expert": 4, "default": 1})
    assert "expected at least 1" in refused(rank={"default": 0})
    with pytest.raises(ConfigError, match="no region 'head'"):
        adapter.rank_for("head")


@pytest.mark.parametrize("key", ["rslora", "use_rslora"])
def test_rslora_divides_alpha_by_the_root_of_the_rank(key: str) -> None:
    """As PEFT does it: ``lora_alpha / math.sqrt(r)`` with ``use_rslora``."""
    rank = {"routed_experts": 4, "default": 64}
    plain, rooted = (
        AdapterConfig(rank=rank, alpha=32),
        AdapterConfig(rank=rank, alpha=32, **{key: True}),
    )
    for region, by_rank, by_root in [("routed_experts", 8.0, 16.0), ("lm_head", 0.5, 4.0)]:
        assert (plain.scale_for(region), rooted.scale_for(region)) == (by_rank, by_root)
    assert (plain.scale_of(16), rooted.scale_of(16)) == (2.0, 8.0)
    assert AdapterConfig.from_dict(rooted.to_dict()) == rooted
    assert "rslora" not in plain.to_dict()
    assert "expected true or false" in refused(**{key: "yes"})
    assert "same setting" in refused(rslora=True, use_rslora=True)


@pytest.mark.slow  # importing PEFT takes seconds
def test_the_scale_is_the_one_that_peft_applies() -> None:
    from peft import LoraConfig, get_peft_model
    from torch import nn

    for rslora in (False, True):
        ours = AdapterConfig(rank=8, alpha=12.5, rslora=rslora)
        theirs = LoraConfig(r=8, lora_alpha=12.5, use_rslora=rslora, target_modules=["0"])
        model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), theirs)
        scaling = model.get_submodule("base_model.model.0").scaling
        assert scaling == {"default": ours.scale_for("attention")}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("alpha", 0, "alpha is 0, expected a positive number"),
        ("alpha", -16, "alpha is -16, expected a positive number"),
        ("alpha", "inf", "alpha: found 'inf', expected a finite number"),
        ("alpha", float("nan"), "alpha: found nan, expected a finite number"),
        ("alpha", True, "alpha: found the boolean true"),
        ("alpha", None, "alpha is missing; write it (for example alpha: 32)"),
        ("alpha", [8], "alpha: found [8], expected a finite number"),
        ("rank", 0, "rank: found 0, expected at least 1 and at most 16384"),
        ("rank", -8, "rank: found -8, expected at least 1"),
        ("rank", 8.5, "rank: found 8.5, expected a whole number"),
        ("rank", 10**9, "rank: found 1000000000, expected at least 1 and at most 16384"),
        ("rank", None, "rank is missing; write it (for example rank: 16)"),
        ("rank", {}, "no rank for attention"),
        ("rank", {"default": 8, "lm_head": True}, "rank: lm_head: found the boolean true"),
        ("rank", {"default": 8, "lm_head": 0}, "rank: lm_head: found 0, expected at least 1"),
        ("rank", {"default": 8, 3: 1}, "unknown region 3"),
        ("dropout", -0.1, "dropout is -0.1, expected 0 or more and less than 1"),
        ("dropout", 1, "dropout is 1, expected 0 or more and less than 1"),
        ("dropout", True, "dropout: found the boolean true"),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_what_can(key: str, value: Any, says: str) -> None:
    assert says in refused(**{key: value})


@pytest.mark.parametrize("value", [16, 16.0, "16", "1.6e1"])
def test_alpha_may_be_a_whole_number_or_not(value: Any) -> None:
    assert AdapterConfig(rank=8, alpha=value).scale_for("attention") == 2.0
    assert AdapterConfig(rank=8, alpha=0.5).scale_for("attention") == 0.0625
    assert AdapterConfig(rank=8, alpha=8, dropout=0.5).dropout == 0.5


def test_xorl_spellings_mean_the_same() -> None:
    xorl = {
        "enable_lora": True,
        "enable_qlora": True,
        "block_fp8_qlora_training": True,
        "quant_format": "block_fp8",
        "quant_group_size": 128,
        "moe_hybrid_shared_lora": True,
        "ep_dispatch": "alltoall",
        "freeze_router": True,
        "max_lora_rank": 8,
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_export_format": "peft",
        "glm52_lora_scope": "moe",
    }
    assert AdapterConfig(**xorl) == AdapterConfig(
        rank=8, alpha=16, export_format="hf_peft", glm52_lora_scope="moe"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ep_dispatch", "deepep"),
        ("moe_hybrid_shared_lora", False),
        ("freeze_router", 1),
        ("max_lora_rank", 16),
        ("unfuse_for_lora", True),
    ],
)
def test_an_xorl_switch_at_another_value_is_refused_with_the_reason(key: str, value: Any) -> None:
    message = refused(**{key: value})
    assert key in message
    assert len(message.split(": ")[-1]) > 20


def test_one_setting_under_two_spellings_is_refused() -> None:
    assert "same setting" in refused(lora_alpha=16)


def test_targets_are_strings_or_entries_with_promises() -> None:
    adapter = AdapterConfig(
        **BASE, targets=["lm_head", {"pattern": "*.o_proj", "count": "78", "rank": 4}]
    )
    assert adapter.lora_target_modules == (
        "lm_head",
        TargetEntry(pattern="*.o_proj", count=78, rank=4),
    )
    for wrong, says in [
        ("lm_head", "expected a list"),
        ([3], "found 3 in the list"),
        ([True], "the boolean true"),
        ([{"pattern": "a", "cout": 1}], "did you mean 'count'"),
        ([{"count": 1}], "pattern is missing"),
        ([{"pattern": "a", "rank": 0}], "entry 1, 'a': rank: found 0"),
    ]:
        assert says in refused(targets=wrong)


def test_settings_that_would_have_no_effect_are_refused() -> None:
    assert "indexer is frozen" in refused(indexer_loss="dense")
    assert AdapterConfig(**BASE, indexer="kl", indexer_loss="sparse").indexer_loss == "sparse"
    assert "does nothing" in refused(alpha=0)
    assert "less than 1" in refused(dropout=1)
    assert "found 'yes'" in refused(allow_nonzero_frozen="yes")


def test_a_configuration_survives_its_own_dictionary() -> None:
    adapter = AdapterConfig(
        rank={"default": 2},
        alpha="4",
        targets=["*.o_proj", {"pattern": "lm_head", "rank": 1}],
        frozen_factors="drop",
    )
    assert AdapterConfig.from_dict(adapter.to_dict()) == adapter


def test_a_file_is_read_and_named_in_messages(tmp_path: Path) -> None:
    file = tmp_path / "adapter.yaml"
    file.write_text("rank: 16\nalpha: 3.2e1\nlora_target_modules: ['*.mlp.experts.*']\n")
    assert load_adapter_config(file) == AdapterConfig(
        rank=16, alpha=32, targets=["*.mlp.experts.*"]
    )
    file.write_text("rank: 16\n")
    with pytest.raises(ConfigError, match=r"adapter\.yaml: alpha is missing"):
        load_adapter_config(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rank", 10**30), ("rank", "1e300"), ("alpha", 10**400), ("alpha", -(10**5000))],
    ids=["rank", "written as a float", "alpha", "thousands of digits"],
)
def test_a_number_that_nothing_can_hold_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}: found a number of|{key}: found 1"):
        AdapterConfig(**({"rank": 2, "alpha": 4} | {key: value}))


@pytest.mark.parametrize(
    ("given", "kept"), [(32, 32), (32.0, 32.0), ("32", 32), ("3e1", 30.0), (0.5, 0.5), ("1.5", 1.5)]
)
def test_alpha_is_kept_as_it_was_given(given: object, kept: float) -> None:
    alpha = AdapterConfig(rank=4, alpha=given).to_dict()["alpha"]
    assert (alpha, type(alpha)) == (kept, type(kept))


def test_an_alpha_whose_scale_fp32_would_lose_is_refused() -> None:
    for alpha in (1e300, 1e10, 1e-12, 10**30):
        assert "expected 1e-09 to 1e+09" in refused(alpha=alpha)


def test_a_misspelled_key_is_named_where_the_right_one_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"alpha is missing \(unknown key 'alfa' is not it\)"):
        AdapterConfig(rank=4, alfa=8)
    with pytest.raises(ConfigError, match=r"rank is missing \(unknown key 'rnk' is not it\)"):
        AdapterConfig(rnk=4, alpha=8)
