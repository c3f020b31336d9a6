"""Scopes: which factors train, that nothing else changes by a bit, and that every region learns.

With plain ``torch.optim.AdamW`` in one process; Megatron's optimizer is in ``test_model.py``.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.adapters.scopes import SCOPES, scope_regions
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError
from tests.training.harness import use_one_process

STEPS = 20
PATTERNS = {
    "attention": ["*.self_attn.*"],
    "dense_mlp": ["model.layers.0.mlp.*_proj"],
    "shared_experts": ["*.shared_experts.*"],
    "routed_experts": ["*.mlp.experts.*"],
    "lm_head": ["lm_head"],
}


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, 256, (1, 41), generator=torch.Generator().manual_seed(21))
    mask = torch.zeros(1, 40)
    mask[:, 24:] = 1.0
    return ids[:, :-1], ids[:, 1:], mask


def _loss(model: nn.Module) -> Tensor:
    ids, labels, mask = _batch()
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    losses = model(ids, positions, None, labels=labels)
    return (losses.float() * mask).sum() / mask.sum()


def _model(directory: Path, **adapter: Any) -> Any:
    use_one_process()
    from megatron_xorl.training.model import load_model

    config = AdapterConfig(**({"rank": 4, "alpha": 8} | adapter)) if adapter else None
    return load_model(directory, config)


def _values(model: Any) -> dict[str, Tensor]:
    from megatron_xorl.layers.attach import named_factors

    return {name: p.detach().clone() for name, (_, _, p) in named_factors(model).items()}


def _train(model: Any, steps: int = STEPS, lr: float = 3e-3) -> tuple[list[float], Any]:
    """Plain AdamW; return the losses, and by step the gradient norms of every trained factor."""
    from megatron_xorl.layers.attach import check_gradients
    from megatron_xorl.training.model import trainable_factors

    factors = trainable_factors(model)
    optimizer = torch.optim.AdamW(
        factors.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01, foreach=False
    )
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model)
        loss.backward()
        check_gradients(model)
        losses.append(loss.item())
        norms.append({name: p.grad.norm().item() for name, p in factors.items()})
        optimizer.step()
    return losses, norms


@pytest.fixture(scope="module")
def base_loss(tiny_dir: Path) -> Tensor:
    with torch.no_grad():
        return _loss(_model(tiny_dir))


# ---- step one -------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["keep", "drop"])
@pytest.mark.parametrize("scope", list(SCOPES))
def test_at_step_one_every_scope_gives_the_loss_of_the_bare_base_to_the_bit(
    scope: str, frozen: str, tiny_dir: Path, base_loss: Tensor
) -> None:
    model = _model(tiny_dir, glm52_lora_scope=scope, frozen_factors=frozen)
    loss = _loss(model)
    assert loss.requires_grad and torch.equal(loss.detach(), base_loss)
    expected = {f.name for f in model.inventory.factors if f.region in scope_regions(scope)}
    assert {f.name for f in model.inventory.trainable} == expected
    assert len(model.inventory.factors) == (84 if frozen == "keep" else len(expected))


def test_the_comparison_of_step_one_sees_a_b_that_is_not_zero(
    tiny_dir: Path, base_loss: Tensor
) -> None:
    model = _model(tiny_dir, glm52_lora_scope="all")
    with torch.no_grad():
        _factor(model, "model.layers.2.mlp.experts.down_proj.lora_B").fill_(1e-3)
    assert not torch.equal(_loss(model).detach(), base_loss)


@pytest.mark.parametrize("scope", list(SCOPES))
def test_what_requires_a_gradient_is_exactly_the_trainable_part_of_the_inventory(
    scope: str, tiny_dir: Path
) -> None:
    from megatron_xorl.layers.attach import named_factors

    model = _model(tiny_dir, glm52_lora_scope=scope)
    adapter = AdapterConfig(rank=4, alpha=8, glm52_lora_scope=scope)
    inventory = build_inventory(model.glm_config, adapter, dtype="float32")
    wanted = {factor.name: factor.shape for factor in inventory.trainable}
    named = {id(p): name for name, (_, _, p) in named_factors(model).items()}
    training = [p for p in model.parameters() if p.requires_grad]
    assert {named[id(p)]: tuple(p.shape) for p in training} == wanted
    assert {"all": 84, "moe": 36, "shared_experts": 18, "routed_experts": 18}[scope] == len(wanted)


# ---- twenty steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        "routed_experts",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("moe", "shared_experts")),
    ],
)
def test_keeping_or_dropping_the_factors_outside_the_scope_trains_the_same_bits(
    scope: str, tiny_dir: Path
) -> None:
    from megatron_xorl.layers.attach import named_factors

    results = {}
    for frozen in ("keep", "drop"):
        model = _model(tiny_dir, glm52_lora_scope=scope, frozen_factors=frozen)
        before = _values(model)
        losses, _ = _train(model)
        results[frozen] = (losses, _values(model))
        for name, (factor, _, parameter) in named_factors(model).items():
            if not factor.trainable:
                assert parameter.grad is None, name
                assert torch.equal(parameter, before[name]), name
            else:
                assert not torch.equal(parameter, before[name]), name
    assert results["keep"][0] == results["drop"][0]
    kept, dropped = results["keep"][1], results["drop"][1]
    assert len(kept) == 84 and dropped.keys() < kept.keys()
    assert all(torch.equal(value, kept[name]) for name, value in dropped.items())


def test_the_comparison_of_keep_and_drop_sees_a_frozen_factor_that_contributes(
    tiny_dir: Path,
) -> None:
    scope = {"glm52_lora_scope": "routed_experts"}
    kept, dropped = (_model(tiny_dir, **scope, frozen_factors=f) for f in ("keep", "drop"))
    with torch.no_grad():
        _factor(kept, "model.layers.0.self_attn.q_a_proj.lora_B").fill_(1e-4)
    assert _train(kept, steps=2)[0] != _train(dropped, steps=2)[0]


@pytest.mark.parametrize("region", list(PATTERNS))
def test_each_region_trained_alone_lowers_the_loss(
    region: str, tiny_dir: Path, base_loss: Tensor
) -> None:
    model = _model(tiny_dir, lora_target_modules=PATTERNS[region])
    assert {f.region for f in model.inventory.factors} == {region}
    losses, _ = _train(model, lr=5e-3)
    print(f"{region}: {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[0] == base_loss.item()
    assert losses[-1] < 0.8 * losses[0]


def test_every_target_has_a_b_gradient_at_step_one_and_an_a_gradient_at_step_two(
    tiny_dir: Path,
) -> None:
    model = _model(tiny_dir, glm52_lora_scope="all")
    _, (first, second) = _train(model, steps=2)
    smallest: dict[str, list[float]] = defaultdict(lambda: [float("inf")] * 2)
    for factor in model.inventory.trainable:
        if factor.side == "A":
            assert first[factor.name] == 0.0, factor.name  # B is still zero
        column = 0 if factor.side == "B" else 1
        norm = first[factor.name] if factor.side == "B" else second[factor.name]
        row = smallest[factor.region]
        row[column] = min(row[column], norm)
    for region, (b, a) in smallest.items():
        print(f"{region:16s} smallest |grad B| at step 1 {b:.1e}, |grad A| at step 2 {a:.1e}")
    assert smallest.keys() == PATTERNS.keys()
    assert all(b > 1e-6 and a > 1e-6 for b, a in smallest.values()), dict(smallest)


# ---- faults are named -----------------------------------------------------------------------------


def _factor(model: Any, name: str) -> nn.Parameter:
    from megatron_xorl.layers.attach import named_factors

    return named_factors(model)[name][2]


HEAD_B = "lm_head.lora_B"


def _base_trains(model: Any) -> str:
    model.embedding.word_embeddings.weight.requires_grad_(True)
    return "base parameter embedding.word_embeddings.weight requires a gradient"


def _in_scope_frozen(model: Any) -> str:
    name = "model.layers.1.mlp.experts.up_proj.lora_A"
    _factor(model, name).requires_grad_(False)
    return f"{name} requires_grad is False, the inventory says True"


def _out_of_scope_trains(model: Any) -> str:
    _factor(model, HEAD_B).requires_grad_(True)
    return f"{HEAD_B} requires_grad is True, the inventory says False"


def _frozen_b_not_zero(model: Any) -> str:
    with torch.no_grad():
        _factor(model, HEAD_B)[3, 1] = 1e-30
    return f"{HEAD_B} is frozen but not zero"


def _half_frozen_pair(model: Any) -> str:
    from dataclasses import replace

    from megatron_xorl.layers.attach import lora_pairs

    (pair,) = (p for p in lora_pairs(model) if p.target == "lm_head")
    piece = pair.slices["A"]
    pair.slices["A"] = replace(piece, factor=replace(piece.factor, trainable=True))
    pair.lora_A.requires_grad_(True)
    return "lm_head: lora_A and lora_B must train together"


@pytest.mark.parametrize(
    "fault",
    [_base_trains, _in_scope_frozen, _out_of_scope_trains, _frozen_b_not_zero, _half_frozen_pair],
    ids=lambda fault: fault.__name__.strip("_"),
)
def test_a_trainability_fault_is_named(fault: Any, tiny_dir: Path) -> None:
    from megatron_xorl.layers.attach import check_trainability

    model = _model(tiny_dir, glm52_lora_scope="routed_experts")
    check_trainability(model)
    told = fault(model)
    with pytest.raises(AdapterError) as refused:
        check_trainability(model)
    assert told in str(refused.value)


def test_a_frozen_b_that_is_not_zero_passes_only_when_it_is_allowed(tiny_dir: Path) -> None:
    from megatron_xorl.layers.attach import check_trainability

    model = _model(tiny_dir, glm52_lora_scope="moe")
    _frozen_b_not_zero(model)
    check_trainability(model, allow_nonzero_frozen=True)


@pytest.mark.parametrize("side", ["missing", "unwanted"])
def test_a_gradient_fault_is_named(side: str, tiny_dir: Path) -> None:
    from megatron_xorl.layers.attach import check_gradients

    model = _model(tiny_dir, glm52_lora_scope="routed_experts")
    _loss(model).backward()
    check_gradients(model)
    if side == "missing":
        name, told = "model.layers.3.mlp.experts.gate_proj.lora_B", "trains and has no gradient"
        _factor(model, name).grad = None
    else:
        name, told = HEAD_B, "is frozen and has a gradient"
        _factor(model, name).grad = torch.zeros_like(_factor(model, name))
    with pytest.raises(AdapterError) as refused:
        check_gradients(model)
    assert f"{name} {told}" in str(refused.value)


def test_a_second_attachment_is_refused(tiny_dir: Path) -> None:
    from megatron_xorl.training.model import attach_adapters

    model = _model(tiny_dir, glm52_lora_scope="all")
    with pytest.raises(AdapterError, match="already carries adapters"):
        attach_adapters(model, AdapterConfig(rank=4, alpha=8))
