"""Gradients of every factor against an fp64 hand computation on the dequantised weights, A and B random and non-zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_xorl.config.adapter import AdapterConfig
from tests.layers.reference import Reference, mean_loss
from tests.training.comparison import relative
from tests.training.harness import index_sets, randomise, use_one_process

ADAPTER = {"rank": {"routed_experts": 3, "default": 5}, "alpha": 10}
REGIONS = ("attention", "dense_mlp", "shared_experts", "routed_experts", "lm_head")
LIMIT = 1e-4


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, 256, (2, 49), generator=torch.Generator().manual_seed(5))
    mask = torch.zeros(2, 48)
    mask[0, 20:], mask[1, 41:] = 1.0, 1.0
    return ids[:, :-1], ids[:, 1:], mask


def _product(directory: Path, adapter: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the model with random factors, and their full values."""
    use_one_process()
    from megatron_xorl.training.model import load_model

    model = load_model(directory, AdapterConfig(**adapter))
    return model, randomise(model)


def _loss(model: Any) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """Product's loss, its selections (bool [b, s, s]) and its routes (bool [b * s, experts]), by layer."""
    from megatron_xorl.layers.attention import SparseLatentAttention
    from megatron_xorl.layers.router import GlmRouter

    ids, labels, mask = _batch()
    selected: dict[int, Tensor] = {}
    routes: dict[int, Tensor] = {}
    hooks = []
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        for part in layer.modules():
            if isinstance(part, SparseLatentAttention):
                hooks.append(
                    part.register_forward_hook(
                        lambda _, __, out, n=number: selected.update({n: index_sets(out[1])})
                    )
                )
            if isinstance(part, GlmRouter):
                hooks.append(
                    part.register_forward_hook(
                        lambda _, __, out, n=number: routes.update({n: out[1]})
                    )
                )
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    losses = model(ids, positions, None, labels=labels)
    for hook in hooks:
        hook.remove()
    # Megatron keeps the sequence first: tokens arrive at the router in [s, b] order.
    batch_first = {
        n: r.view(ids.shape[1], ids.shape[0], -1).transpose(0, 1).flatten(0, 1)
        for n, r in routes.items()
    }
    return (losses.float() * mask).sum() / mask.sum(), selected, batch_first


def _by_region(model: Any, gradients: dict[str, Tensor]) -> dict[str, tuple[float, str]]:
    """Worst relative error of the product's gradients in each region."""
    from megatron_xorl.layers.attach import named_factors

    worst: dict[str, tuple[float, str]] = defaultdict(lambda: (-1.0, ""))
    for name, (factor, _, parameter) in named_factors(model).items():
        assert parameter.grad is not None, name
        figure = relative(parameter.grad, gradients[name])
        worst[factor.region] = max(worst[factor.region], (figure, name))
    return dict(worst)


@contextmanager
def _reference(directory: Path, full: dict[str, Tensor], inventory: Any) -> Iterator[Reference]:
    scales = {factor.target: ADAPTER["alpha"] / factor.rank for factor in inventory.factors}
    leaves = {name: value.double().requires_grad_() for name, value in full.items()}
    yield Reference(directory, leaves, scales)


@pytest.fixture(scope="module")
def run(tiny_dir: Path) -> Any:
    """One backward of the product and of the reference, shared by the tests that only look at it."""
    model, full = _product(tiny_dir, ADAPTER)
    loss, selected, routes = _loss(model)
    loss.backward()
    ids, labels, mask = _batch()
    with _reference(tiny_dir, full, model.inventory) as reference:
        expected = mean_loss(reference.logits(ids), labels, mask)
        expected.backward()
    return model, loss.detach(), selected, routes, reference, expected.detach()


def test_the_discrete_choices_of_the_fp64_reference_are_the_model_s(run: Any) -> None:
    _, _, selected, routes, reference, _ = run
    assert selected.keys() == reference.selected.keys() == {0, 1, 2, 3}
    for layer, chosen in reference.selected.items():
        assert torch.equal(selected[layer], chosen), layer
    assert routes.keys() == reference.routes.keys() == {1, 2, 3}
    for layer, route in reference.routes.items():
        assert torch.equal(routes[layer], route), layer


def test_the_loss_equals_the_fp64_loss(run: Any) -> None:
    _, loss, _, _, _, expected = run
    assert abs(loss.double() - expected) / expected <= 1e-6


def test_gradients_of_every_factor_equal_the_fp64_gradients(run: Any) -> None:
    model, _, _, _, reference, _ = run
    names = {factor.name for factor in model.inventory.factors}
    assert names == reference.factors.keys() and len(names) == 84
    worst = _by_region(model, {name: leaf.grad for name, leaf in reference.factors.items()})
    print(
        "\n"
        + "\n".join(
            f"{region:16s} {worst[region][0]:.1e}  {worst[region][1]}" for region in REGIONS
        )
    )
    assert set(worst) == set(REGIONS)
    assert all(0 <= figure <= LIMIT for figure, _ in worst.values()), worst


def test_a_kv_b_adapter_without_its_k_half_is_seen(
    tiny_dir: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.fp8.linear import frozen_head_matmul
    from megatron_xorl.layers.attention import SparseLatentAttention

    whole = SparseLatentAttention._kv_up

    def values_only(self: Any, x: Tensor, rows: slice, *, contract: str) -> Tensor:
        if contract == "cols":
            return whole(self, x, rows, contract=contract)
        base = self.linear_kv_up_proj.base
        return frozen_head_matmul(x.flatten(0, 1), base, rows, contract=contract).view(
            *x.shape[:-1], -1
        )

    monkeypatch.setattr(SparseLatentAttention, "_kv_up", values_only)
    model, _ = _product(tiny_dir, ADAPTER)
    loss, _, _ = _loss(model)
    loss.backward()
    _, _, _, _, reference, expected = run
    assert abs(loss.detach().double() - expected) / expected > 1e-6
    worst = _by_region(model, {name: leaf.grad for name, leaf in reference.factors.items()})
    assert worst["attention"][0] > 100 * LIMIT
    parameter = dict(model.named_parameters())
    b = next(
        p
        for name, p in parameter.items()
        if "0.self_attention.linear_kv_up_proj" in name and "lora_B" in name
    )
    halves = b.grad.view(8, 112, -1)
    assert halves[:, :48].count_nonzero() == 0 and halves[:, 48:].count_nonzero() > 0


@pytest.mark.parametrize("dropped", ["gate_proj", "up_proj"])
def test_gate_and_up_are_adapted_independently_in_a_bank_and_in_an_mlp(
    tiny_dir: Path, dropped: str
) -> None:
    kept = {"gate_proj": "up_proj", "up_proj": "gate_proj"}[dropped]
    model, full = _product(tiny_dir, ADAPTER | {"lora_target_modules": [f"*.{kept}"]})
    loss, _, _ = _loss(model)
    loss.backward()
    ids, labels, mask = _batch()
    with _reference(tiny_dir, full, model.inventory) as reference:
        expected = mean_loss(reference.logits(ids), labels, mask)
        expected.backward()
    assert abs(loss.detach().double() - expected.detach()) / expected.detach() <= 1e-6
    worst = _by_region(model, {name: leaf.grad for name, leaf in reference.factors.items()})
    assert set(worst) == {"dense_mlp", "shared_experts", "routed_experts"}
    assert all(0 <= figure <= LIMIT for figure, _ in worst.values()), worst
