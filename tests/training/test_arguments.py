"""The table of Megatron's arguments: each row refuses a bad value in full; what we write, Megatron's own parser reads back."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.config.model import load_glm_config
from tests.worlds import run_world

pytestmark = pytest.mark.dist


def check_every_rule() -> list[dict[str, Any]]:
    """Give every rule's argument a value that is not allowed; return what was said about it."""
    from megatron_xorl.errors import ConfigError
    from megatron_xorl.training.arguments import RULES, check_arguments

    good = {rule.name: rule.allowed[0] for rule in RULES}
    good |= {"tensor_model_parallel_size": 1, "sequence_parallel": False, "num_layers": 4}
    good |= {"seq_length": 48, "context_parallel_size": 1}
    check_arguments(Namespace(**good))
    found = []
    for rule in RULES:
        bad = "another" if isinstance(rule.allowed[0], str) else (not rule.allowed[0])
        bad = 7 if bad in rule.allowed else bad
        said = ""
        try:
            check_arguments(Namespace(**(good | {rule.name: bad})))
        except ConfigError as error:
            said = str(error)
        for value in rule.allowed:
            check_arguments(Namespace(**(good | {rule.name: value})))
        found.append({**vars(rule), "kind": rule.kind, "bad": repr(bad), "said": said})
    try:
        check_arguments(Namespace(**(good | {"tensor_model_parallel_size": 2, "fp16": True})))
    except ConfigError as error:
        found.append({"name": "two at once", "said": str(error)})
    cut = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 3}
    check_arguments(Namespace(**(good | cut | {"seq_length": 24})))
    try:
        check_arguments(Namespace(**(good | cut | {"seq_length": 20})))
    except ConfigError as error:
        found.append({"name": "a sequence that does not cut evenly", "said": str(error)})
    return found


def test_every_rule_refuses_a_bad_value_with_argument_value_reason_and_remedy() -> None:
    (found,) = run_world(check_every_rule, 1, process_group=False)
    sequence, both = found.pop(), found.pop()
    assert "seq_length 20 does not cut evenly over cp 3 and tp 2" in sequence["said"]
    assert sequence["said"].endswith("a multiple of 6; nearest legal: 18, 24")
    assert both["said"].count("\n") == 2
    assert "fp16 is True" in both["said"]
    assert "pass --sequence-parallel" in both["said"]
    assert len(found) == len({rule["name"] for rule in found}) > 40
    for rule in found:
        line = rule["said"].splitlines()[-1]
        assert rule["said"].count("\n") == 1, rule["name"]
        assert f"{rule['name']} is {rule['bad']}: {rule['reason']}" in line
        remedy = f"pass {' '.join(rule['flags'])}" if rule["flags"] else "leave it out"
        assert line.endswith(remedy)
        assert rule["kind"] == ("forced" if rule["flags"] else "refused")
    # Written by hand from the list that the project promises.
    promised = {
        *("gradient_accumulation_fusion", "overlap_param_gather_with_optimizer_step", "fp16"),
        *("fp8_param_gather", "use_megatron_fsdp", "cuda_graph_impl", "moe_shared_expert_overlap"),
        *("moe_expert_capacity_factor", "moe_router_bias_update_rate", "calculate_per_token_loss"),
    }
    assert promised <= {rule["name"] for rule in found}


def names_known_to_megatron() -> list[str]:
    """Return the rules' names that Megatron's parser has no argument for."""
    from megatron_xorl.parallel.cpu import use_cpu

    use_cpu()
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron_xorl.training.arguments import RULES

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {action.dest for action in parser._actions}
    return [rule.name for rule in RULES if rule.name not in known]


def test_every_rule_names_an_argument_that_megatron_has() -> None:
    # A misspelt row would never refuse anything.
    assert run_world(names_known_to_megatron, 1, process_group=False) == [[]]


def parse(preset: str, forget: str | None) -> dict[str, Any]:
    """Parse what we write for a model with Megatron's parser; return the fields of the transformer config it builds."""
    from megatron_xorl.parallel.cpu import use_cpu

    use_cpu()
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_xorl.specs import model_fields
    from megatron_xorl.training.arguments import (
        check_arguments,
        check_transformer_config,
        forced_arguments,
        model_arguments,
    )

    glm = load_glm_config(preset)
    written = [*model_arguments(glm), *forced_arguments()]
    if forget is not None:
        place = written.index(forget)
        del written[place : place + (2 if not written[place + 1].startswith("--") else 1)]
    sys.argv = ["pretrain", *written, *("--micro-batch-size", "1", "--seq-length", "64")]
    sys.argv += ["--lr", "1e-3", "--train-iters", "1", "--distributed-backend", "gloo"]
    args = parse_and_validate_args()
    check_arguments(args)
    config = core_transformer_config_from_args(args)
    check_transformer_config(config, glm)
    return {name: getattr(config, name) for name in model_fields(glm)}


