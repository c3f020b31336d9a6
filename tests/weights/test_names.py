"""The name table against counts published for GLM-5.2, against transformers' own state dict, and as a bijection."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys

import pytest

from megatron_xorl.config.model import GlmConfig, load_glm_config, preset_dict
from megatron_xorl.fp8.format import block_grid
from megatron_xorl.weights.names import (
    hf_tensors,
    mtp_prefixes,
    row_for,
    rows_by_layer,
    rows_by_name,
    unmatched_entries,
)


def test_glm_52_has_the_published_tensors_and_elements():
    """59,585 BF16 tensors and 753,329,940,480 elements: NVIDIA Megatron-Bridge's verification card of the whole model."""
    config = dataclasses.replace(load_glm_config("glm-5.2"), weight_block_size=None)
    rows = hf_tensors(config)
    mtp = [row for row in rows if row.hf.startswith("model.layers.78.")]
    assert (len(rows), len(rows) - len(mtp), len(mtp)) == (59_585, 58_794, 791)
    assert sum(math.prod(row.shape) for row in rows) == 753_329_940_480
    assert not any(row.quantized for row in rows)


def test_shapes_of_glm_52_are_the_shipped_ones():
    rows = rows_by_name(load_glm_config("glm-5.2"))
    shipped = {
        "self_attn.q_a_proj": (2048, 6144),
        "self_attn.q_b_proj": (16384, 2048),
        "self_attn.kv_a_proj_with_mqa": (576, 6144),
        "self_attn.kv_b_proj": (28672, 512),
        "self_attn.o_proj": (6144, 16384),
        "self_attn.indexer.wq_b": (4096, 2048),
        "self_attn.indexer.wk": (128, 6144),
        "self_attn.indexer.weights_proj": (32, 6144),
        "mlp.gate": (256, 6144),
        "mlp.shared_experts.down_proj": (6144, 2048),
        "mlp.experts.255.up_proj": (2048, 6144),
    }
    for leaf, shape in shipped.items():
        assert rows[f"model.layers.6.{leaf}.weight"].shape == shape, leaf
    assert rows["model.layers.2.mlp.up_proj.weight"].shape == (12288, 6144)
    assert rows["model.layers.78.eh_proj.weight"].shape == (6144, 12288)
    assert rows["model.layers.6.self_attn.kv_a_proj_with_mqa.weight"].scale_shape == (5, 48)


@pytest.mark.parametrize("preset", ["glm-5.2", "glm-5.1", "glm-5", "tiny"])
def test_a_megatron_name_part_and_expert_gives_back_the_hugging_face_name(preset):
    config = load_glm_config(preset)
    rows = hf_tensors(config)
    assert len({row.hf for row in rows}) == len(rows)
    mapped = [row for row in rows if row.megatron is not None]
    assert len({(row.megatron, row.part, row.expert) for row in mapped}) == len(mapped)
    assert all(row_for(config, row.megatron, row.part, row.expert).hf == row.hf for row in mapped)
    assert {row.hf for row in rows} - {row.hf for row in mapped} == {
        r.hf for r in rows if r.hf.startswith(mtp_prefixes(config))
    }


def test_rows_not_mtp_are_what_transformers_builds(tiny_dir):
    """The oracle: parameter names and shapes of GlmMoeDsaForCausalLM, its fused banks taken apart."""
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from tests.oracle import raw_config

    with torch.device("meta"):
        state = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**raw_config(tiny_dir))).state_dict()
    expected = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for expert in range(tensor.shape[0]):
                for half in ("gate", "up"):
                    expected[f"{stem}{expert}.{half}_proj.weight"] = (
                        tensor.shape[1] // 2,
                        tensor.shape[2],
                    )
        elif name.endswith("experts.down_proj"):
            for expert in range(tensor.shape[0]):
                expected[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = tuple(
                    tensor.shape[1:]
                )
        else:
            expected[name] = tuple(tensor.shape)
    rows = hf_tensors(load_glm_config(tiny_dir))
    assert {row.hf: row.shape for row in rows if row.megatron is not None} == expected


QUANTISED = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("wq_b", "wk"),
    *("gate_proj", "up_proj", "down_proj"),
)


