"""The audit of target entries: what each wrong one is told, and what each right one takes."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.adapters.projections import projections
from megatron_xorl.adapters.targets import select_targets
from megatron_xorl.config.adapter import AdapterConfig, load_adapter_config
from megatron_xorl.config.model import PRESETS, load_glm_config
from megatron_xorl.config.run import load_run_config
from megatron_xorl.config.yaml import parse_yaml
from megatron_xorl.errors import ConfigError, TargetError

GLM_CONFIG = load_glm_config("glm-5.2")
GLM = projections(GLM_CONFIG)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = {item.name for item in GLM} | {item.leaf for item in GLM}


def message(targets: Any, **keys: Any) -> str:
    with pytest.raises((TargetError, ConfigError)) as caught:
        build_inventory(
            GLM_CONFIG, AdapterConfig(**{"rank": 4, "alpha": 8, "targets": targets} | keys)
        )
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


# entry -> (the real name or pattern it is sent to, words of the reason or of the remedy)
WRONG: dict[str, tuple[str, str]] = {
    # a module, wholly or by its end
    "self_attn": ("'*.self_attn.*'", "a module, not a projection"),
    "mlp": ("'*.mlp.*'", "a module, not a projection"),
    "experts": ("'*.experts.*'", "a module, not a projection"),
    "model.layers.3": ("'model.layers.3.*'", "a module, not a projection"),
    "*.mlp.shared_experts": ("'*.mlp.shared_experts.*'", "a module, not a projection"),
    # the beginning or the end is missing
    "experts.*": ("'*.experts.*'", "did you mean"),
    "layers.3.self_attn.o_proj": ("'model.layers.3.self_attn.o_proj'", "did you mean"),
    "kv_a_proj": ("'kv_a_proj_with_mqa'", "did you mean"),
    # letters
    "Q_A_PROJ": ("'q_a_proj'", "did you mean"),
    "LM_Head": ("'lm_head'", "did you mean"),
    "*.Self_Attn.*": ("'*.self_attn.*'", "did you mean"),
    "*.shared_expert.*_proj": ("'*.shared_experts.*_proj'", "did you mean"),
    " o_proj": ("'o_proj'", "did you mean"),
    "o_proj,q_a_proj": ("'o_proj', 'q_a_proj'", "write one list entry for each"),
    # names of a file's tensors
    "lm_head.weight": ("'lm_head'", "did you mean"),
    "base_model.model.lm_head.lora_A.weight": ("'lm_head'", "did you mean"),
    # other models and frameworks
    "q_proj": ("q_a_proj and q_b_proj", "Hugging Face's"),
    "k_proj": ("kv_a_proj_with_mqa and kv_b_proj", "Hugging Face's"),
    "v_proj": ("kv_a_proj_with_mqa and kv_b_proj", "Hugging Face's"),
    "*.mlp.gate_up_proj": ("gate_proj and up_proj", "Hugging Face's"),
    "*.experts.w2": ("down_proj", "Hugging Face's"),
    "decoder.layers.0.mlp.linear_fc2": ("down_proj", "Hugging Face's"),
    "linear_q_down_proj": ("q_a_proj", "Hugging Face's"),
    "all-linear": ("'*'", "leave lora_target_modules out"),
    # a regular expression
    ".*q_a_proj": ("'*q_a_proj'", "not a regular expression"),
    r"model\.layers\.\d+\.mlp\..*": ("'model.layers.*.mlp.*'", "not a regular expression"),
    "^model.layers.[0-9]+.self_attn.o_proj$": ("'model.layers.*.self_attn.o_proj'", "write"),
    "*.(q_a|q_b)_proj": ("'*.q_a_proj'", "one entry for each alternative"),
    "*.layers.{0,1}.mlp.up_proj": ("'*.layers.0.mlp.up_proj'", "one entry for each alternative"),
    # what nothing adapts
    "gate": ("gate_proj", "the router never trains; remove it"),
    "*.mlp.gate.weight": ("gate_proj", "the router never trains; remove it"),
    "*.indexer.*": ("o_proj", "the indexer is not adapted"),
    "wq_b": ("q_b_proj", "the indexer is not adapted"),
    "embed_tokens": ("lm_head", "the embedding is not adapted; remove it"),
    "*.input_layernorm": ("q_a_proj", "norms are not adapted; remove it"),
    "eh_proj": ("o_proj", "multi-token-prediction layer is kept, not adapted; remove it"),
    # layers and experts that are not there, and parts of a bank
    "model.layers.78.self_attn.q_a_proj": ("'model.layers.77.self_attn.q_a_proj'", "0 to 77"),
    "model.layers.99.mlp.gate_proj": ("model.layers.2.mlp.gate_proj", "0 to 77"),
    "*.layers.7[89].*": ("'*.layers.77.*'", "0 to 77"),
    "model.layers.0.mlp.experts.up_proj": ("model.layers.0.mlp.up_proj", "layer 0 has none"),
    "experts.3.*": ("'*.experts.*'", "a bank is adapted as a whole"),
    "*.experts.3.*": ("'*.mlp.experts.*.gate_proj'", "a bank is adapted as a whole"),
    "*.experts.256.gate_proj": ("'*.experts.*.gate_proj'", "the experts are 0 to 255"),
    # nothing near
    "xyzzy": ("q_a_proj", "projections are"),
    "[": ("q_a_proj", "projections are"),
}


@pytest.mark.parametrize("entry", WRONG, ids=repr)
def test_a_wrong_entry_is_named_and_sent_to_a_real_one(entry: str) -> None:
    goes_to, words = WRONG[entry]
    said = message(["o_proj", entry])
    assert said.startswith(f"target {entry!r} ")
    said = said.removeprefix(f"target {entry!r} ")
    assert goes_to in said
    assert words in said
    offered = re.findall(r"(?:did you mean|write|example|or) '([^']+)'", said)
    assert all(select_targets(GLM, [name]) for name in offered)
    assert offered or any(name in said for name in NAMES)


# What the list or an entry with promises is told.
PROMISES: list[tuple[Any, tuple[str, ...]]] = [
    ([], ("lora_target_modules is empty", "leave the key out")),
    (["o_proj", "lm_head", "o_proj"], ("'o_proj' is listed 2 times", "keep one")),
    ("q_a_proj", ("found 'q_a_proj'", "expected a list", "write ['q_a_proj']")),
    ("all-linear", ("expected a list", "leave the key out")),
    ({"pattern": "o_proj"}, ("expected a list",)),
    (["o_proj", 3], ("found 3", "entry 2", "expected a name")),
    (["o_proj", True], ("the boolean true", "entry 2", "expected a name")),
    ([None], ("found None", "entry 1", "expected a name")),
    ([""], ("found ''", "entry 1", "expected a name")),
    ([["o_proj"]], ("found ['o_proj']", "entry 1", "expected a name")),
    ([{"pattern": "o_proj", "count": 78, "ranks": 4}], ("'o_proj'", "did you mean 'rank'")),
    ([{"count": 3}], ("entry 1", "pattern is missing")),
    ([{"pattern": 5}], ("entry 1", "pattern: found 5", "put it in quotes")),
    ([{"pattern": "o_proj", "count": 0}], ("'o_proj'", "count: found 0", "remove it")),
    ([{"pattern": "o_proj", "count": -1}], ("'o_proj'", "count: found -1", "at least 1")),
    ([{"pattern": "o_proj", "count": True}], ("'o_proj'", "count", "the boolean true")),
    ([{"pattern": "o_proj", "count": 1.5}], ("'o_proj'", "count: found 1.5", "whole number")),
    ([{"pattern": "o_proj", "rank": 0}], ("'o_proj'", "rank: found 0", "at least 1")),
    ([{"pattern": "o_proj", "rank": -4}], ("'o_proj'", "rank: found -4", "at least 1")),
    ([{"pattern": "o_proj", "rank": 1.5}], ("'o_proj'", "rank: found 1.5", "whole number")),
    ([{"pattern": "o_proj", "rank": 10**9}], ("'o_proj'", "rank: found 1000000000", "16384")),
    (
        [{"pattern": "*.mlp.gate_proj", "count": 4}],
        ("'*.mlp.gate_proj' matches 3 targets", "count says 4", "layers.0.mlp", "count: 3"),
    ),
    ([{"pattern": "o_prj", "count": 78}], ("'o_prj' matches nothing", "'o_proj'")),
    (
        [{"pattern": "lm_head", "rank": 4}, {"pattern": "lm_*", "rank": 8}],
        ("'lm_head'", "'lm_*'", "lm_head ranks 4 and 8", "give each target one rank"),
    ),
    (
        [{"pattern": "o_proj", "count": 78}, {"pattern": "*.7.self_attn.*", "count": 5}],
        ("'o_proj'", "'*.7.self_attn.*'", "both count model.layers.7.self_attn.o_proj", "narrow"),
    ),
    (["o_proj" * 100], ("'o_projo_proj", "600 letters", "one list entry for each")),
]


@pytest.mark.parametrize(("targets", "says"), PROMISES, ids=lambda value: str(value)[:40])
def test_a_wrong_list_or_promise_is_told_what_was_found_and_what_to_do(
    targets: Any, says: tuple[str, ...]
) -> None:
    said = message(targets)
    for words in says:
        assert words in said


def test_an_unquoted_glob_is_told_to_use_quotes() -> None:
    with pytest.raises(ConfigError, match=r'quote the pattern, for example "\*\.mlp\.experts'):
        parse_yaml("lora_target_modules: [*.mlp.experts.*]")


def test_targets_and_scope_that_leave_nothing_to_train_are_refused_together() -> None:
    said = message(["o_proj"], scope="moe")
    assert "scope 'moe' trains shared_experts, routed_experts" in said
    assert "targets are in attention" in said


@pytest.mark.parametrize("name", PRESETS)
def test_the_default_of_every_family_is_the_inventory(name: str) -> None:
    """Counted from the model's own fields: five in attention, three in an MLP, six in a layer with experts, and the head."""
    config = load_glm_config(name)
    dense, layers = config.first_k_dense_replace, config.num_hidden_layers
    inventory = build_inventory(config, AdapterConfig(rank=1, alpha=1))
    assert len(inventory.targets) == 5 * layers + 3 * dense + 6 * (layers - dense) + 1
    assert inventory.targets == tuple(item.name for item in projections(config))
    star = build_inventory(config, AdapterConfig(rank=1, alpha=1, targets=["*"]))
    assert star == inventory


