"""Each projection adapted alone: forward and gradients against a model whose weight is merged by hand.

The oracle computes in fp64 with ``W + scale * B A`` in the weight's place and knows no adapter: its autograd gives dW of the
merged weight, and the factors' gradients follow by the chain rule, ``dB = scale dW A^T`` and ``dA = scale B^T dW``, of a bank
summed over the experts that share the factor. 1e-5 is the design's limit, of logits and (relative, per factor) of gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layers.dense import tokens
from tests.layers.reference import Reference, mean_loss
from tests.training.comparison import relative
from tests.training.harness import random_like, use_one_process

LIMIT = 1e-5
RANK, ALPHA = 3, 6
SCALE = ALPHA / RANK
LENGTH = 40

TARGETS = [
    *(f"model.layers.1.self_attn.{leaf}" for leaf in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
    *(f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")),
    *(f"model.layers.2.mlp.shared_experts.{leaf}_proj" for leaf in ("gate", "up", "down")),
    *(f"model.layers.2.mlp.experts.{leaf}_proj" for leaf in ("gate", "up", "down")),
    "lm_head",
]  # fmt: skip


def batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = tokens(LENGTH + 1)
    mask = torch.zeros(1, LENGTH)
    mask[:, 7:] = 1.0
    return ids[:, :-1], ids[:, 1:], mask


@pytest.fixture(scope="module")
def base(tiny_dir: Path) -> Any:
    use_one_process()
    from megatron_xorl.training.model import load_model

    return load_model(tiny_dir)


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> Reference:
    return Reference(tiny_dir)


def ours(model: Any, target: str) -> dict[str, Tensor]:
    """Logits, and the gradients of both factors of an adapter on ``target`` alone."""
    import megatron_xorl as mx

    mx.add_adapter(
        model, target, mx.AdapterConfig(rank=RANK, alpha=ALPHA, lora_target_modules=[target])
    )
    mx.set_adapter(model, target)
    try:
        factors = mx.trainable_factors(model)
        with torch.no_grad():
            for name, parameter in factors.items():
                parameter.copy_(values(name, tuple(parameter.shape)))
        ids, labels, mask = batch()
        positions = torch.arange(LENGTH).unsqueeze(0)
        losses = model(ids, positions, None, labels=labels)
        ((losses * mask).sum() / mask.sum()).backward()
        with torch.no_grad():
            logits = mx.forward_logits(model, ids)
        assert logits is not None and len(factors) == 2
        return {"logits": logits} | {name: factors[name].grad for name in factors}
    finally:
        mx.set_adapter(model, None)
        mx.remove_adapter(model, target)


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    return random_like(name, shape) * (0.2 if name.endswith("lora_B") else 1.0)


def by_hand(reference: Reference, target: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:  # fmt: skip
    """The same from the merged weights."""
    a, b = (values(name, shapes[name]).double() for name in sorted(shapes))
    names = [f"{target}.weight"]
    if a.dim() == 3:
        bank, _, leaf = target.rpartition(".")
        count = max(a.shape[0], b.shape[0])
        names = [f"{bank}.{expert}.{leaf}.weight" for expert in range(count)]
        a, b = a.expand(count, *a.shape[1:]), b.expand(count, *b.shape[1:])
    kept = {name: reference.w[name] for name in names}
    deltas = SCALE * b @ a
    for number, name in enumerate(names):
        delta = deltas[number] if a.dim() == 3 else deltas
        reference.w[name] = (kept[name] + delta).requires_grad_()
    try:
        ids, labels, mask = batch()
        logits = reference.logits(ids)
        mean_loss(logits, labels, mask).backward()
        gradients = [reference.w[name].grad for name in names]
    finally:
        reference.w.update(kept)
    dw = torch.stack([torch.zeros_like(kept[n]) if g is None else g for n, g in zip(names, gradients, strict=True)])  # fmt: skip
    dw = dw if a.dim() == 3 else dw[0]
    found = {"A": SCALE * b.mT @ dw, "B": SCALE * dw @ a.mT}
    summed = {
        name: value.sum(0, keepdim=True) if shapes[name][0] == 1 and len(shapes[name]) == 3 else value
        for name, value in ((f"{target}.lora_{side}", found[side]) for side in "AB")
    }  # fmt: skip
    return {"logits": logits.detach()} | summed


@pytest.mark.parametrize("target", TARGETS)
def test_forward_and_gradients_are_those_of_the_merged_weight(
    base: Any, reference: Reference, target: str
) -> None:
    found = ours(base, target)
    shapes = {name: tuple(value.shape) for name, value in found.items() if name != "logits"}
    expected = by_hand(reference, target, shapes)
    assert found.keys() == expected.keys()
    assert (found["logits"] - expected["logits"]).abs().max() <= LIMIT
    for name in shapes:
        assert relative(found[name], expected[name]) <= LIMIT, name


def test_a_kv_b_adapter_whose_value_half_is_lost_is_seen(
    base: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.layers.attention import SparseLatentAttention

    whole = SparseLatentAttention._kv_up

    def keys_only(self: Any, x: Tensor, rows: slice, *, contract: str) -> Tensor:
        held = self.linear_kv_up_proj
        pairs, held.adapters = held.adapters, held.adapters if contract == "rows" else type(held.adapters)()  # fmt: skip
        try:
            return whole(self, x, rows, contract=contract)
        finally:
            held.adapters = pairs

    monkeypatch.setattr(SparseLatentAttention, "_kv_up", keys_only)
    target = "model.layers.1.self_attn.kv_b_proj"
    found = ours(base, target)
    shapes = {name: tuple(value.shape) for name, value in found.items() if name != "logits"}
    expected = by_hand(reference, target, shapes)
    assert (found["logits"] - expected["logits"]).abs().max() > 100 * LIMIT
    assert all(relative(found[name], expected[name]) > 100 * LIMIT for name in shapes)