# (preset, some of its numbers as they stand in the published config.json)
PUBLISHED = [
    ("tiny", {"num_layers": 4, "hidden_size": 128, "kv_lora_rank": 128, "rotary_base": 8000000}),
    (
        "glm-5.2",
        {"num_layers": 78, "hidden_size": 6144, "q_lora_rank": 2048, "num_moe_experts": 256},
    ),
    pytest.param(
        "glm-5.1",
        {"num_layers": 78, "moe_router_topk": 8, "qk_head_dim": 192, "v_head_dim": 256},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("preset", "published"), PUBLISHED, ids=lambda value: str(value)[:8])
def test_megatrons_parser_gives_back_the_model_that_was_written(
    preset: str, published: dict[str, Any]
) -> None:
    (fields,) = run_world(parse, 1, preset, None, process_group=False)
    glm = load_glm_config(preset)
    assert {name: fields[name] for name in published} == published
    assert fields["moe_layer_freq"] == [0] * glm.first_k_dense_replace + [1] * (
        glm.num_hidden_layers - glm.first_k_dense_replace
    )
    assert (fields["layernorm_epsilon"], fields["gated_linear_unit"]) == (1e-5, True)


@pytest.mark.parametrize(
    "flag", ["--kv-lora-rank", pytest.param("--disable-bias-linear", marks=pytest.mark.slow)]
)
def test_a_launch_that_leaves_out_what_decides_the_model_is_refused(flag: str) -> None:
    from megatron_xorl.errors import ConfigError

    with pytest.raises(ConfigError, match=f"another model than the base(.|\n)*pass {flag}"):
        run_world(parse, 1, "tiny", flag, process_group=False)


def compose_and_parse(words: list[str], directory: str) -> dict[str, Any]:
    """Let Megatron's parser read what our entry passes on for a run with ``words``."""
    from megatron_xorl.parallel.cpu import use_cpu

    use_cpu()
    from megatron.training.arguments import parse_and_validate_args

    from megatron_xorl.training.pretrain import add_arguments, compose

    given = ["--hf-model", directory, "--adapter-config", "a.yaml", "--chat-data", "t.jsonl"]
    given += ["--micro-batch-size", "1", "--seq-length", "64", "--lr", "1e-3", "--train-iters", "1"]
    sys.argv = ["pretrain", *compose([*given, *words])]
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    names = ("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size")
    return {name: getattr(args, name) for name in names}


SIZE = "--pipeline-model-parallel-size"
LAYOUT = "--pipeline-model-parallel-layout"


def test_our_entry_cuts_the_pipeline_legally_unless_the_user_says_where(tiny_dir: Path) -> None:
    # Megatron's even cut of the tiny model, 2|2, parts layer 2 from layer 1; its parser is content with ours.
    (found,) = run_world(
        compose_and_parse,
        1,
        [SIZE, "2"],
        str(tiny_dir),
        process_group=False,
        env={"WORLD_SIZE": "2"},
    )
    assert str(found["pipeline_model_parallel_layout"]) == "Et|t*3L"
    assert found["virtual_pipeline_model_parallel_size"] is None

    from megatron_xorl.training.arguments import model_arguments

    glm = load_glm_config("glm-5.2")
    for words, layout in (
        ([], None),
        ([SIZE, "1"], None),
        ([SIZE, "4"], "Et*18|t*20|t*20|t*20L"),
        ([f"{SIZE}=2", "--bf16"], "Et*38|t*40L"),
        ([SIZE, "2", "--num-virtual-stages-per-pipeline-rank", "2"], "Et*18|t*20|t*20|t*20L"),
        ([SIZE, "2", LAYOUT, "Et*42|t*36L"], None),
        ([SIZE, "2", f"{LAYOUT}=Et*42|t*36L"], None),
        ([SIZE, "2", "--decoder-first-pipeline-num-layers", "6"], None),
        ([SIZE, "many"], None),
    ):
        written = model_arguments(glm, words)
        assert (written[written.index(LAYOUT) + 1] if LAYOUT in written else None) == layout, words


def test_more_stages_than_layers_that_one_can_begin_on_are_refused_at_once() -> None:
    from megatron_xorl.errors import LayoutError
    from megatron_xorl.training.arguments import model_arguments

    with pytest.raises(LayoutError, match="21 such layers"):
        model_arguments(load_glm_config("glm-5.2"), [SIZE, "22"])