def test_every_shipped_adapter_takes_every_target_of_glm_5_2() -> None:
    adapters = []
    for file in sorted(EXAMPLES.rglob("*.yaml")):
        document = yaml.safe_load(file.read_text())
        if isinstance(document, dict) and "model" in document:
            adapters.append(load_run_config(file).adapter)
        elif isinstance(document, dict) and "alpha" in document:
            adapters.append(load_adapter_config(file))
    assert len(adapters) >= 5
    for adapter in adapters:
        assert adapter.lora_target_modules is None
        assert build_inventory(GLM_CONFIG, adapter).targets == tuple(item.name for item in GLM)


@pytest.mark.parametrize("entry", ["gate_proj", "*.mlp.experts.*.gate_proj", "*.7.mlp.*.gate_proj"])
def test_gate_is_taken_without_up(entry: str) -> None:
    inventory = build_inventory(GLM_CONFIG, AdapterConfig(rank=1, alpha=1, targets=[entry]))
    assert {name.rpartition(".")[2] for name in inventory.targets} == {"gate_proj"}


def test_a_manifest_may_give_every_target_its_own_rank_and_counts_add_up() -> None:
    entries = [
        {"pattern": "*.self_attn.q_*", "count": 156, "rank": 8},
        {"pattern": "*.mlp.experts.*", "count": 225, "rank": 2},
        {"pattern": "lm_head", "count": 1},
    ]
    inventory = build_inventory(GLM_CONFIG, AdapterConfig(rank=4, alpha=8, targets=entries))
    assert len(inventory.targets) == sum(entry["count"] for entry in entries)
    for factor in inventory.factors:
        expected = {"attention": 8, "routed_experts": 2, "lm_head": 4}[factor.region]
        assert factor.rank == expected
        assert factor.shape[-2 if factor.side == "A" else -1] == expected


