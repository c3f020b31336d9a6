"""What stays fp32 whatever the model is cast to, wrapped in or saved as: the router's bias and product, rope angles.

The oracle for the router is transformers' own module on the input that ours was given; for rope, transformers'
embedding; for a cast, the model that was loaded in that dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.base.subject import Subject, hooked, parts, run_ours
from tests.base.variants import VARIANTS, WEIGHTS, write_variant
from tests.worlds import run_world


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("dtypes") / "model"
    return Subject(write_variant(folder, VARIANTS["2 of 4 groups"], WEIGHTS["unit gain"]))


def _float16_module(model: Any) -> Any:
    from megatron.core.transformer.module import Float16Module

    return Float16Module(model.config, model).module


def _ddp(model: Any) -> Any:
    """Megatron's DDP over its Float16Module, with adapters, as training wraps a model."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.training.model import attach_adapters

    attach_adapters(model, AdapterConfig(rank=2, alpha=4))
    model = _float16_module(model)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return DistributedDataParallel(model.config, settings, model).module


CASTS: dict[str, Callable[[Any], Any]] = {
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "bfloat16()": lambda model: model.bfloat16(),
    "to(bfloat16) and back": lambda model: model.bfloat16().float().bfloat16(),
    "Float16Module": _float16_module,
    "Float16Module and DDP": _ddp,
    "half()": lambda model: model.half(),
}


def _file_bias(directory: Path) -> dict[int, Tensor]:
    """The file's bias by layer, the MTP layer's left out."""
    found = {}
    for shard in directory.glob("*.safetensors"):
        with safe_open(str(shard), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if name.endswith("e_score_correction_bias"):
                    found[int(name.split(".")[2])] = file.get_tensor(name)
    return {layer: bias for layer, bias in found.items() if layer < 4}


@pytest.mark.parametrize("cast", CASTS)
def test_the_router_is_fp32_after_a_cast_and_chooses_as_transformers_does(
    cast: str, subject: Subject
) -> None:
    from megatron_xorl.layers.router import GlmRouter

    model = CASTS[cast](subject.loaded(torch.bfloat16))
    assert model.decoder.final_layernorm.weight.dtype in (torch.bfloat16, torch.half)
    expected, routers = _file_bias(subject.directory), parts(model, GlmRouter)
    assert [layer for layer, _ in routers] == [1, 2, 3]
    seen: dict[int, tuple[Tensor, Any]] = {}
    hooks = [
        router.register_forward_hook(lambda _, given, out, n=n: seen.update({n: (given[0], out)}))
        for n, router in routers
    ]
    with hooked(hooks):
        run_ours(model, subject.ids(2, 41))
    for layer, router in routers:
        assert router.expert_bias.dtype == torch.float32
        assert torch.equal(router.expert_bias, expected[layer]), layer
        hidden, (probs, routes) = seen[layer]
        assert hidden.dtype == router.weight.dtype != torch.float32
        assert probs.dtype == torch.float32
        gate = subject.oracle.model.layers[layer].mlp.gate
        with torch.no_grad():
            _, weights, chosen = gate(hidden.flatten(0, 1))
        sets = torch.zeros_like(routes).scatter(1, chosen, True)
        assert torch.equal(routes, sets), layer
        assert (probs - torch.zeros_like(probs).scatter(1, chosen, weights)).abs().max() <= 1e-6


def test_a_router_that_multiplies_in_bf16_would_be_seen(subject: Subject) -> None:
    gate = subject.oracle.model.layers[2].mlp.gate
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(400, subject.glm.hidden_size, generator=draw).bfloat16()
    with torch.no_grad():
        logits, weights, chosen = gate(hidden)
        coarse = (hidden @ gate.weight.bfloat16().T).float()
        assert (coarse - logits).abs().max() > 1e-3
        rough = coarse.sigmoid().gather(1, chosen)
        rough = rough / rough.sum(-1, keepdim=True) * gate.routed_scaling_factor
    assert (rough - weights).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("cast", "start"),
    [
        ("to(bfloat16)", torch.float32),
        ("to(bfloat16)", torch.bfloat16),
        ("bfloat16()", torch.float32),
        ("Float16Module", torch.bfloat16),  # Megatron's wrapper takes no fp32 config
    ],
)
def test_a_cast_model_gives_the_bits_of_one_loaded_in_bf16(
    cast: str, start: torch.dtype, subject: Subject
) -> None:
    ids = subject.ids(2, 41)
    found = run_ours(CASTS[cast](subject.loaded(start)), ids).logits
    assert torch.equal(found, run_ours(subject.half, ids).logits)
    assert not torch.equal(found, run_ours(subject.model, ids).logits)


