"""What the base's loading refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_xorl.errors import FormatError, WeightsError
from megatron_xorl.training.model import load_model
from megatron_xorl.weights.reader import HfCheckpoint
from tests.training.harness import use_one_process


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.0.self_attn.q_a_proj.weight_scale_inv",
    ],
)
def test_a_base_with_nan_is_refused_by_name_and_the_same_base_without_it_loads(
    name: str, tiny_dir: Path, tmp_path: Path
) -> None:
    use_one_process()
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    load_model(model)
    shard = model / HfCheckpoint(model).shard_of(name)
    tensors = load_file(shard)
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises((WeightsError, FormatError), match=name.replace("_scale_inv", "")):
        load_model(model)
