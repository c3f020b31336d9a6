"""The router against transformers' GlmMoeDsaTopkRouter on random input, and what no dtype cast may touch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_xorl.config.model import GlmConfig, load_glm_config
from tests.training.harness import use_one_process

TOKENS = 512
CASES = {
    "as GLM-5.2 ships it": {},
    "four groups, two kept": {"n_group": 4, "topk_group": 2},
    "two groups, one kept": {"n_group": 2, "topk_group": 1},
    "weights not normalised": {"norm_topk_prob": False},
    "one expert a token": {"num_experts_per_tok": 1},
    "one expert a token, not normalised": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "groups, not normalised": {"n_group": 4, "topk_group": 3, "norm_topk_prob": False},
}


def _config(changes: dict[str, Any]) -> GlmConfig:
    return replace(
        load_glm_config("tiny"), **({"n_routed_experts": 16, "num_experts_per_tok": 4} | changes)
    )


def _expected(glm: GlmConfig, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' mixture ``[T, E]`` and chosen sets ``[T, E]``."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

    names = (
        "num_experts_per_tok hidden_size routed_scaling_factor n_group topk_group norm_topk_prob"
    )
    shape = {name: getattr(glm, name) for name in names.split()}
    router = GlmMoeDsaTopkRouter(SimpleNamespace(num_local_experts=glm.n_routed_experts, **shape))
    with torch.no_grad():
        router.weight.copy_(weight)
        router.e_score_correction_bias.copy_(bias)
        _, weights, indices = router(x)
    empty = torch.zeros(x.shape[0], glm.n_routed_experts)
    return empty.scatter(1, indices, weights), empty.bool().scatter(1, indices, True)


def _found(glm: GlmConfig, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Our router's module on ``[s, b, h]``."""
    use_one_process()
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_xorl.layers.router import GlmRouter
    from megatron_xorl.specs import transformer_config

    groups = ProcessGroupCollection.use_mpu_process_groups()
    router = GlmRouter(transformer_config(glm, dtype=torch.float32), groups, glm=glm)
    with torch.no_grad():
        router.weight.copy_(weight)
        router.expert_bias.copy_(bias)
        return router(x.view(TOKENS // 4, 4, -1))


def _inputs(glm: GlmConfig) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(11)
    x = torch.randn(TOKENS, glm.hidden_size, generator=draw)
    weight = torch.randn(glm.n_routed_experts, glm.hidden_size, generator=draw) / 11
    return x, weight, 0.2 * torch.randn(glm.n_routed_experts, generator=draw)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_choices_and_weights_equal_transformers(changes: dict[str, Any]) -> None:
    glm = _config(changes)
    inputs = _inputs(glm)
    probs, routes = _found(glm, *inputs)
    expected, sets = _expected(glm, *inputs)
    assert torch.equal(routes, sets)
    assert probs.dtype == torch.float32 and (probs - expected).abs().max() <= 1e-6
    assert (routes.sum(-1) == glm.num_experts_per_tok).all()


@pytest.mark.parametrize(
    "changes",
    [{"n_group": 4, "topk_group": 2}, {"norm_topk_prob": False}, {"num_experts_per_tok": 1}],
)
def test_the_comparison_sees_a_config_key_that_is_not_obeyed(changes: dict[str, Any]) -> None:
    inputs = _inputs(_config(changes))
    probs, _ = _found(_config({}), *inputs)
    expected, _ = _expected(_config(changes), *inputs)
    assert (probs - expected).abs().max() > 0.1


def test_the_bias_changes_choices_and_never_weights() -> None:
    glm = _config({})
    x, weight, bias = _inputs(glm)
    with_bias, routes = _found(glm, x, weight, bias)
    without, plain = _found(glm, x, weight, torch.zeros_like(bias))
    same = (routes == plain).all(-1)
    assert 0 < int(same.sum()) < TOKENS
    # Sums of the same weights in another order: the last bit may differ, the bias (up to 0.5 here) may not show.
    assert (with_bias[same] - without[same]).abs().max() <= 1e-6


def test_the_router_computes_in_fp32_from_bf16_weights_and_inputs() -> None:
    glm = _config({})
    x, weight, bias = (t.bfloat16() if t.dim() == 2 else t for t in _inputs(glm))
    probs, routes = _found(glm, x, weight.float(), bias)
    expected, sets = _expected(glm, x, weight, bias)
    assert torch.equal(routes, sets) and (probs - expected).abs().max() <= 1e-6
    coarse = (x @ weight.T).float().sigmoid()  # a bf16 product chooses others
    assert not torch.equal((coarse + bias).topk(4).indices.sort().values, _indices(routes))


def _indices(routes: Tensor) -> Tensor:
    return routes.float().topk(4).indices.sort().values


# ---- casts ----------------------------------------------------------------------------------------


def _file_bytes(directory: Path) -> dict[str, Tensor]:
    from megatron_xorl.weights.reader import HfCheckpoint

    checkpoint = HfCheckpoint(directory)
    prefix = "model.layers.2.mlp"
    return {
        "codes": torch.stack(
            [
                checkpoint.read(f"{prefix}.experts.{e}.down_proj.weight").view(torch.uint8)
                for e in range(8)
            ]
        ),
        "scales": torch.stack(
            [checkpoint.read(f"{prefix}.experts.{e}.down_proj.weight_scale_inv") for e in range(8)]
        ),
        "bias": checkpoint.read(f"{prefix}.gate.e_score_correction_bias"),
    }


@pytest.mark.parametrize("cast", ["bfloat16", "Float16Module", "half"])
def test_codes_scales_and_router_bias_are_the_file_s_bytes_after_a_cast(
    tiny_dir: Path, cast: str
) -> None:
    use_one_process()
    from megatron.core.transformer.module import Float16Module

    from megatron_xorl.fp8.weight import FrozenWeight
    from megatron_xorl.training.model import load_model

    model = load_model(tiny_dir, dtype=torch.bfloat16)
    casts = {"Float16Module": lambda: Float16Module(model.config, model).module}
    model = casts.get(cast, getattr(model, cast, None))()
    layer, expected = model.decoder.layers[2], _file_bytes(tiny_dir)
    bank = layer.mlp.experts.linear_fc2.base
    assert torch.equal(bank.codes, expected["codes"]) and bank.codes.dtype == torch.uint8
    assert torch.equal(bank.scales, expected["scales"]) and bank.scales.dtype == torch.float32
    assert layer.mlp.router.expert_bias.dtype == torch.float32
    assert torch.equal(layer.mlp.router.expert_bias, expected["bias"])
    wrong = [
        name
        for name, part in model.named_modules()
        if isinstance(part, FrozenWeight)
        and part.quantized
        and (part.scales.dtype, part.codes.dtype) != (torch.float32, torch.uint8)
    ]
    assert not wrong
    # The cast itself took place: what may be cast was.
    assert layer.input_layernorm.weight.dtype == (torch.half if cast == "half" else torch.bfloat16)


def test_without_the_guard_a_cast_would_round_scales_and_bias(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_one_process()
    from megatron_xorl.fp8.weight import FrozenWeight
    from megatron_xorl.layers.router import GlmRouter
    from megatron_xorl.training.model import load_model

    model = load_model(tiny_dir, dtype=torch.bfloat16)
    for guarded in (FrozenWeight, GlmRouter):
        monkeypatch.setattr(guarded, "_apply", torch.nn.Module._apply)
    model.bfloat16()
    layer, expected = model.decoder.layers[2], _file_bytes(tiny_dir)
    assert layer.mlp.experts.linear_fc2.base.scales.dtype == torch.bfloat16
    assert not torch.equal(layer.mlp.experts.linear_fc2.base.scales.float(), expected["scales"])
    assert not torch.equal(layer.mlp.router.expert_bias.float(), expected["bias"])
