"""Folding logical factors into fused ones and back: the same bits, the same product, and errors for what does not fold."""

from __future__ import annotations

import pytest
import torch

from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import AdapterError
from megatron_xorl.weights.adapter_fold import (
    Fused,
    Pair,
    fold,
    fold_adapter,
    unfold,
    unfold_adapter,
)

WIDTH = 12


def pair(rank: int, rows: int, *lead: int, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed + 10 * rank + rows)
    shared = (1,) * len(lead)
    a = torch.randn(*shared, rank, WIDTH, generator=generator)
    return a, torch.randn(*lead, rows, rank, generator=generator)


def bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


CASES: list[tuple[list[Pair | None], list[int]]] = [
    ([pair(3, 5), pair(3, 5, seed=1)], [5, 5]),
    ([pair(2, 8), pair(4, 3), pair(3, 3)], [8, 3, 3]),  # q, k, v of grouped-query attention
    ([pair(3, 5, 4), pair(3, 5, 4, seed=1)], [5, 5]),  # a bank that shares A
    ([pair(3, 5), None], [5, 5]),
    ([None, pair(3, 5), None], [4, 5, 6]),
]


@pytest.mark.parametrize(("pairs", "rows"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_round_trip_keeps_every_bit(
    pairs: list[Pair | None], rows: list[int], dtype: torch.dtype
) -> None:
    given = [None if p is None else (p[0].to(dtype), p[1].to(dtype)) for p in pairs]
    next(p for p in given if p is not None)[1].flatten()[0] = -0.0
    for one, other in zip(given, unfold(fold(given, rows)), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert bits(one[0], other[0])
            assert bits(one[1], other[1])


@pytest.mark.parametrize(("pairs", "rows"), CASES)
def test_the_fused_delta_is_the_deltas_above_each_other(
    pairs: list[Pair | None], rows: list[int]
) -> None:
    fused = fold(pairs, rows)
    lead = fused.b.shape[:-2]
    parts = [
        torch.zeros(*lead, height, WIDTH) if p is None else p[1] @ p[0]
        for p, height in zip(pairs, rows, strict=True)
    ]
    assert torch.allclose(fused.b @ fused.a, torch.cat(parts, dim=-2), atol=1e-5)
    assert fused.rank == sum(fused.ranks)


def test_one_a_for_all_is_kept_once() -> None:
    (a, first), (_, second) = pair(3, 5), pair(3, 5, seed=1)
    fused = fold([(a, first), (a.clone(), second)], [5, 5], shared=True)
    assert (tuple(fused.a.shape), tuple(fused.b.shape)) == ((3, WIDTH), (10, 3))
    assert torch.equal(fused.b @ fused.a, torch.cat([first @ a, second @ a]))
    (a_back, first_back), (_, second_back) = unfold(fused)  # type: ignore[misc]
    assert bits(a_back, a)
    assert bits(first_back, first)
    assert bits(second_back, second)


a, b = pair(3, 5)
WRONG = [
    (lambda: fold([None, None], [5, 5]), "0 pairs for 2 projections"),
    (lambda: fold([(a, b)], [5, 5]), "1 pairs for 2 projections"),
    (lambda: fold([(a, b), (a[:2], b)], [5, 5]), "projection 1 has A .*expected B"),
    (lambda: fold([(a, b), (a, b)], [5, 6]), "projection 1 has A .*expected B"),
    (lambda: fold([(a, b), (a[:, :4], b)], [5, 5]), "only projections of one input"),
    (lambda: fold([(a, b), (a.bfloat16(), b.bfloat16())], [5, 5]), "only projections of one input"),
    (lambda: fold([(a, b), (a[None], b[None])], [5, 5]), "only projections of one input"),
    (lambda: fold([(a, b), (a, b)], [5, 5], scales=[1.0, 2.0]), r"scales \[1.0, 2.0\]"),
    (lambda: fold([(a, b), (a + 1, b)], [5, 5], shared=True), "cannot share one"),
    (lambda: unfold(Fused(a, b, (3, 3), (5, 5), False)), "expected rank 6 and 10 rows"),
    (
        lambda: unfold(Fused(torch.cat([a, a]), torch.ones(10, 6), (3, 3), (5, 5), False)),
        "30 non-zero values off its blocks",
    ),
]


@pytest.mark.parametrize(("attempt", "complaint"), WRONG)
def test_what_does_not_fold_is_refused(attempt: object, complaint: str) -> None:
    with pytest.raises(AdapterError, match=complaint):
        attempt()  # type: ignore[operator]


@pytest.mark.parametrize("targets", [None, ["q_a_proj", "*.gate_proj", "lm_head"]])
def test_a_whole_adapter_folds_as_it_streams_and_comes_back_bit_for_bit(
    targets: list[str] | None,
) -> None:
    config = AdapterConfig(rank={"routed_experts": 2, "default": 3}, alpha=6, targets=targets)
    factors = build_inventory(load_glm_config("tiny"), config, "float32").factors
    tensors = {factor.name: torch.randn(factor.shape) for factor in factors}
    fused = dict(fold_adapter((factor, tensors[factor.name]) for factor in factors))
    assert not any("gate_proj" in name for name in fused)
    found = fused["model.layers.1.mlp.experts.gate_up_proj.lora_B"]
    assert tuple(found.shape) == ((8, 256, 4) if targets is None else (8, 256, 2))
    back = dict(unfold_adapter(factors, fused.items()))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bits(back[name], tensor), name
