"""Errors of this package: one base, the standard type each replaces, and one readable line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_xorl import errors
from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.layout import ParallelLayout, check_layout
from megatron_xorl.config.model import GlmConfig, load_glm_config, preset_dict
from megatron_xorl.config.run import RunConfig
from megatron_xorl.config.yaml import parse_yaml
from megatron_xorl.errors import ConfigError, LayoutError, MegatronXorlError, TargetError

STANDARD = {
    "AdapterError": ValueError,
    "CheckpointError": RuntimeError,
    "ConfigError": ValueError,
    "DataError": ValueError,
    "FormatError": ValueError,
    "LayoutError": ValueError,
    "PlatformError": RuntimeError,
    "ReplicaError": RuntimeError,
    "TargetError": ValueError,
    "WeightsError": ValueError,
}


def test_every_error_is_ours_and_the_standard_type_it_replaces() -> None:
    classes = {
        name
        for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, Exception)
    }
    assert classes == set(STANDARD) | {"MegatronXorlError"}
    for name, standard in STANDARD.items():
        assert issubclass(getattr(errors, name), MegatronXorlError)
        assert issubclass(getattr(errors, name), standard)


def config(**changes: object) -> GlmConfig:
    return GlmConfig.from_dict(preset_dict("tiny") | changes, "config.json")


def inventory(**changes: object) -> None:
    build_inventory(load_glm_config("tiny"), AdapterConfig(rank=4, alpha=8, **changes))


# (what goes wrong, the call, the error, what was found, what was expected or what to do)
TABLE: list[tuple[str, Callable[[], object], type[Exception], str, str]] = [
    (
        "no model there",
        lambda: load_glm_config("no/such/model"),
        ConfigError,
        "no/such/model",
        "a config.json, a directory",
    ),
    ("another model", lambda: config(model_type="llama"), ConfigError, "'llama'", "'glm_moe_dsa'"),
    (
        "a missing size",
        lambda: config(hidden_size=None),
        ConfigError,
        "hidden_size missing",
        "expected every size",
    ),
    ("two thetas", lambda: config(rope_theta=1e4), ConfigError, "10000", "remove one"),
    (
        "scaled rope",
        lambda: config(rope_scaling={"type": "yarn"}),
        ConfigError,
        "'yarn'",
        "only 'default'",
    ),
    (
        "an unquoted glob",
        lambda: parse_yaml("a: [*.experts.*]"),
        ConfigError,
        "begins with *",
        "quote the pattern",
    ),
    (
        "scope: on",
        lambda: AdapterConfig(rank=1, alpha=1, scope=True),
        ConfigError,
        "boolean true",
        "expected one of all",
    ),
    (
        "an unknown key",
        lambda: AdapterConfig(rank=1, alpha=1, scop=1),
        ConfigError,
        "'scop'",
        "did you mean 'scope'",
    ),
    ("no alpha", lambda: AdapterConfig(rank=1), ConfigError, "alpha is missing", "alpha: 32"),
    (
        "an empty run",
        lambda: RunConfig.from_dict({}),
        ConfigError,
        "run: model is missing",
        "output is missing",
    ),
    (
        "no match",
        lambda: inventory(targets=["*.shared_expert.*_proj"]),
        TargetError,
        "matches nothing",
        "shared_experts",
    ),
    (
        "half a bank",
        lambda: inventory(targets=["*.experts.3.up_proj"]),
        TargetError,
        "1 of the 8 experts",
        "use ",
    ),
    (
        "nothing trains",
        lambda: inventory(targets=["o_proj"], scope="moe"),
        TargetError,
        "nothing would train",
        "widen the scope",
    ),
    (
        "a cut inside a block",
        lambda: check_layout(load_glm_config("tiny"), ParallelLayout(tp=8, world=8)),
        LayoutError,
        "3.5 FP8 blocks",
        "nearest legal: 1, 2, 4",
    ),
    (
        "experts not divided",
        lambda: check_layout(load_glm_config("tiny"), ParallelLayout(ep=3, world=3)),
        LayoutError,
        "ep 3 does not divide",
        "nearest legal: 1, 2, 4",
    ),
]


@pytest.mark.parametrize(
    ("call", "kind", "found", "expected"), [pytest.param(*row[1:], id=row[0]) for row in TABLE]
)
def test_a_message_says_what_was_found_and_what_to_do_on_one_line(
    call: Callable[[], object], kind: type[Exception], found: str, expected: str
) -> None:
    with pytest.raises(MegatronXorlError) as caught:
        call()
    assert type(caught.value) is kind
    message = str(caught.value)
    assert found in message
    assert expected in message
    assert "\n" not in message


def test_a_right_input_is_none_of_these(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(preset_dict("tiny")))
    glm = load_glm_config(tmp_path)
    check_layout(glm, ParallelLayout(tp=2, ep=2, world=2))
    assert build_inventory(
        glm, AdapterConfig(rank=4, alpha=8, targets=["*.shared_experts.*_proj"])
    ).targets


def test_nearest_ranks_likeness_and_finds_nothing_in_nonsense() -> None:
    assert errors.nearest("q_a_porj", ["q_a_proj", "q_b_proj", "lm_head"], n=1) == ["q_a_proj"]
    assert errors.nearest("zzz", ["q_a_proj", "lm_head"]) == []
