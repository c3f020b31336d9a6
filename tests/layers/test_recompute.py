"""Activation recompute in every form, over a frozen embedding: the same loss and gradients to the bit.

Two microbatches are in flight, as a pipeline schedule has them (forward 0, forward 1, backward 0, backward 1): whatever a layer
left on a module or a config for its followers would be the other microbatch's by then. Megatron-core's own index sharing fails
here by 20 to 37 % (Megatron-LM issue 6020).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_xorl.config.adapter import AdapterConfig
from tests.training.harness import randomise, use_one_process


def _full(method: str, layers: int) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


def _selective(*modules: str) -> dict[str, Any]:
    grouped = {"moe_grouped_gemm": True} if "moe_act" in modules else {}  # Megatron's own condition
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)} | grouped


FORMS = {
    # Four layers: full, full, shared, shared. Units of two and three cut between a full layer and its followers.
    "full, units of one layer": _full("uniform", 1),
    "full, units of two layers": _full("uniform", 2),
    "full, units of three layers": _full("uniform", 3),
    "the first layer of the block": _full("block", 1),
    "the first three layers of the block": _full("block", 3),
    "selective core_attn": _selective("core_attn"),
    "selective mla_up_proj": _selective("mla_up_proj"),
    "selective layernorm": _selective("layernorm"),
    "selective mlp": _selective("mlp"),
    "selective moe": _selective("moe"),
    "selective shared_experts": _selective("shared_experts"),
    "selective moe_act": _selective("moe_act"),
    "selective, all that go together": _selective(
        "core_attn", "mla_up_proj", "layernorm", "mlp", "shared_experts", "moe_act"
    ),
}


def _model(directory: Path, **overrides: Any) -> Any:
    """The model under Megatron's recompute options, all factors random."""
    use_one_process()
    from megatron.core.models.gpt import GPTModel

    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.specs import block_spec, transformer_config
    from megatron_xorl.training.model import attach_adapters, prepare_model
    from megatron_xorl.weights.reader import HfCheckpoint

    glm = load_glm_config(directory)
    config = transformer_config(glm, dtype=torch.float32, **overrides)
    model = GPTModel(
        config,
        block_spec(glm, config),
        vocab_size=glm.vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    prepare_model(model, glm, HfCheckpoint(directory))
    attach_adapters(model, AdapterConfig(rank=4, alpha=8))
    randomise(model)
    return model.train()


def _loss(model: Any, seed: int) -> Tensor:
    ids = torch.randint(0, 256, (2, 57), generator=torch.Generator().manual_seed(seed))
    assert ids.shape[1] - 1 > model.glm_config.index_topk
    loss: Tensor = model(
        ids[:, :-1], torch.arange(56).expand(2, 56), None, labels=ids[:, 1:]
    ).mean()
    return loss


def _gradients(model: Any) -> dict[str, Tensor | None]:
    from megatron_xorl.layers.attach import named_factors

    return {name: parameter.grad for name, (_, _, parameter) in named_factors(model).items()}


def _two_in_flight(model: Any) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Losses and gradients of forward 0, forward 1, backward 0, backward 1."""
    losses = [_loss(model, seed) for seed in (9, 10)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses], _gradients(model)


@pytest.fixture(scope="module")
def plain(tiny_dir: Path) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Without recompute, one microbatch after the other: nothing is in flight twice."""
    model = _model(tiny_dir)
    losses = []
    for seed in (9, 10):
        loss = _loss(model, seed)
        loss.backward()
        losses.append(loss.detach())
    return losses, _gradients(model)


def _differing(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> list[str]:
    assert found.keys() == expected.keys() and len(found) == 84
    return [
        n for n, g in expected.items() if g is None or found[n] is None or not g.equal(found[n])
    ]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_losses_and_gradients_to_the_bit(
    tiny_dir: Path, plain: tuple[list[Tensor], dict[str, Tensor | None]], form: str
) -> None:
    losses, gradients = _two_in_flight(_model(tiny_dir, **FORMS[form]))
    assert all(map(torch.equal, losses, plain[0]))
    assert not _differing(gradients, plain[1])


def test_an_evaluation_between_forward_and_backward_changes_nothing(
    tiny_dir: Path, plain: tuple[list[Tensor], dict[str, Tensor | None]]
) -> None:
    model = _model(tiny_dir, **_full("uniform", 1))
    losses = []
    for seed in (9, 10):
        losses.append(_loss(model, seed))
        model.eval()
        with torch.no_grad():
            _loss(model, seed + 100)
        model.train()
    for loss in losses:
        loss.backward()
    assert not _differing(_gradients(model), plain[1])


def test_two_models_in_one_process_do_not_see_each_other(
    tiny_dir: Path, plain: tuple[list[Tensor], dict[str, Tensor | None]]
) -> None:
    model, other = _model(tiny_dir), _model(tiny_dir)
    with torch.no_grad():
        other.embedding.word_embeddings.weight.mul_(-1.0)
    losses = []
    for seed in (9, 10):
        losses.append(_loss(model, seed))
        _loss(other, seed).backward()
    for loss in losses:
        loss.backward()
    assert not _differing(_gradients(model), plain[1])
    assert _differing(_gradients(other), plain[1])


def test_a_selection_kept_on_the_module_is_caught_by_two_microbatches_in_flight(
    tiny_dir: Path,
    plain: tuple[list[Tensor], dict[str, Tensor | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The public fault: a full layer leaves its selection behind, and a follower picks up whatever was left last.
    from megatron_xorl.layers.attention import SparseLatentAttention

    real = SparseLatentAttention.forward
    left: list[Tensor] = []

    def forward(self: Any, hidden: Tensor, *, selected: Tensor | None, **named: Any) -> Any:
        out = real(self, hidden, selected=left[-1] if left else selected, **named)
        if self.core_attention.indexer is not None:
            left.append(out[1])
        return out

    monkeypatch.setattr(SparseLatentAttention, "forward", forward)
    _, gradients = _two_in_flight(_model(tiny_dir, **_full("uniform", 1)))
    assert _differing(gradients, plain[1])


def test_without_the_hook_on_the_frozen_embedding_the_gradients_vanish(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.layers import attach

    monkeypatch.setattr(attach, "_require_grad", lambda module, inputs, output: output)
    _, lost = _two_in_flight(_model(tiny_dir, **_full("uniform", 1)))
    # No checkpoint has an input that requires a gradient, so nothing inside one gets a gradient, and no error is raised.
    kept = [name for name, gradient in lost.items() if gradient is not None]
    assert kept == ["lm_head.lora_A", "lm_head.lora_B"]


@pytest.mark.parametrize("module", ["layernorm", "mla_up_proj", "moe_act"])
def test_what_is_computed_again_is_not_kept(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    from megatron_xorl.layers import attention, experts

    seen: list[StorageWeakRef] = []

    def watch(x: Tensor) -> None:
        seen.append(StorageWeakRef(x.untyped_storage()))

    attend, swiglu = attention.attend_selected, experts.swiglu
    if module == "mla_up_proj":  # the absorbed, rotated queries
        monkeypatch.setattr(
            attention, "attend_selected", lambda q, *rest: (watch(q), attend(q, *rest))[1]
        )
    if module == "moe_act":
        monkeypatch.setattr(experts, "swiglu", lambda x: (y := swiglu(x), watch(y))[0])
    alive = []
    for way in ({}, _selective(module)):
        model = _model(tiny_dir, **way)
        for name, part in model.named_modules():
            if module == "layernorm" and name.endswith(("input_layernorm", "pre_mlp_layernorm")):
                part.register_forward_hook(lambda _, __, out: watch(out))
        seen.clear()
        loss = _loss(model, 9)
        alive.append((len(seen), sum(not storage.expired() for storage in seen)))
        loss.backward()
    count = {"layernorm": 8, "mla_up_proj": 4, "moe_act": 3}[module]
    assert alive == [(count, count), (count, 0)]


def test_a_freed_output_survives_a_second_backward() -> None:
    use_one_process()
    from megatron_xorl.layers.recompute import freed

    x = torch.randn(5, 4, requires_grad=True)
    w = torch.randn(4, 3, requires_grad=True)
    calls = []

    def function(value: Tensor) -> Tensor:
        calls.append(1)
        return value.tanh()

    with freed(function, x) as y:
        out = (y @ w).sum() + (y.t() * 2).sum() + (y[1:] @ w).sin().sum()
    first = torch.autograd.grad(out, w, retain_graph=True)[0]
    again = torch.autograd.grad(out, w)[0]
    assert torch.equal(first, again)
    plain = x.detach().tanh()
    expected = torch.func.grad(
        lambda v: (plain @ v).sum() + (plain.t() * 2).sum() + (plain[1:] @ v).sin().sum()
    )(w.detach())
    assert torch.allclose(first, expected, atol=1e-6)
    assert len(calls) == 3  # forward, and once for each backward, whoever asks