def test_a_bf16_checkpoint_cast_to_bf16_gives_the_bits_of_one_loaded_so(tmp_path: Path) -> None:
    other = Subject(
        write_variant(tmp_path / "model", VARIANTS["bf16 source"], WEIGHTS["unit gain"])
    )
    ids = other.ids(2, 41)
    assert torch.equal(
        run_ours(other.loaded(torch.float32).bfloat16(), ids).logits,
        run_ours(other.half, ids).logits,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_angles_are_transformers_to_the_bit_up_to_the_longest_position(
    dtype: torch.dtype, subject: Subject
) -> None:
    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding

    from megatron_xorl.config.model import load_glm_config, preset_dict
    from megatron_xorl.layers.rope import rotary_cos_sin

    glm = load_glm_config("glm-5.2")
    positions = torch.tensor([0, 1, 2, 127, 4097, 65_537, 202_751, 1_048_575])
    theirs = GlmMoeDsaRotaryEmbedding(GlmMoeDsaConfig(**preset_dict("glm-5.2")))
    expected = theirs(torch.zeros(1, dtype=dtype), positions[None])
    found = rotary_cos_sin(positions, glm.qk_rope_head_dim, glm.rope_theta, dtype)
    for ours, hf in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, hf[0, :, : glm.qk_rope_head_dim // 2])


def test_rope_frequencies_that_were_cast_to_bf16_would_be_seen(subject: Subject) -> None:
    """Why transformers' ``model.to(bfloat16)`` is another model than its ``from_pretrained``: ours has no such buffer."""
    ids = subject.ids(2, 41)
    with torch.no_grad():
        right = subject.oracle_half(input_ids=ids).logits
        rotary = subject.oracle_half.model.rotary_emb
        kept, rotary.inv_freq = rotary.inv_freq, rotary.inv_freq.bfloat16()
        wrong = subject.oracle_half(input_ids=ids).logits
        rotary.inv_freq = kept
    assert (wrong - right).abs().max() > 1e-2
    assert not [
        name for name, _ in subject.half.named_buffers() if "freq" in name or "rope" in name
    ]


def _saved_and_loaded(directory: str, root: str) -> tuple[list[str], dict[int, Tensor]]:
    from megatron_xorl.layers.router import GlmRouter
    from tests.workers.adapter_job import Job

    Job(Path(directory), bf16=True).save(Path(root), 1)
    again = Job(Path(directory), bf16=True)
    assert again.load(Path(root)) == 1
    names = dcp.FileSystemReader(Path(root) / "iter_0000001").read_metadata().state_dict_metadata
    return list(names), {n: part.expert_bias for n, part in parts(again.model, GlmRouter)}


@pytest.mark.dist
def test_an_adapter_checkpoint_holds_no_bias_and_loading_it_leaves_the_bias_alone(
    subject: Subject, tmp_path: Path
) -> None:
    ((names, biases),) = run_world(
        _saved_and_loaded, 1, str(subject.directory), str(tmp_path / "run")
    )
    assert any("lora_A" in name for name in names)
    assert not [name for name in names if "bias" in name or "router" in name or "gate.w" in name]
    expected = _file_bias(subject.directory)
    assert biases.keys() == expected.keys()
    for layer, bias in biases.items():
        assert bias.dtype == torch.float32 and torch.equal(bias, expected[layer])


def test_a_bf16_bias_in_the_file_is_loaded_as_it_is_with_a_warning(
    subject: Subject, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_xorl.layers.router import GlmRouter

    (tmp_path / "config.json").write_bytes((subject.directory / "config.json").read_bytes())
    tensors: dict[str, Tensor] = {}
    for shard in subject.directory.glob("*.safetensors"):
        tensors |= load_file(shard)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = Subject(tmp_path).loaded(torch.bfloat16)
    (warning,) = [record for record in caplog.records if record.name.startswith("megatron_xorl")]
    assert warning.levelname == "WARNING"
    assert warning.getMessage().startswith(f"{name} is bf16: its fp32 values are lost")
    bias = dict(parts(model, GlmRouter))[2].expert_bias
    assert bias.dtype == torch.float32 and torch.equal(bias, tensors[name].float())
    assert not torch.equal(bias, _file_bias(subject.directory)[2])
