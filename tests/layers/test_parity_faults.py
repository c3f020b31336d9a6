"""Negative controls of the parity with transformers: the model is broken in one place, and the same comparison sees it.

Epsilons are judged at the norms themselves, on inputs of tiny norm: in whole logits the latent one hardly shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layers.parity_case import MEAN_KL, ParityCase, agrees, gap, token_ids
from tests.oracle import hf_oracle


def _half_split_indexer_rope(case: ParityCase, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.indexer import Indexer

    for _, indexer in case.parts(Indexer):
        patch.setattr(indexer, "glm", replace(indexer.glm, indexer_rope_interleave=False))


def _half_split_main_rope(case: ParityCase, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention

    for _, attention in case.parts(SparseLatentAttention):
        patch.setattr(attention, "glm", replace(attention.glm, rope_interleave=False))


def _no_relu(case: ParityCase, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "relu_", lambda x: x)


def _ignored_scales(case: ParityCase, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.fp8.weight import FrozenWeight

    for part in case.model.modules():
        if isinstance(part, FrozenWeight) and part.quantized:
            patch.setitem(part._buffers, "scales", torch.ones_like(part.scales))


def _one_ignored_scale(case: ParityCase, patch: pytest.MonkeyPatch) -> None:
    """One block of one expert of one layer, by a tenth."""
    buffers = case.model.decoder.layers[2].mlp.experts.linear_fc2.base._buffers
    scales = buffers["scales"].clone()
    scales[3, 1, 1] *= 1.1
    patch.setitem(buffers, "scales", scales)


def _raw_q_into_the_indexer(case: ParityCase, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention
    from megatron_xorl.layers.indexer import Indexer

    seen: dict[int, Tensor] = {}
    real = Indexer.forward
    for _, attention in case.parts(SparseLatentAttention):
        norm = attention.q_layernorm
        patch.setattr(norm, "forward", _remembering(norm.forward, seen, "q"))

    def unnormalised(self: Indexer, hidden: Tensor, q: Tensor, *rest: Any) -> Tensor:
        return real(self, hidden, seen["q"], *rest)

    patch.setattr(Indexer, "forward", unnormalised)


def _remembering(forward: Callable[[Tensor], Tensor], seen: dict[Any, Tensor], key: Any) -> Any:
    def wrapped(x: Tensor) -> Tensor:
        seen[key] = x
        return forward(x)

    return wrapped


def _bias_in_the_mixture(case: ParityCase, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers import router

    real = router.choose_experts

    def biased(logits: Tensor, bias: Tensor, glm: Any, *replay: Any) -> tuple[Tensor, Tensor]:
        _, chosen = real(logits, bias, glm, *replay)
        weights = (logits.sigmoid() + bias).gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True) * glm.routed_scaling_factor, chosen

    patch.setattr(router, "choose_experts", biased)


def _theta_of_glm_5_1(case: ParityCase, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention

    for _, attention in case.parts(SparseLatentAttention):
        patch.setattr(attention, "glm", replace(attention.glm, rope_theta=1e6))


def _selection_of_the_wrong_layer(case: ParityCase, patch: pytest.MonkeyPatch) -> None:
    """Shared layers use layer 0's selection instead of layer 1's."""
    from megatron_xorl.layers.attention import SparseLatentAttention

    real = SparseLatentAttention.forward
    first: list[Tensor] = []

    def forward(self: Any, hidden: Tensor, *, selected: Tensor | None, **named: Any) -> Any:
        if self.core_attention.indexer is None:
            selected = first[0]
        out = real(self, hidden, selected=selected, **named)
        first.append(out[1])
        return out

    patch.setattr(SparseLatentAttention, "forward", forward)


@pytest.mark.parametrize(
    "fault",
    [
        _half_split_indexer_rope,
        _half_split_main_rope,
        _no_relu,
        _ignored_scales,
        _one_ignored_scale,
        _raw_q_into_the_indexer,
        _bias_in_the_mixture,
        _theta_of_glm_5_1,
        _selection_of_the_wrong_layer,
    ],
    ids=lambda fault: fault.__name__.strip("_"),
)
def test_a_fault_is_seen_by_the_same_comparison(
    fault: Callable[[ParityCase, pytest.MonkeyPatch], None],
    case: ParityCase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        fault(case, patch)
        assert not agrees(case.logits(), case.expected)
        assert gap(case.logits(), case.expected)[1] > 10 * MEAN_KL
    assert agrees(case.logits(), case.expected)  # the fault is gone again


def test_an_oracle_without_scales_disagrees(case: ParityCase) -> None:
    with torch.no_grad():
        unscaled = hf_oracle(case.directory, apply_scales=False)(input_ids=token_ids()).logits
    assert not agrees(case.logits(), unscaled)


@pytest.mark.parametrize("latent", ["q", "kv"])
def test_latent_norms_use_1e_6_which_inputs_of_tiny_norm_can_tell_from_1e_5(
    case: ParityCase, latent: str
) -> None:
    ours = case.model.decoder.layers[1].self_attention
    hf = case.oracle.model.layers[1].self_attn
    norm, expected_norm = {
        "q": (ours.q_layernorm, hf.q_a_layernorm),
        "kv": (ours.kv_layernorm, hf.kv_a_layernorm),
    }[latent]
    x = 2e-3 * torch.randn(4, norm.weight.shape[0], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = expected_norm(x)
        assert (norm(x) - expected).abs().max() <= 1e-6
        wrong = type(norm)(ours.config, norm.weight.shape[0], eps=1e-5)
        wrong.weight.copy_(norm.weight)
        assert (wrong(x) - expected).abs().max() > 0.1


def test_decoder_norms_use_the_config_s_epsilon_not_the_latent_one(case: ParityCase) -> None:
    x = 2e-3 * torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (case.model.decoder.final_layernorm, case.oracle.model.norm),
        (case.model.decoder.layers[1].input_layernorm, case.oracle.model.layers[1].input_layernorm),
        (
            case.model.decoder.layers[1].pre_mlp_layernorm,
            case.oracle.model.layers[1].post_attention_layernorm,
        ),
    ]
    with torch.no_grad():
        for ours, hf in pairs:
            assert (ours(x) - hf(x)).abs().max() <= 1e-6
            wrong = type(ours)(case.model.config, 128, eps=1e-6)
            wrong.weight.copy_(ours.weight)
            assert (wrong(x) - hf(x)).abs().max() > 0.1
