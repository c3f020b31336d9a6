"""The tiny checkpoint as written: the rules it must keep so that the tests built on it can see faults."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from megatron_xorl.config.model import GlmConfig, load_glm_config, preset_dict
from megatron_xorl.convert.tiny import make_tiny, tiny_config
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.names import hf_tensors
from megatron_xorl.weights.reader import HfCheckpoint
from megatron_xorl.weights.slices import legal_cuts
from tests.oracle import hf_oracle, hf_tensors_fp32

FIXTURES = ("tiny_dir", "tiny128_dir")


@pytest.fixture(params=FIXTURES)
def directory(request: pytest.FixtureRequest):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def weights(tiny_dir):
    return hf_tensors_fp32(tiny_dir)


def test_it_holds_exactly_the_tensors_of_its_config(directory):
    HfCheckpoint(directory).validate(load_glm_config(directory))
    files = sorted(path.name for path in directory.iterdir())
    assert files[:4] == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00004.safetensors",
    ]
    assert files[-3:] == ["model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]


def test_the_default_is_the_tiny_preset(tiny_dir):
    found, preset = load_glm_config(tiny_dir), GlmConfig.from_dict(preset_dict("tiny"), "preset")
    # The written list has the shipped misspelling.
    assert found.modules_to_not_convert != preset.modules_to_not_convert
    same = {"modules_to_not_convert": preset.modules_to_not_convert}
    assert dataclasses.replace(found, **same) == preset


def test_the_architecture_rules_hold(directory):
    config = load_glm_config(directory)
    assert config.num_hidden_layers >= 4 and config.is_dense(0) and not config.is_dense(1)
    assert config.indexer_types == ("full", "full", "shared", "shared")
    assert config.n_routed_experts >= 8 and config.index_n_heads >= 16 and config.index_topk <= 32
    assert config.num_nextn_predict_layers == 1
    assert config.index_head_dim > config.qk_rope_head_dim


def test_the_ragged_edges_are_those_of_the_real_model(directory):
    config = load_glm_config(directory)
    block = config.weight_block_size[0]
    real = load_glm_config("glm-5.2")
    for size in (
        lambda c: c.kv_lora_rank + c.qk_rope_head_dim,  # rows of kv_a: 4.5 blocks
        lambda c: c.qk_nope_head_dim + c.v_head_dim,  # a head of kv_b: 3.5
        lambda c: c.qk_nope_head_dim,  # its K half: 1.5
    ):
        assert size(config) / block == size(real) / 128
        assert size(config) % block
    head = config.qk_nope_head_dim + config.v_head_dim
    assert [n for n in (1, 2, 4, 8) if n in legal_cuts(8 * head, block)] == [1, 2, 4]
    assert 2 in legal_cuts(config.moe_intermediate_size, block)


def test_neighbouring_scales_differ_by_four_and_grids_are_two_by_two(directory):
    """One row of blocks is allowed where the real model has one: the indexer's wk is index_head_dim rows, one block."""
    config = load_glm_config(directory)
    checkpoint = HfCheckpoint(directory)
    for row in hf_tensors(config):
        if row.scale_name is None:
            continue
        scales = checkpoint.read(row.scale_name)
        assert min(scales.shape) >= 2 or (
            row.hf.endswith("indexer.wk.weight") and scales.shape[0] == 1
        ), row.hf
        for axis in (0, 1):
            neighbours = scales.log().diff(dim=axis).abs()
            assert not neighbours.numel() or neighbours.min() > math.log(4), (row.hf, axis)


def test_projections_have_variance_one_over_fan_in_and_norms_are_not_ones(weights):
    for name, w in weights.items():
        if w.ndim == 2 and "embed_tokens" not in name:
            assert 0.8 < w.std().item() * math.sqrt(w.shape[1]) < 1.2, name
        elif name.endswith("norm.weight"):
            assert 0.1 < w.std() < 0.3 and abs(w.mean() - 1) < 0.15, name
    assert 0.98 < weights["model.embed_tokens.weight"].std() < 1.02
    assert (weights["model.layers.0.self_attn.indexer.k_norm.bias"] != 0).all()


