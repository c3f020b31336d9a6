"""The base against transformers' GlmMoeDsa on the dequantised weights, fp32, more tokens than ``index_topk``.

Limits: max-abs logits 1e-5, mean KL 1e-7, index and route sets exactly equal, mixture weights 1e-6. Each negative control breaks
the model in one place and is seen by the same comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import hf_oracle
from tests.training.harness import index_sets, relative, use_one_process
from tests.worlds import run_world

MAX_ABS, MEAN_KL, LENGTH = 1e-5, 1e-7, 80


def _ids(batch: int = 2, length: int = LENGTH, seed: int = 3) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def _gap(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Max-abs difference of the logits, and mean KL in fp64."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return (found - expected).abs().max().item(), kl.item()


def _agrees(found: Tensor, expected: Tensor) -> bool:
    largest, kl = _gap(found, expected)
    print(f"max-abs {largest:.2e}, mean KL {kl:.1e}")
    return largest <= MAX_ABS and kl <= MEAN_KL


class _Case:
    """A loaded model, the oracle of the same directory, and what both gave and chose on one batch."""

    def __init__(self, directory: Path) -> None:
        from megatron_xorl.training.model import load_model

        self.directory = directory
        self.model = load_model(directory)
        self.oracle = hf_oracle(directory)
        self.hf_selected: dict[int, Tensor] = {}
        self.hf_routes: dict[int, tuple[Tensor, Tensor]] = {}
        hooks = list(self._watch_oracle())
        with torch.no_grad():
            self.expected = self.oracle(input_ids=_ids()).logits
        for hook in hooks:
            hook.remove()

    def _watch_oracle(self) -> Iterator[Any]:
        for number, layer in enumerate(self.oracle.model.layers):

            def routed(_: Any, __: Any, out: Any, n: int = number) -> None:
                self.hf_routes[n] = (out[2], out[1])

            def indexed(_: Any, __: Any, out: Tensor, n: int = number) -> None:
                self.hf_selected[n] = out.long()

            if layer.self_attn.indexer is not None:
                yield layer.self_attn.indexer.register_forward_hook(indexed)
            if hasattr(layer.mlp, "gate"):
                yield layer.mlp.gate.register_forward_hook(routed)

    def logits(self, ids: Tensor | None = None, **named: Any) -> Tensor:
        from megatron_xorl.training.model import forward_logits

        with torch.no_grad():
            return forward_logits(self.model, _ids() if ids is None else ids, **named)

    def parts(self, kind: type) -> list[tuple[int, Any]]:
        return [
            (layer.layer_number - 1, part)
            for layer in self.model.decoder.layers
            for part in layer.modules()
            if isinstance(part, kind)
        ]


@pytest.fixture(scope="module")
def case(tiny_dir: Path) -> _Case:
    use_one_process()
    return _Case(tiny_dir)


def test_logits_on_the_small_block_equal_transformers(case: _Case) -> None:
    assert case.model.glm_config.index_topk < LENGTH and case.model.glm_config.index_n_heads >= 16
    assert _agrees(case.logits(), case.expected)


def test_logits_on_the_shipped_block_equal_transformers(tiny128_dir: Path) -> None:
    use_one_process()
    other = _Case(tiny128_dir)
    assert other.model.glm_config.weight_block_size == (128, 128)
    assert _agrees(other.logits(), other.expected)


def test_a_bf16_checkpoint_loads_into_the_same_modules_and_equals_its_own_oracle(
    tmp_path: Path, case: _Case
) -> None:
    from megatron_xorl.convert.tiny import make_tiny
    from megatron_xorl.fp8.weight import FrozenWeight

    plain = _Case(make_tiny(tmp_path / "bf16", block=None))
    assert [name for name, _ in plain.model.named_modules()] == [
        name for name, _ in case.model.named_modules()
    ]
    kinds = [part.quantized for part in plain.model.modules() if isinstance(part, FrozenWeight)]
    assert kinds and not any(kinds)
    assert _agrees(plain.logits(), plain.expected)
    assert not _agrees(plain.logits(), case.expected)  # the two checkpoints are different models


def _rank_logits(directory: str, layout: dict[str, int]) -> tuple[Tensor, int]:
    from megatron_xorl.fp8.weight import FrozenWeight
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.model import forward_logits, load_model

    use_cpu()
    initialize(**layout)
    model = load_model(directory)
    held = sum(part.nbytes for part in model.modules() if isinstance(part, FrozenWeight))
    with torch.no_grad():
        return forward_logits(model, _ids()), held


@pytest.mark.dist
def test_two_processes_with_the_experts_cut_between_them_equal_transformers(
    tiny_dir: Path, case: _Case
) -> None:
    from megatron_xorl.fp8.weight import FrozenWeight

    weights = {n: w.nbytes for n, w in case.model.named_modules() if isinstance(w, FrozenWeight)}
    banks = sum(size for name, size in weights.items() if ".mlp.experts." in name)
    for logits, held in run_world(_rank_logits, 2, str(tiny_dir), {"ep": 2}):
        assert _agrees(logits, case.expected)
        assert held == sum(weights.values()) - banks // 2


def test_each_packed_document_gives_the_logits_it_gives_alone(case: _Case) -> None:
    lengths = [45, 37, 50]  # each above index_topk
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    row = _ids(1, sum(lengths))
    alone = torch.cat([case.logits(part) for part in row.split(lengths, dim=1)], dim=1)
    packed = case.logits(row, cu_seqlens=bounds)
    # The noise of fp32 products of another shape: 1e-6 of the logits' size, 5e-6 at the worst of 42,240 logits.
    assert relative(packed, alone) <= 1e-6 and (packed - alone).abs().max() <= 5e-6
    assert (case.logits(row) - alone).abs().max() > 1e-2  # as one document they differ


# ---- what the model chooses -----------------------------------------------------------------------


def test_index_sets_of_full_layers_are_transformers_and_shared_layers_use_the_same_tensor(
    case: _Case,
) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention
    from megatron_xorl.layers.indexer import Indexer

    given: dict[int, Tensor | None] = {}
    made: dict[int, Tensor] = {}
    used: dict[int, Tensor] = {}
    hooks = []
    for layer, attention in case.parts(SparseLatentAttention):
        hooks.append(
            attention.register_forward_pre_hook(
                lambda _, __, named, n=layer: given.update({n: named["selected"]}), with_kwargs=True
            )
        )
        hooks.append(
            attention.register_forward_hook(lambda _, __, out, n=layer: used.update({n: out[1]}))
        )
    for layer, indexer in case.parts(Indexer):
        hooks.append(
            indexer.register_forward_hook(lambda _, __, out, n=layer: made.update({n: out}))
        )
    case.logits()
    for hook in hooks:
        hook.remove()
    glm = case.model.glm_config
    assert tuple(made) == glm.full_indexer_layers and tuple(case.hf_selected) == tuple(made)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for layer, selected in made.items():
        hf = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
        hf = hf.scatter(-1, case.hf_selected[layer], True) & causal
        assert torch.equal(index_sets(selected), hf), layer
        assert int(hf.sum(-1).max()) == glm.index_topk
    for layer in glm.shared_indexer_layers:
        source = made[glm.indexer_source(layer)]
        assert given[layer] is source and used[layer] is source, layer


def test_routes_are_transformers_and_the_mixture_weights_agree(case: _Case) -> None:
    from megatron_xorl.layers.router import GlmRouter

    found: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = [
        router.register_forward_hook(lambda _, __, out, n=layer: found.update({n: out}))
        for layer, router in case.parts(GlmRouter)
    ]
    case.logits()
    for hook in hooks:
        hook.remove()
    assert found.keys() == case.hf_routes.keys() == {1, 2, 3}
    for layer, (indices, weights) in case.hf_routes.items():
        hf = torch.zeros(2 * LENGTH, 8).scatter(1, indices, weights.float())
        probs, routes = (
            t.view(LENGTH, 2, 8).transpose(0, 1).reshape(2 * LENGTH, 8) for t in found[layer]
        )
        assert torch.equal(routes, hf > 0), layer
        assert (probs - hf).abs().max() <= 1e-6, layer


# ---- negative controls ----------------------------------------------------------------------------


def _half_split_indexer_rope(case: _Case, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.indexer import Indexer

    for _, indexer in case.parts(Indexer):
        patch.setattr(indexer, "glm", replace(indexer.glm, indexer_rope_interleave=False))


def _half_split_main_rope(case: _Case, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention

    for _, attention in case.parts(SparseLatentAttention):
        patch.setattr(attention, "glm", replace(attention.glm, rope_interleave=False))


def _no_relu(case: _Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "relu", lambda x: x)


def _ignored_scales(case: _Case, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.fp8.weight import FrozenWeight

    for part in case.model.modules():
        if isinstance(part, FrozenWeight) and part.quantized:
            patch.setitem(part._buffers, "scales", torch.ones_like(part.scales))


def _one_ignored_scale(case: _Case, patch: pytest.MonkeyPatch) -> None:
    """One block of one expert of one layer, by a tenth."""
    buffers = case.model.decoder.layers[2].mlp.experts.linear_fc2.base._buffers
    scales = buffers["scales"].clone()
    scales[3, 1, 1] *= 1.1
    patch.setitem(buffers, "scales", scales)


def _raw_q_into_the_indexer(case: _Case, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention
    from megatron_xorl.layers.indexer import Indexer

    seen: dict[int, Tensor] = {}
    real = Indexer.forward
    for _, attention in case.parts(SparseLatentAttention):
        norm = attention.q_layernorm
        patch.setattr(norm, "forward", _remembering(norm.forward, seen, "q"))

    def unnormalised(self: Indexer, hidden: Tensor, q: Tensor, rope: Any, legal: Tensor) -> Tensor:
        return real(self, hidden, seen["q"], rope, legal)

    patch.setattr(Indexer, "forward", unnormalised)


def _remembering(forward: Callable[[Tensor], Tensor], seen: dict[Any, Tensor], key: Any) -> Any:
    def wrapped(x: Tensor) -> Tensor:
        seen[key] = x
        return forward(x)

    return wrapped


def _bias_in_the_mixture(case: _Case, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers import router

    real = router.choose_experts

    def biased(logits: Tensor, bias: Tensor, glm: Any) -> tuple[Tensor, Tensor]:
        _, chosen = real(logits, bias, glm)
        weights = (logits.sigmoid() + bias).gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True) * glm.routed_scaling_factor, chosen

    patch.setattr(router, "choose_experts", biased)


def _theta_of_glm_5_1(case: _Case, patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention

    for _, attention in case.parts(SparseLatentAttention):
        patch.setattr(attention, "glm", replace(attention.glm, rope_theta=1e6))


def _selection_of_the_wrong_layer(case: _Case, patch: pytest.MonkeyPatch) -> None:
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
    fault: Callable[[_Case, pytest.MonkeyPatch], None],
    case: _Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        fault(case, patch)
        assert not _agrees(case.logits(), case.expected)
        assert _gap(case.logits(), case.expected)[1] > 10 * MEAN_KL
    assert _agrees(case.logits(), case.expected)  # the fault is gone again


def test_an_oracle_without_scales_disagrees(case: _Case) -> None:
    with torch.no_grad():
        unscaled = hf_oracle(case.directory, apply_scales=False)(input_ids=_ids()).logits
    assert not _agrees(case.logits(), unscaled)


@pytest.mark.parametrize("latent", ["q", "kv"])
def test_latent_norms_use_1e_6_which_inputs_of_tiny_norm_can_tell_from_1e_5(
    case: _Case, latent: str
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


def test_decoder_norms_use_the_config_s_epsilon_not_the_latent_one(case: _Case) -> None:
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
