"""Traps that public configs have set: each an input and its answer, through ``megatron-xorl inspect`` and the library.

A refusal is exit 2 and one line on stderr that names the key, what was found and what is supported; an accepted input gives
the answer of the file it stems from. The control is that file itself.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_xorl.cli import main
from megatron_xorl.config.model import GlmConfig, load_glm_config, preset_dict
from megatron_xorl.errors import ConfigError, WeightsError
from tests.base.measures import norm_pairs
from tests.base.subject import Subject
from tests.base.variants import VARIANTS, WEIGHTS, write_variant

THETA = 8_000_000
NESTED = {"rope_type": "default", "rope_theta": THETA}


def edited(base: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A preset's ``config.json`` with changes; ``...`` takes a key out."""
    raw = preset_dict(base) | changes
    return {key: value for key, value in raw.items() if value is not ...}


def written(folder: Path, base: str, changes: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(edited(base, changes)), encoding="utf-8")
    return path


def inspect(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the verb."""
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(path), "--json"])
    told = capsys.readouterr()
    return int(left.value.code or 0), told.out, told.err


SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "head_dim absent": ("glm-5.2", {"head_dim": ...}),
    "head_dim 192": ("glm-5.2", {"head_dim": 192}),
    "head_dim 64": ("glm-5.2", {"head_dim": 64}),
    "head_dim 256": ("glm-5.2", {"head_dim": 256}),
    "head_dim null": ("glm-5.2", {"head_dim": None}),
    "rope width from the whole head": ("glm-5.2", {"qk_rope_head_dim": ..., "head_dim": 192}),
    "theta nested": ("glm-5.2", {"rope_parameters": NESTED}),
    "theta nested, no type": ("glm-5.2", {"rope_parameters": {"rope_theta": THETA}}),
    "theta flat": ("glm-5.2", {"rope_parameters": ..., "rope_theta": THETA}),
    "theta flat, empty group": ("glm-5.2", {"rope_parameters": {}, "rope_theta": THETA}),
    "theta in the older group": ("glm-5.2", {"rope_parameters": ..., "rope_scaling": NESTED}),
    "theta twice, equal": ("glm-5.2", {"rope_theta": float(THETA)}),
    "no scaling, said by a null": ("glm-5.2", {"rope_scaling": None}),
    "no scaling, said by a type": ("glm-5.2", {"rope_scaling": {"type": "default"}}),
    "no scaling, said by a factor of one": ("glm-5.2", {"rope_scaling": {"factor": 1.0}}),
    "num_experts equal": ("tiny", {"num_experts": 8}),
    "num_experts of the big model": ("tiny", {"num_experts": 256}),
    "num_local_experts of another": ("tiny", {"num_local_experts": 4}),
    "biases said to be absent": ("glm-5.2", {"attention_bias": False, "mlp_bias": False}),
    "biases not mentioned": ("glm-5.2", {"attention_bias": ..., "hidden_act": ...}),
    "dtype null": ("glm-5.2", {"dtype": None}),
    "dtype in the older spelling": ("glm-5.2", {"dtype": ..., "torch_dtype": "bfloat16"}),
    "schedule from the period": ("glm-5.2", {"indexer_types": ...}),
    "schedule from a pattern": (
        "glm-5.2",
        {"indexer_types": ..., "index_topk_pattern": "FF" + "FSSS" * 19},
    ),
    "dense layers from the list alone": ("glm-5.2", {"first_k_dense_replace": ...}),
    "dense layers from the number alone": ("glm-5.2", {"mlp_layer_types": ...}),
}


@pytest.mark.parametrize("case", SAME)
def test_a_trap_gives_the_answer_of_the_untouched_file(
    case: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    base, changes = SAME[case]
    path = written(tmp_path, base, changes)
    assert load_glm_config(path) == load_glm_config(base)
    caplog.clear()
    code, out, _ = inspect(path, capsys)
    told = [record.getMessage() for record in caplog.records]
    main_code, expected, _ = inspect(written(tmp_path, base, {}), capsys)
    assert (code, main_code) == (0, 0) and json.loads(out) == json.loads(expected)
    if "another" in case or "big model" in case:
        (key,) = changes
        assert told == [f"{path}: {key} is {changes[key]}; n_routed_experts (8) is used"]
    else:
        assert told == []


def test_the_untouched_answer_is_the_published_geometry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    glm = load_glm_config(written(tmp_path, "glm-5.2", {}))
    assert (glm.qk_rope_head_dim, glm.qk_nope_head_dim, glm.qk_head_dim) == (64, 192, 256)
    assert (glm.rope_theta, glm.n_routed_experts) == (8e6, 256)
    report = json.loads(inspect(tmp_path / "config.json", capsys)[1])
    assert (len(report["indexer"]["full"]), len(report["indexer"]["shared"])) == (21, 57)


@pytest.mark.parametrize(
    ("value", "ids"), [(154829, (154829,)), ([154820, 154827], (154820, 154827))]
)
def test_end_tokens_are_one_or_a_list(
    value: Any, ids: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "glm-5.2", {"eos_token_id": value})
    assert load_glm_config(path).eos_token_id == ids
    assert inspect(path, capsys)[0] == 0


@pytest.mark.parametrize(("mtp", "layers"), [(..., 0), (None, 0), (0, 0), (1, 1), (2, 2)])
def test_mtp_layers_are_counted_and_nothing_else_changes(
    mtp: Any, layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "glm-5.1", {"num_nextn_predict_layers": mtp})
    report = json.loads(inspect(path, capsys)[1])
    # GLM-5.1 owns an indexer in every layer: five tensors more on each of 57 layers than GLM-5.2.
    assert report["hf_tensors"] == 58_794 + 57 * 5 + 791 * layers
    assert load_glm_config(path).num_nextn_predict_layers == layers


def test_offset_two_is_what_an_absent_key_means_and_differs_from_three(tmp_path: Path) -> None:
    # transformers' fallback; the shipped file says 3, and other engines fall back to 0 or 1.
    derived = {"indexer_types": ..., "index_skip_topk_offset": ...}
    fallback = load_glm_config(written(tmp_path, "glm-5.2", derived))
    assert fallback.full_indexer_layers == (0, *range(1, 78, 4))
    assert load_glm_config("glm-5.2").full_indexer_layers == (0, 1, *range(2, 78, 4))


LONG = "x" * 5000
# key -> raw value, and what the message must say was found and is supported
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = (
    {
        "another model": ({"model_type": "deepseek_v3"}, ("'deepseek_v3'", "'glm_moe_dsa'")),
        "no model": ({"model_type": ...}, ("model_type is None", "'glm_moe_dsa'")),
        "a very long model": ({"model_type": LONG}, ("model_type is 'xxx", "'glm_moe_dsa'")),
        "only head_dim": (
            {"qk_rope_head_dim": ..., "qk_head_dim": ..., "head_dim": 64},
            ("qk_rope_head_dim is missing", "head_dim is not the rope width"),
        ),
        "rope wider than told": (
            {"qk_rope_head_dim": 192},
            ("qk_head_dim is 256", "qk_nope_head_dim + qk_rope_head_dim is 384"),
        ),
        "head narrower than its part": (
            {"qk_rope_head_dim": ..., "qk_head_dim": 192},
            ("qk_head_dim is 192", "more than qk_nope_head_dim (192)"),
        ),
        "odd rope": (
            {"qk_rope_head_dim": 63, "qk_head_dim": ...},
            ("qk_rope_head_dim is 63", "even"),
        ),
        "theta nowhere": (
            {"rope_parameters": {"rope_type": "default"}},
            ("rope_theta is missing", "rope_parameters", "top level"),
        ),
        "no rope keys": ({"rope_parameters": ...}, ("rope_theta is missing",)),
        "theta twice": (
            {"rope_theta": 1e6},
            ("rope_parameters.rope_theta is 8e+06", "rope_theta is 1e+06", "agree"),
        ),
        "theta twice in groups": (
            {"rope_scaling": {"rope_theta": 10000}},
            ("rope_scaling.rope_theta is 10000", "rope_parameters.rope_theta is 8e+06"),
        ),
        "theta a string": ({"rope_parameters": {"rope_theta": "8e6"}}, ("rope_theta is '8e6'",)),
        "theta zero": ({"rope_parameters": {"rope_theta": 0}}, ("rope_theta is 0", "positive")),
        "rope a list": ({"rope_parameters": []}, ("rope_parameters is []", "mapping")),
        "rope false": ({"rope_scaling": False}, ("rope_scaling is False", "mapping")),
        "experts elsewhere": (
            {"n_routed_experts": ..., "num_experts": 256},
            ("n_routed_experts missing", "num_experts is not read"),
        ),
        "eos a word": ({"eos_token_id": "<|user|>"}, ("eos_token_id is '<|user|>'", "token id")),
        "eos outside": ({"eos_token_id": [154880]}, ("eos_token_id is 154880", "0 to 154879")),
        "eos empty": ({"eos_token_id": []}, ("eos_token_id is []", "token id")),
        "attention bias": ({"attention_bias": True}, ("attention_bias is True", "False")),
        "mlp bias": ({"mlp_bias": True}, ("mlp_bias is True", "False")),
        "another activation": ({"hidden_act": "gelu"}, ("hidden_act is 'gelu'", "'silu'")),
        "another score": ({"scoring_func": "softmax"}, ("scoring_func is 'softmax'", "'sigmoid'")),
        "another choice": ({"topk_method": "greedy"}, ("topk_method is 'greedy'", "'noaux_tc'")),
        "a bf16 router": (
            {"moe_router_dtype": "bfloat16"},
            ("moe_router_dtype is 'bfloat16'", "'float32'"),
        ),
        "tied embeddings": (
            {"tie_word_embeddings": True},
            ("tie_word_embeddings is True", "False"),
        ),
        "half the head rotated": (
            {"partial_rotary_factor": 0.5},
            ("partial_rotary_factor is 0.5", "1.0"),
        ),
        "dropout": ({"attention_dropout": 0.1}, ("attention_dropout is 0.1", "0.0")),
        "grouped keys": ({"num_key_value_heads": 8}, ("num_key_value_heads is 8", "64")),
        "full attention": (
            {"layer_types": ["full_attention"] * 78},
            ("layer_types says 'full_attention' for layer 0", "'deepseek_sparse_attention'"),
        ),
        "too few kinds": (
            {"layer_types": ["deepseek_sparse_attention"]},
            ("layer_types is ['deepseek_sparse_attention']", "78 layers"),
        ),
        "sparse before dense": (
            {"mlp_layer_types": ["sparse"] + ["dense"] * 77},
            ("mlp_layer_types is ['sparse'", "'dense' for the first layers"),
        ),
        "dense layers said twice": (
            {"first_k_dense_replace": 1},
            ("first_k_dense_replace is 1", "mlp_layer_types has 3"),
        ),
        "a shared first layer": (
            {"indexer_types": ["shared"] + ["full"] * 77},
            ("indexer_types makes layer 0 shared", "full"),
        ),
        "a schedule of 4": ({"indexer_types": ["full"] * 4}, ("indexer_types has 4", "78 layers")),
        "a pattern of mappings": (
            {"indexer_types": ..., "index_topk_pattern": [{}] * 78},
            ("index_topk_pattern says {} for layer 0", "full or shared"),
        ),
        "a pattern of X": (
            {"indexer_types": ..., "index_topk_pattern": "X" * 78},
            ("index_topk_pattern says 'X' for layer 0", "F or S"),
        ),
        "MTP true": ({"num_nextn_predict_layers": True}, ("num_nextn_predict_layers is True", "0")),
        "MTP negative": ({"num_nextn_predict_layers": -1}, ("num_nextn_predict_layers is -1", "0")),
        "dtype": ({"dtype": "float8_e4m3fn"}, ("dtype is 'float8_e4m3fn'", "bfloat16")),
        "older dtype": (
            {"dtype": ..., "torch_dtype": "int8"},
            ("torch_dtype is 'int8'", "bfloat16"),
        ),
        "more experts a token than there are": (
            {"num_experts_per_tok": 257},
            ("num_experts_per_tok is 257", "256"),
        ),
        "groups that do not divide": ({"n_group": 3}, ("n_group is 3", "256 experts")),
        "normalised, perhaps": ({"norm_topk_prob": 1}, ("norm_topk_prob is 1", "true or false")),
        "no epsilon": ({"rms_norm_eps": 0}, ("rms_norm_eps is 0", "positive")),
    }
    | {
        f"{scaling} in {key}": (
            {"rope_parameters": ..., "rope_theta": THETA, key: {word: scaling, "factor": 4.0}},
            (f"{key} has {word} '{scaling}'", "'default' (no scaling)"),
        )
        for scaling in ("yarn", "linear", "dynamic", "llama3", "longrope")
        for key, word in (("rope_scaling", "type"), ("rope_parameters", "rope_type"))
    }
    | {
        f"a factor in {key}": (
            {"rope_parameters": ..., "rope_theta": THETA, key: {"factor": 4.0}},
            (f"{key}.factor is 4.0", "only 1 (no scaling)"),
        )
        for key in ("rope_scaling", "rope_parameters")
    }
    | {
        f"{key} {value!r}": ({key: value}, (f"{key} is {value!r}", "whole number of at least 1"))
        for key in ("hidden_size", "kv_lora_rank", "index_topk", "moe_intermediate_size")
        for value in (0, -1, True, "6144", 6144.0)
    }
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_in_one_line_that_names_it(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, says = REFUSED[case]
    path = written(tmp_path, "glm-5.2", changes)
    code, out, err = inspect(path, capsys)
    assert (code, out) == (2, ""), err
    assert err.startswith(f"megatron-xorl: {path}: ") and err.count("\n") == 1
    assert len(err) < 500 + len(str(path))
    for text in says:
        assert text in err
    with pytest.raises(ConfigError) as caught:
        GlmConfig.from_dict(edited("glm-5.2", changes), str(path))
    assert err == f"megatron-xorl: {caught.value}\n"


# ---- what a config means for the built model -------------------------------------------------------


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("traps") / "model"
    return Subject(write_variant(folder, VARIANTS["5.2-like"], WEIGHTS["unit gain"]))


def test_every_norm_of_the_built_model_has_its_own_epsilon(subject: Subject) -> None:
    found = {
        name: module.eps for name, module in subject.model.named_modules() if hasattr(module, "eps")
    }
    small = ("q_layernorm", "kv_layernorm", "k_norm")
    decoder = ("input_layernorm", "pre_mlp_layernorm", "final_layernorm")
    assert {name.rpartition(".")[2] for name in found} == {*small, *decoder}
    assert len(found) == 7 * 4 + 1 + len(subject.glm.full_indexer_layers)
    for name, eps in found.items():
        assert eps == (1e-6 if name.endswith(small) else 1e-5), name
    for ours, theirs in norm_pairs(subject):
        assert ours.eps == getattr(theirs, "variance_epsilon", getattr(theirs, "eps", None))


def test_a_config_may_ask_for_another_latent_epsilon(subject: Subject, tmp_path: Path) -> None:
    other = replace(subject.glm, latent_norm_eps=1e-5, rms_norm_eps=1e-3)
    raw = json.loads((subject.directory / "config.json").read_text())
    raw |= {"latent_norm_eps": 1e-5, "rms_norm_eps": 1e-3}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for file in subject.directory.glob("model*"):
        (tmp_path / file.name).symlink_to(file)
    model = Subject(tmp_path).model
    assert model.glm_config == other
    layer = model.decoder.layers[0]
    assert layer.self_attention.q_layernorm.eps == layer.self_attention.kv_layernorm.eps == 1e-5
    assert layer.input_layernorm.eps == model.decoder.final_layernorm.eps == 1e-3


def test_eight_experts_are_built_whatever_num_experts_says(
    subject: Subject, tmp_path: Path
) -> None:
    raw = json.loads((subject.directory / "config.json").read_text()) | {"num_experts": 256}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for file in subject.directory.glob("model*"):
        (tmp_path / file.name).symlink_to(file)
    model = Subject(tmp_path).model
    assert model.decoder.layers[3].mlp.experts.linear_fc1.base.shape[0] == 8


# ---- indexer tensors where the schedule has none, and the other way round ---------------------------


def _rewritten(subject: Subject, out: Path, change: Any) -> Path:
    out.mkdir()
    (out / "config.json").write_bytes((subject.directory / "config.json").read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    for file in subject.directory.glob("model*.safetensors"):
        tensors |= load_file(file)
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_indexer_tensors_on_every_layer_are_refused_by_name(
    subject: Subject, tmp_path: Path
) -> None:
    """Some converted files repeat the source's indexer on its followers; loaded silently they would seem to be used."""

    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.2.self_attn.indexer." in name]:
            tensors[name.replace(".layers.2.", ".layers.4.")] = tensors[name].clone()

    with pytest.raises(WeightsError) as caught:
        Subject(_rewritten(subject, tmp_path / "more", repeat)).loaded(torch.float32)
    message = str(caught.value)
    assert "model.layers.4.self_attn.indexer.k_norm.bias and 4 more" in message
    assert "shares another layer's indexer" in message and "correct indexer_types" in message


def test_a_full_layer_without_indexer_tensors_is_refused_by_name(
    subject: Subject, tmp_path: Path
) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.6.self_attn.indexer." in name]:
            del tensors[name]

    with pytest.raises(WeightsError) as caught:
        Subject(_rewritten(subject, tmp_path / "fewer", drop)).loaded(torch.float32)
    assert "model.layers.6.self_attn.indexer." in str(caught.value)
    assert "is missing" in str(caught.value)


def test_the_same_tensors_rewritten_load(subject: Subject, tmp_path: Path) -> None:
    Subject(_rewritten(subject, tmp_path / "same", lambda tensors: None)).loaded(torch.float32)
