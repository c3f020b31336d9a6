"""make-tiny of a given size: the same structure, the size that was asked for, bytes that depend on seed and name alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.convert.sized import parse_size
from megatron_xorl.convert.tiny import make_tiny
from megatron_xorl.errors import ConfigError
from megatron_xorl.weights.reader import HfCheckpoint

SIZE = 32 * 2**20


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("sized") / "hf", block=128, size=SIZE)


def test_it_is_a_valid_checkpoint_of_that_size_and_of_the_tiny_structure(sized, tiny_dir) -> None:
    config, tiny = load_glm_config(sized), load_glm_config(tiny_dir)
    checkpoint = HfCheckpoint(sized)
    checkpoint.validate(config)
    total = sum(entry.stop - entry.start for entry in map(checkpoint.entry, checkpoint.names()))
    assert SIZE <= total < 1.15 * SIZE
    assert config.n_routed_experts > tiny.n_routed_experts
    for field in ("num_hidden_layers", "indexer_types", "num_nextn_predict_layers", "vocab_size"):
        assert getattr(config, field) == getattr(tiny, field)
    assert 8 <= len(checkpoint.shards()) <= 10


def test_values_are_finite_and_of_a_usable_size(sized) -> None:
    checkpoint = HfCheckpoint(sized)
    for name in checkpoint.names():
        value = checkpoint.read(name).float()
        assert torch.isfinite(value).all(), name
        if (
            name.endswith(("proj.weight", "lm_head.weight"))
            and f"{name}_scale_inv" not in checkpoint
        ):
            root = value.shape[1] ** 0.5
            assert 1.0 < value.abs().mean() * root < 2.2, name  # 1.5 times 2^(+-1/2)
        elif name.endswith("norm.weight"):
            assert ((value >= 1) & (value < 2)).all(), name


def test_a_tensor_depends_on_seed_and_name_alone(sized, tmp_path) -> None:
    other = HfCheckpoint(make_tiny(tmp_path / "a", block=128, size=SIZE, shard_bytes=2**20))
    seeded = HfCheckpoint(make_tiny(tmp_path / "b", block=128, size=SIZE, seed=1))
    checkpoint = HfCheckpoint(sized)
    for name in checkpoint.names()[::7]:
        a, b, c = (x.read(name).view(torch.uint8) for x in (checkpoint, other, seeded))
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_sizes_are_read_as_people_write_them() -> None:
    assert parse_size("4GiB") == 4 * 2**30
    assert parse_size("1.5 gb") == 1_500_000_000
    assert parse_size("1000") == 1000
    for wrong in ("", "4 parsecs", "-1", "0", "GiB"):
        with pytest.raises(ConfigError, match="write it as 4GiB"):
            parse_size(wrong)


def test_a_size_below_the_structure_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="too small for this structure"):
        make_tiny(tmp_path / "out", block=128, size=10**6)
    assert not (tmp_path / "out").exists()
