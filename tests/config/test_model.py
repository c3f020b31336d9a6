"""The model configuration: what is read, what is derived, what is refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.config.model import PRESETS, GlmConfig, load_glm_config, preset_dict
from megatron_xorl.errors import ConfigError

# SHA-256 of the sorted JSON of the public GLM-5.2-FP8 config.json.
PUBLIC_GLM_5_2 = "fc7cdc8c3648c9e7d279a4add44f2ef7488f63ee78be80118842cea6f9602255"


def tiny(**changes: Any) -> dict[str, Any]:
    raw = preset_dict("tiny") | changes
    return {key: value for key, value in raw.items() if value is not ...}


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        GlmConfig.from_dict(raw, "config.json")
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


def test_the_glm_5_2_preset_is_the_public_file() -> None:
    text = json.dumps(preset_dict("glm-5.2"), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == PUBLIC_GLM_5_2


def test_glm_5_2_has_the_published_geometry() -> None:
    glm = load_glm_config("glm-5.2")
    assert (glm.num_hidden_layers, glm.hidden_size, glm.vocab_size) == (78, 6144, 154880)
    assert (glm.qk_nope_head_dim, glm.qk_rope_head_dim, glm.qk_head_dim, glm.v_head_dim) == (
        192,
        64,
        256,
        256,
    )
    assert (glm.n_routed_experts, glm.num_experts_per_tok, glm.first_k_dense_replace) == (256, 8, 3)
    assert (glm.rope_theta, glm.max_position_embeddings) == (8e6, 1048576)
    assert glm.full_indexer_layers == (0, 1, *range(2, 78, 4))
    assert len(glm.shared_indexer_layers) == 57
    assert glm.eos_token_id == (154820, 154827, 154829)
    assert glm.weight_block_size == (128, 128)
    assert (glm.rms_norm_eps, glm.latent_norm_eps, glm.indexer_norm_eps) == (1e-5, 1e-6, 1e-6)


@pytest.mark.parametrize("name", ["glm-5", "glm-5.1"])
def test_the_older_models_own_an_indexer_in_every_layer_and_differ_in_theta(name: str) -> None:
    glm, newest = load_glm_config(name), load_glm_config("glm-5.2")
    assert glm.full_indexer_layers == tuple(range(78))
    assert (glm.rope_theta, glm.max_position_embeddings, glm.weight_block_size) == (
        1e6,
        202752,
        None,
    )
    same = dataclasses.replace(
        glm,
        rope_theta=8e6,
        max_position_embeddings=1048576,
        indexer_types=newest.indexer_types,
        weight_block_size=(128, 128),
        modules_to_not_convert=newest.modules_to_not_convert,
    )
    assert same == newest


def test_the_tiny_preset_keeps_the_ragged_block_rows_of_the_real_model() -> None:
    glm = load_glm_config("tiny")
    rows = glm.weight_block_size[0] if glm.weight_block_size else 0
    assert (glm.kv_lora_rank + glm.qk_rope_head_dim) / rows == 4.5
    assert (glm.qk_nope_head_dim + glm.v_head_dim) / rows == 3.5
    assert glm.qk_nope_head_dim / rows == 1.5
    assert glm.indexer_types == ("full", "full", "shared", "shared")
    assert glm.eos_token_id == (256, 258, 259)
    assert glm.index_n_heads >= 16


def test_every_preset_loads_and_is_frozen() -> None:
    for name in PRESETS:
        glm = load_glm_config(name)
        with pytest.raises(dataclasses.FrozenInstanceError):
            glm.hidden_size = 1  # type: ignore[misc]


@pytest.mark.parametrize("head_dim", [..., 192, 64, 256])
def test_the_rope_width_never_comes_from_head_dim(head_dim: Any) -> None:
    raw = preset_dict("glm-5.2") | {"head_dim": head_dim}
    if head_dim is ...:
        del raw["head_dim"]
    glm = GlmConfig.from_dict(raw)
    assert (glm.qk_rope_head_dim, glm.qk_nope_head_dim, glm.qk_head_dim) == (64, 192, 256)


def test_without_its_own_key_the_rope_width_is_the_rest_of_the_head() -> None:
    assert GlmConfig.from_dict(tiny(qk_rope_head_dim=...)).qk_rope_head_dim == 16
    assert "head_dim is not the rope width" in refused(tiny(qk_rope_head_dim=..., qk_head_dim=...))
    assert "is 64" in refused(tiny(qk_head_dim=72))


def test_theta_is_read_from_either_place() -> None:
    nested = {"rope_type": "default", "rope_theta": 5e5}
    bare = {"rope_type": "default"}
    assert GlmConfig.from_dict(tiny(rope_parameters=nested)).rope_theta == 5e5
    assert GlmConfig.from_dict(tiny(rope_parameters=..., rope_theta=5e5)).rope_theta == 5e5
    assert GlmConfig.from_dict(tiny(rope_parameters=bare, rope_theta=5e5)).rope_theta == 5e5
    assert GlmConfig.from_dict(tiny(rope_parameters=nested, rope_theta=500000)).rope_theta == 5e5


def test_no_theta_or_two_that_differ_is_an_error() -> None:
    assert "rope_theta is missing" in refused(tiny(rope_parameters={"rope_type": "default"}))
    assert "rope_theta is missing" in refused(tiny(rope_parameters=...))
    both = refused(tiny(rope_theta=1e6))
    assert "8e+06" in both
    assert "1e+06" in both


def test_n_routed_experts_is_authoritative(caplog: pytest.LogCaptureFixture) -> None:
    assert GlmConfig.from_dict(tiny(num_experts=256)).n_routed_experts == 8
    assert "n_routed_experts (8) is used" in caplog.text
    message = refused(tiny(n_routed_experts=..., num_experts=8))
    assert "n_routed_experts missing" in message
    assert "num_experts is not read" in message


@pytest.mark.parametrize(("value", "ids"), [(258, (258,)), ([256, 258], (256, 258))])
def test_end_tokens_are_one_or_a_list(value: Any, ids: tuple[int, ...]) -> None:
    assert GlmConfig.from_dict(tiny(eos_token_id=value)).eos_token_id == ids


@pytest.mark.parametrize("value", [None, [], True, "258", [256, None], 320, -1])
def test_other_end_tokens_are_refused(value: Any) -> None:
    assert "eos_token_id" in refused(tiny(eos_token_id=value))


@pytest.mark.parametrize(("value", "count"), [(0, 0), (None, 0), (..., 0), (1, 1)])
def test_the_number_of_mtp_layers_may_be_absent(value: Any, count: int) -> None:
    assert (
        GlmConfig.from_dict(tiny(num_nextn_predict_layers=value)).num_nextn_predict_layers == count
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "deepseek_v3"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("tie_word_embeddings", True),
        ("moe_layer_freq", 2),
        ("num_key_value_heads", 2),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 8e6}),
        ("rope_scaling", {"type": "linear", "factor": 2}),
        ("layer_types", ["full_attention"] * 4),
        ("mlp_layer_types", ["sparse", "dense", "sparse", "sparse"]),
        ("first_k_dense_replace", 2),
        ("dtype", "float8"),
        ("hidden_size", 128.0),
        ("hidden_size", True),
        ("vocab_size", 0),
        ("rms_norm_eps", "1e-5"),
        ("num_experts_per_tok", 9),
        ("n_group", 3),
        ("n_group", 8),
        ("num_hidden_layers", 1001),
        ("hidden_size", 2**24 + 1),
        ("n_routed_experts", 2**16 + 1),
        ("num_nextn_predict_layers", 10**9),
        ("vocab_size", 10**4000),
        ("vocab_size", -(10**4000)),
        ("rms_norm_eps", 10**400),
        ("rope_parameters", {"rope_theta": 10**400}),
        ("pad_token_id", 10**5000),
        ("norm_topk_prob", "yes"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_is_not_implemented_is_refused_by_name(key: str, value: Any) -> None:
    assert key in refused(tiny(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "gptq"),
        ("quant_method", None),
        ("fmt", "e5m2"),
        ("scale_fmt", "ue8m0"),
        ("activation_scheme", "static"),
        ("weight_block_size", None),
        ("weight_block_size", [32]),
        ("weight_block_size", [32, 0]),
        ("weight_block_size", [32, 10**30]),
        ("modules_to_not_convert", "lm_head"),
        ("modules_to_not_convert", ["lm_head", None]),
        ("modules_to_not_convert", [""]),
        ("modules_to_not_convert", ["*.mlp.gate"]),
        ("modules_to_not_convert", ["x" * 257]),
        ("modules_to_not_convert", ["a{99999999999}"]),
        ("modules_to_not_convert", ["(.+)+x"]),
        ("modules_to_not_convert", [".*" * 4 + "x"]),
        ("modules_to_not_convert", ["o?" * 4 + "x"]),
        ("modules_to_not_convert", [f"m{i}" for i in range(2**11 + 1)]),
    ],
)
def test_another_quantisation_is_refused_by_name(key: str, value: Any) -> None:
    quant = preset_dict("tiny")["quantization_config"] | {key: value}
    assert f"quantization_config.{key}" in refused(tiny(quantization_config=quant))


def test_a_checkpoint_without_quantisation_has_no_block() -> None:
    glm = GlmConfig.from_dict(tiny(quantization_config=...))
    assert glm.weight_block_size is None
    assert not glm.quantized


def test_unknown_keys_of_the_file_are_tolerated() -> None:
    assert GlmConfig.from_dict(tiny(a_key_of_next_year=[1])) == load_glm_config("tiny")


def test_every_missing_size_is_listed_at_once() -> None:
    message = refused(tiny(hidden_size=..., kv_lora_rank=...))
    assert "hidden_size, kv_lora_rank missing" in message


def test_a_preset_a_file_and_a_folder_all_load(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(preset_dict("tiny")))
    assert load_glm_config(tmp_path) == load_glm_config(file) == load_glm_config("tiny")


def test_what_cannot_be_loaded_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean the preset 'glm-5\.2'"):
        load_glm_config("glm5.2")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        load_glm_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="not readable as JSON"):
        load_glm_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="found a JSON list"):
        load_glm_config(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        preset_dict("tny")


def test_a_shared_layer_uses_the_nearest_full_layer_before_it() -> None:
    glm = load_glm_config("glm-5.2")
    assert [glm.indexer_source(layer) for layer in (0, 1, 2, 3, 5, 6, 9, 77)] == [
        0,
        1,
        2,
        2,
        2,
        6,
        6,
        74,
    ]
    with pytest.raises(ConfigError, match="layer 78 does not exist"):
        glm.indexer_source(78)
    assert [glm.is_dense(layer) for layer in (0, 2, 3)] == [True, True, False]


def test_more_tensors_than_can_be_listed_are_refused_though_each_size_is_within_its_bound() -> None:
    many = {"num_hidden_layers": 1000, "indexer_types": ..., "layer_types": ...}
    many |= {"index_topk_freq": ..., "mlp_layer_types": ..., "first_k_dense_replace": 1}
    message = refused(tiny(**many, n_routed_experts=2**16))
    assert "num_hidden_layers 1000" in message and "n_routed_experts 65536" in message
    assert "196,608,000 tensors of experts, expected at most 262,144" in message
    assert GlmConfig.from_dict(tiny(**many, n_routed_experts=87)).n_routed_experts == 87
    mtp = refused(tiny(n_routed_experts=2**16, num_nextn_predict_layers=1))
    assert "num_nextn_predict_layers 1" in mtp


def test_the_missing_number_of_layers_is_named_before_what_depends_on_it() -> None:
    message = refused(tiny(num_hidden_layers=...))
    assert "num_hidden_layers missing" in message
    assert "None" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '{"hidden_size": 1, "hidden_size": 2}',
            "key 'hidden_size' is written twice, with 1 and 2",
        ),
        ('{"a": {"rope_theta": 1, "rope_theta": 1}}', "key 'rope_theta' is written twice"),
        ('{"a": [{"b": 1, "\\u0062": 2}]}', "key 'b' is written twice"),
    ],
)
def test_a_key_that_the_file_writes_twice_is_refused_by_name(
    text: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_glm_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {says}")


@pytest.mark.parametrize(
    ("off", "named"),
    [
        (["rope_interleave"], "config.json: rope_interleave is false"),
        (["indexer_rope_interleave"], "config.json: indexer_rope_interleave is false"),
        (
            ["rope_interleave", "indexer_rope_interleave"],
            "config.json: rope_interleave and indexer_rope_interleave are false",
        ),
        ([], None),
    ],
)
def test_half_split_rope_is_obeyed_with_one_warning_that_transformers_interleaves(
    off: list[str], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    glm = GlmConfig.from_dict(tiny(**dict.fromkeys(off, False)), "config.json")
    assert glm.rope_interleave == ("rope_interleave" not in off)
    assert glm.indexer_rope_interleave == ("indexer_rope_interleave" not in off)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    if named is None:
        assert told == []
        return
    ((level, message),) = told
    assert level == "WARNING" and message.startswith(named)
    assert "transformers 5.23 does not read" in message and "interleaves always" in message


def test_transformers_reads_neither_interleave_key() -> None:
    """What the warning says, on transformers' own source."""
    from importlib.util import find_spec

    spec = find_spec("transformers.models.glm_moe_dsa")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    text = "".join(file.read_text() for file in sorted(folder.glob("*.py")))
    assert "apply_rotary_pos_emb_interleave(" in text
    assert "rope_interleave" not in text.replace("indexer_rope_interleave", "rope_interleave")


def test_what_is_not_converted_is_carried_once_each_and_only_of_a_quantised_checkpoint() -> None:
    quant = preset_dict("tiny")["quantization_config"]
    for listed, carried in (
        (["lm_head", "o_proj", "lm_head"], ("lm_head", "o_proj")),
        ([], ()),
        (None, ()),
    ):
        raw = tiny(quantization_config=quant | {"modules_to_not_convert": listed})
        assert GlmConfig.from_dict(raw).modules_to_not_convert == carried
    assert GlmConfig.from_dict(tiny(quantization_config=...)).modules_to_not_convert == ()