def test_the_router_bias_is_fp32_in_the_file_and_spread(tiny_dir):
    checkpoint = HfCheckpoint(tiny_dir)
    for layer in (1, 2, 3, 4):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        bias = checkpoint.read(name)
        assert bias.dtype == torch.float32 and bias.unique().numel() == 8
        assert not torch.equal(bias, bias.bfloat16().float())


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(tiny_dir, tmp_path):
    again = make_tiny(tmp_path / "again", seed=0)
    other = make_tiny(tmp_path / "other", seed=1)
    files = sorted(path.name for path in tiny_dir.iterdir())
    assert files == sorted(path.name for path in again.iterdir())
    assert all((tiny_dir / f).read_bytes() == (again / f).read_bytes() for f in files)
    a, b = (load_file(d / "model-00002-of-00004.safetensors") for d in (tiny_dir, other))
    assert a.keys() == b.keys() and not any(
        torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a
    )


def test_bytes_of_a_tensor_do_not_depend_on_the_sharding(tiny_dir, tmp_path):
    small = HfCheckpoint(make_tiny(tmp_path / "small", shard_bytes=100_000))
    assert len(small.shards()) > 20
    large = HfCheckpoint(tiny_dir)
    for name in large.names():
        assert torch.equal(small.read(name).view(torch.uint8), large.read(name).view(torch.uint8))


def test_an_occupied_output_and_an_odd_block_are_refused(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(WeightsError, match="not an empty directory"):
        make_tiny(tmp_path)
    with pytest.raises(WeightsError, match="not an empty directory"):
        make_tiny(tmp_path / "a")
    with pytest.raises(WeightsError, match=r"block 48 is not one of \[16, 32, 64, 128\]"):
        make_tiny(tmp_path / "b", block=48)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("block", [16, 64])
def test_other_blocks_make_sound_configs(block):
    config = GlmConfig.from_dict(tiny_config(block), "tiny")
    assert (
        config.weight_block_size == (block, block)
        and (config.kv_lora_rank + config.qk_rope_head_dim) / block == 4.5
    )


def test_transformers_computes_with_it_and_the_scales_matter(tiny_dir):
    """Logits of a usable size, every expert chosen, the sparse attention at work, and another model where scales are ignored."""
    ids = torch.randint(0, 256, (2, 96), generator=torch.Generator().manual_seed(5))
    model = hf_oracle(tiny_dir)
    chosen = [set() for _ in range(4)]
    for layer in (1, 2, 3):
        model.model.layers[layer].mlp.gate.register_forward_hook(
            lambda _m, _i, out, layer=layer: chosen[layer].update(_indices(out).flatten().tolist())
        )
    with torch.no_grad():
        logits = model(ids).logits
        model.config.index_topk = 4096
        for layer in (0, 1):
            model.model.layers[layer].self_attn.indexer.index_topk = 4096
        dense = model(ids).logits
    assert torch.isfinite(logits).all() and 0.7 < logits.std() < 1.4
    assert all(chosen[layer] == set(range(8)) for layer in (1, 2, 3))
    # top-k selects everything up to position 32 (the last kept key), so only later positions may change, and do
    assert (logits - dense)[:, :32].abs().max() < 1e-4 < 1e-2 < (logits - dense)[:, 40:].abs().max()
    with torch.no_grad():
        ignored = hf_oracle(tiny_dir, apply_scales=False)(ids).logits
    assert not torch.allclose(ignored, logits, atol=0.1)


def _indices(output: object) -> torch.Tensor:
    return next(t for t in output if isinstance(t, torch.Tensor) and not t.is_floating_point())


def test_generation_settings_name_the_end_tokens(tiny_dir):
    settings = json.loads((tiny_dir / "generation_config.json").read_text())
    config = load_glm_config(tiny_dir)
    assert tuple(settings["eos_token_id"]) == config.eos_token_id == (256, 258, 259)
    assert settings["pad_token_id"] == config.pad_token_id == 256
