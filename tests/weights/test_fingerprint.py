"""The base fingerprint is the same wherever the base lies and however it is cut, and another one for another base."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.convert.tiny import make_tiny
from megatron_xorl.weights.fingerprint import (
    EDGE_BYTES,
    NOT_SEMANTIC,
    SAMPLES,
    fingerprint,
    sample_ranges,
)
from megatron_xorl.weights.reader import HfCheckpoint


def of(directory) -> str:
    return fingerprint(load_glm_config(directory), HfCheckpoint(directory))


def test_it_does_not_depend_on_path_or_sharding(tiny_dir, tmp_path):
    cut = make_tiny(tmp_path / "elsewhere", seed=0, block=32, shard_bytes=300_000)
    assert len(HfCheckpoint(cut).shards()) > len(HfCheckpoint(tiny_dir).shards())
    tensors = {}
    for shard in HfCheckpoint(tiny_dir).shards():
        tensors |= load_file(tiny_dir / shard)
    single = tmp_path / "single"
    single.mkdir()
    shutil.copy(tiny_dir / "config.json", single)
    save_file(tensors, single / "model.safetensors")
    assert of(tiny_dir) == of(cut) == of(single)


def test_another_seed_block_or_constant_is_another_base(tiny_dir, tiny128_dir, tmp_path):
    config = load_glm_config(tiny_dir)
    checkpoint = HfCheckpoint(tiny_dir)
    prints = {
        of(tiny_dir),
        of(tiny128_dir),
        of(make_tiny(tmp_path / "seed1", seed=1)),
        fingerprint(dataclasses.replace(config, rope_theta=1e6), checkpoint),
        fingerprint(dataclasses.replace(config, latent_norm_eps=1e-5), checkpoint),
    }
    assert len(prints) == 5
    assert fingerprint(dataclasses.replace(config, pad_token_id=0), checkpoint) == of(tiny_dir)


@pytest.mark.parametrize("where", ["first", "last", "only"])
def test_one_changed_byte_at_an_edge_or_in_a_small_tensor_shows(tiny_dir, tmp_path, where):
    name = {
        "first": "model.embed_tokens.weight",
        "last": "model.embed_tokens.weight",
        "only": "model.layers.3.mlp.gate.e_score_correction_bias",
    }[where]
    copy = shutil.copytree(tiny_dir, tmp_path / "copy")
    checkpoint = HfCheckpoint(copy)
    entry = checkpoint.entry(name)
    path = copy / checkpoint.shard_of(name)
    data = bytearray(path.read_bytes())
    data[entry.stop - 1 if where == "last" else entry.start] ^= 1
    path.write_bytes(data)
    assert of(copy) != of(tiny_dir)


def test_samples_lie_in_order_inside_the_tensor_and_cost_the_same_at_any_size():
    for size in (0, 1, 8192, 8193, 9000, 10**6, 10**9):
        ranges = sample_ranges(size)
        assert all(0 <= start <= stop <= size for start, stop in ranges)
        assert ranges[0][0] == 0 and ranges[-1][1] == size
        if size > 2 * EDGE_BYTES:
            assert len(ranges) == SAMPLES + 2 and ranges == sorted(ranges)
            assert sum(stop - start for start, stop in ranges) <= 2 * EDGE_BYTES + 64 * SAMPLES


def test_it_is_written_down(tiny_dir):
    """The definition is part of every checkpoint: a recomputation from the file, by the description alone."""
    import hashlib

    config = dataclasses.asdict(load_glm_config(tiny_dir))
    for field in (
        "initializer_range",
        "max_position_embeddings",
        "pad_token_id",
        "eos_token_id",
        "dtype",
        "modules_to_not_convert",
    ):
        del config[field]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    tensors = {}
    for shard in sorted(tiny_dir.glob("*.safetensors")):
        tensors |= load_file(shard)
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    for name in sorted(tensors):
        data = tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
        kind = json.dumps([name, names[tensors[name].dtype], list(tensors[name].shape)])
        if len(data) > 8192:
            inner = len(data) - 8192
            middle = b"".join(data[4096 + inner * k // 16 :][:64] for k in range(1, 16, 2))
            data = data[:4096] + middle + data[-4096:]
        digest.update(hashlib.sha256(kind.encode() + data).digest())
    assert digest.hexdigest() == of(tiny_dir)


def test_a_new_config_field_must_be_ruled_on():
    """A field that enters the fingerprint changes it for every checkpoint ever saved: put it under NOT_SEMANTIC, or mean it."""
    fields = {field.name for field in dataclasses.fields(GlmConfig)}
    assert set(NOT_SEMANTIC) <= fields
    assert len(fields - set(NOT_SEMANTIC)) == 33