def test_an_entry_without_a_rank_leaves_the_rank_to_another_entry() -> None:
    """The general entry, then the exception; in either order."""
    entries: list[Any] = ["*.self_attn.*", {"pattern": "o_proj", "count": 78, "rank": 2}]
    for order in (entries, entries[::-1]):
        inventory = build_inventory(GLM_CONFIG, AdapterConfig(rank=4, alpha=8, targets=order))
        ranks = {name: inventory.by_name[f"{name}.lora_A"].rank for name in inventory.targets}
        assert len(ranks) == 390
        assert all(rank == (2 if name.endswith("o_proj") else 4) for name, rank in ranks.items())


@pytest.mark.parametrize(
    "entries",
    [
        ["o_proj"] * 10**5,
        [f"*.layers.{number}.*" for number in range(10**5)],
        [item.name for item in GLM],
        ["o_proj" * 10**5],
        ["a." * 10**5],
    ],
    ids=["one entry 100,000 times", "100,000 entries", "every name", "long", "many dots"],
)
def test_a_huge_list_is_answered_at_once(entries: list[str]) -> None:
    start = time.perf_counter()
    try:
        assert len(select_targets(GLM, entries)) == 850
    except TargetError as error:
        assert len(str(error)) < 300
    assert time.perf_counter() - start < 1.0