@pytest.mark.parametrize("preset", ["glm-5.2", "tiny"])
def test_exactly_the_shipped_kinds_are_quantised_the_mtp_layer_too(preset):
    config = load_glm_config(preset)
    config = dataclasses.replace(config, weight_block_size=config.weight_block_size or (128, 128))
    for row in hf_tensors(config):
        leaf = row.hf.removesuffix(".weight").rpartition(".")[2]
        assert row.quantized == (leaf in QUANTISED), row.hf
        assert row.dtype == (
            "fp8" if row.quantized else "fp32" if leaf == "e_score_correction_bias" else "bf16"
        )
        if row.quantized:
            assert row.scale_shape == block_grid(row.shape, config.weight_block_size)
            assert row.scale_name == row.hf + "_scale_inv"


def with_mtp(number, **changes):
    """GLM-5.2's own config.json with another ``num_nextn_predict_layers``; None is JSON's null, ``...`` leaves the key out."""
    raw = preset_dict("glm-5.2") | changes
    raw["num_nextn_predict_layers"] = number
    if number is ...:
        del raw["num_nextn_predict_layers"]
    return GlmConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("number", "layers"), [(..., []), (None, []), (0, []), (1, [78]), (2, [78, 79])], ids=str
)
def test_mtp_layers_follow_the_decoder_and_are_carried_not_built(number, layers):
    config = with_mtp(number)
    rows = hf_tensors(config)
    mtp = [row for row in rows if row.region == "mtp"]
    assert len(rows) - len(mtp) == 58_794
    assert len(mtp) == 791 * len(layers)
    assert list(dict.fromkeys(row.layer for row in mtp)) == layers
    assert all(row.hf.startswith(f"model.layers.{row.layer}.") for row in mtp)
    assert rows[-len(mtp) :] == tuple(mtp) or not mtp
    for row in rows:
        assert (
            (row.megatron is None)
            == (row.region == "mtp")
            == row.hf.startswith(mtp_prefixes(config) or ("-",))
        )
        if row.region == "mtp":
            assert (row.part, row.expert, row.tp_axis) == (None, None, None)


def test_the_mtp_layer_has_a_whole_sparse_layer_with_an_indexer_and_its_four_own():
    rows = rows_by_name(with_mtp(1))
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    last = {name.removeprefix("model.layers.78.") for name in rows if ".layers.78." in name}
    full = {name.removeprefix("model.layers.74.") for name in rows if ".layers.74." in name}
    assert last == full | own and full & own == set()


def test_the_mtp_layer_of_a_shorter_model_has_that_model_s_number():
    types = ["full", "shared", "shared", "full", "shared"]
    config = with_mtp(
        1, num_hidden_layers=5, indexer_types=types, layer_types=None, mlp_layer_types=None
    )
    mtp = {row.layer for row in hf_tensors(config) if row.megatron is None}
    assert mtp == {5} and mtp_prefixes(config) == ("model.layers.5.",)


def test_rows_by_layer_are_the_table_cut_by_layers():
    config = load_glm_config("tiny")
    grouped = rows_by_layer(config)
    assert list(grouped) == [None, 0, 1, 2, 3, 4]
    assert sorted(row.hf for rows in grouped.values() for row in rows) == sorted(
        rows_by_name(config)
    )
    assert all(row.layer == layer for layer, rows in grouped.items() for row in rows)


def test_only_full_layers_own_an_indexer():
    config = load_glm_config("glm-5.2")
    owners = {row.layer for row in hf_tensors(config) if ".indexer." in row.hf}
    assert owners == {0, 1, 2, *range(6, 75, 4), 78}


