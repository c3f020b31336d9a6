"""Loading an import through Megatron's own loader: what is checked, and that fused norms load under either spelling."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import MegatronXorlError
from megatron_xorl.weights.dcp_metadata import metadata_bytes
from megatron_xorl.weights.opening import open_checkpoint
from tests.convert.broken import Case
from tests.worlds import run_world

NORM = "model.layers.1.input_layernorm.weight"
SPELLINGS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def load(
    directory: str, hashes: bool | None, names: tuple[str, ...]
) -> tuple[str, dict[str, torch.Tensor]]:
    """Load one stage and return the error, or parameters by name."""
    import megatron_xorl as mx

    mx.use_cpu()
    mx.initialize()
    from megatron_xorl.layers.base_state import load_base_distributed
    from megatron_xorl.training.model import build_model

    glm = load_glm_config(directory)
    model = build_model(glm, dtype=torch.bfloat16)
    try:
        load_base_distributed(model, glm, directory, hashes=hashes)
    except MegatronXorlError as error:
        return str(error), {}
    found = dict(model.named_parameters())
    return "", {name: found[name].detach().clone() for name in names}


@pytest.mark.parametrize(
    ("name", "bits", "said"),
    [
        (NORM, b"\xc0\x7f", "decoder.layers.1.input_layernorm.weight has 1 inf or NaN values"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", b"\x7f\x7f", "NaN"),
    ],
)
def test_nan_in_the_file_is_refused_as_direct_loading_does(
    name: str, bits: bytes, said: str, fp8_megatron: Path, tmp_path: Path
) -> None:
    shutil.copytree(fp8_megatron, tmp_path / "nan")
    checkpoint = open_checkpoint(tmp_path / "nan")
    with open(tmp_path / "nan" / checkpoint.shard_of(name), "r+b") as file:
        file.seek(checkpoint.entry(name).start)
        file.write(bits)
    ((hashed, _),) = run_world(load, 1, str(tmp_path / "nan"), None, ())
    assert "has other content" in hashed
    ((unhashed, _),) = run_world(load, 1, str(tmp_path / "nan"), False, ())
    assert said in unhashed


def test_fused_norms_load_under_transformer_engines_spelling(fp8_megatron, tmp_path) -> None:
    """The same tensors under other keys give the same parameters; under keys of nobody they are missing."""
    case = Case(tmp_path / "fused", tmp_path / "out", "export")
    shutil.copytree(fp8_megatron, case.source)
    names = tuple(f"decoder.layers.0.{alone}" for alone in SPELLINGS)
    spelled = {f"decoder.layers.0.{a}": f"decoder.layers.0.{b}" for a, b in SPELLINGS.items()}
    items = [item._replace(key=spelled.get(item.key, item.key)) for item in case.items()]
    case.metadata(metadata_bytes(items))
    assert sum(item.key in spelled.values() for item in items) == len(SPELLINGS)
    ((said, found),) = run_world(load, 1, str(case.source), None, names)
    ((_, expected),) = run_world(load, 1, str(fp8_megatron), None, names)
    assert said == ""
    assert all(torch.equal(found[name], expected[name]) for name in names)
    wrong = [item._replace(key=item.key.replace("layer_norm_weight", "ln")) for item in items]
    case.metadata(metadata_bytes(wrong))
    ((said, _),) = run_world(load, 1, str(case.source), None, ())
    assert "is missing" in said