def test_gate_is_the_first_half_and_up_the_second():
    config = load_glm_config("tiny")
    assert (
        row_for(config, "decoder.layers.0.mlp.linear_fc1.weight", 0).hf
        == "model.layers.0.mlp.gate_proj.weight"
    )
    expert = row_for(config, "decoder.layers.2.mlp.experts.linear_fc1.weight", 1, 5)
    assert expert.hf == "model.layers.2.mlp.experts.5.up_proj.weight"
    with pytest.raises(KeyError):
        row_for(config, "decoder.layers.0.mlp.linear_fc1.weight")


def test_the_table_needs_no_torch():
    code = "import sys, megatron_xorl.weights.names as n; assert 'torch' not in sys.modules; print(len(n.__all__))"
    assert (
        int(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        )
        > 0
    )


NOT_FP8 = ("lm_head", "weights_proj")  # linear layers that this format never quantises
LISTS = [
    (),
    ("mlp", "self_attn"),
    ("model.layers.1.mlp", "model.layers.0.self_attn."),
    ("o_proj", "experts"),
    ("gate_proj",),
    ("model.layers.1.mlp.gate", "model.layers.3.mlp.shared_experts.down"),
    ("model.layers.2.mlp.experts.5.gate_proj",),
    ("model.layers.*.mlp.experts", "model.layers.[01].self_attn.q_a"),
    ("model.layers.0|model.layers.1.self_attn", r".*\.indexer\.wk"),
    ("model.layers.1",),
    ("layers.1", "model.layers.0.mlp.up.proj"),
]


def converted_by_transformers(listed):
    """The oracle: which layers transformers itself makes FP8 of a tiny model, told what not to convert."""
    import torch
    from transformers import FineGrainedFP8Config, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
    from transformers.integrations import finegrained_fp8 as fp8

    raw = {key: value for key, value in preset_dict("tiny").items() if key != "quantization_config"}
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**raw))
    model = fp8.replace_with_fp8_linear(
        model,
        modules_to_not_convert=[*NOT_FP8, *listed],
        quantization_config=FineGrainedFP8Config(weight_block_size=(32, 32)),
    )
    kinds = (fp8.FP8Linear, fp8.FP8Experts)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


def test_what_is_left_unconverted_is_what_transformers_leaves():
    config = load_glm_config("tiny")
    found = set()
    for listed in LISTS:
        rows = hf_tensors(dataclasses.replace(config, modules_to_not_convert=listed))
        ours = {
            re.sub(r"(experts)\.\d+\..*", r"\1", row.hf.removesuffix(".weight"))
            for row in rows
            if row.quantized and row.megatron is not None
        }
        assert ours == converted_by_transformers(listed)
        found.add(frozenset(ours))
        for row in rows:
            assert (row.dtype == "fp8") == row.quantized == (row.scale_name is not None)
    assert len(found) == len(LISTS) - 3  # three of the lists leave nothing out, like the empty one


def test_an_entry_that_names_no_module_with_a_weight_is_found():
    config = dataclasses.replace(
        load_glm_config("tiny"),
        modules_to_not_convert=(
            *("lm_head", "lm_haed", "mlp", "o_proj", "model.layers.1", "model.layers.9"),
            *("model.layers.*.mlp", "model.layers.4.mlp.gate", "model.layers.0.mlp.gate"),
            *("model.layers.0.self_attn.indexers_proj", "model.layers.2.mlp.experts.5.gate_proj"),
        ),
    )
    assert unmatched_entries(config) == (
        *("lm_haed", "mlp", "model.layers.9", "model.layers.0.mlp.gate"),
        "model.layers.2.mlp.experts.5.gate_proj",
    )
    assert unmatched_entries(load_glm_config("glm-5.2")) == ()


def test_only_an_unquantised_checkpoint_takes_its_dtype_from_the_config():
    tiny = dataclasses.replace(load_glm_config("tiny"), dtype="float32")
    assert {row.dtype for row in hf_tensors(tiny)} == {"fp8", "bf16", "fp32"}
    plain = dataclasses.replace(tiny, weight_block_size=None)
    assert {row.dtype for row in hf_tensors(plain)} == {"fp32"}
    half = dataclasses.replace(plain, dtype="float16")
    assert {row.dtype for row in hf_tensors(half)} == {"bf16", "fp32"}
