"""Dropout of the adapters' inputs: the mask against an independent reading of its definition, and what every projection does.

The oracle is numpy on unsigned words; nothing of the product is used in it. Layouts and runs are in ``test_dropout_runs.py``.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError, DataError, LayoutError
from tests.training.harness import randomise, use_one_process

P, SEED, LENGTH = 0.1, 77, 80
ADAPTER = {"rank": 4, "alpha": 8, "dropout": P}
GAMMA = 0x9E3779B97F4A7C15
SAMPLES = torch.tensor([5, 6])


# ---- the oracle ------------------------------------------------------------------------------------


def splitmix(state: Any, number: Any) -> Any:
    """The ``number``-th output of splitmix64, from its published C source."""
    z = np.asarray(state, np.uint64) + (np.asarray(number, np.uint64) + np.uint64(1)) * np.uint64(
        GAMMA
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def oracle_mask(name: str, sample: int, positions: Any, features: Any, p: float = P) -> Tensor:
    """Bool ``[positions, features]``: kept."""
    with np.errstate(over="ignore"):
        keys = splitmix(splitmix(splitmix(SEED, 0), sample), positions)
        word = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
        states = splitmix((keys ^ word) - np.uint64(GAMMA), 0)  # the finaliser alone
        bits = splitmix(states[:, None], np.asarray(features)[None, :]).view(np.int64)
    return torch.from_numpy(bits >= int(p * 2.0**64) - 2**63)


def oracle_dropped(name: str, x: Tensor) -> Tensor:
    """``drop(x)`` of ``[s, b, K]`` for the samples of this file."""
    masks = [
        oracle_mask(name, int(n), np.arange(x.shape[0]), np.arange(x.shape[2])) for n in SAMPLES
    ]
    return x * torch.stack(masks, dim=1) / (1 - P)


def test_splitmix_is_the_published_generator() -> None:
    # First outputs for seed 1234567, as printed by the C source (and in many test suites that cite it).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    with np.errstate(over="ignore"):
        assert [int(splitmix(1234567, n)) for n in range(3)] == expected
    from megatron_xorl.layers.token_keys import output

    found = output(torch.tensor(1234567), torch.arange(3)).numpy().view(np.uint64)
    assert [int(word) for word in found] == expected


# ---- the mask --------------------------------------------------------------------------------------


def keys(samples: Tensor = SAMPLES, length: int = LENGTH) -> Tensor:
    from megatron_xorl.layers.token_keys import dropout_keys

    return dropout_keys(samples, torch.arange(length), seed=SEED)


def kept(name: str, rows: Tensor, features: int, first: int = 0, p: float = P) -> Tensor:
    from megatron_xorl.layers.dropout import Drop
    from megatron_xorl.layers.token_keys import mix, name_bits

    states = mix(rows.reshape(-1).view(torch.int64) ^ name_bits(name))
    return Drop(states, first, p).kept(slice(None), features)


def test_the_mask_is_the_oracle_s() -> None:
    for name, sample, first in (("a.q_proj", 5, 0), ("b", 6, 33)):
        expected = oracle_mask(name, sample, np.arange(LENGTH), np.arange(first, first + 70))
        found = kept(name, keys(torch.tensor([sample])), 70, first)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_p(p: float) -> None:
    found = kept("a", keys(torch.arange(8), 1000), 256, p=p)
    count, dropped = found.numel(), int((~found).sum())
    # Binomial, five standard deviations: one in two million if the mask were a coin.
    assert abs(dropped - count * p) <= 5 * math.sqrt(count * p * (1 - p))
    if p >= 0.1:
        for axis, size in (
            (0, found.shape[0]),
            (1, found.shape[1]),
        ):  # no token and no feature stands out
            share = (~found).double().mean(axis)
            assert (share - p).abs().max() <= 6 * math.sqrt(p * (1 - p) / size)


def test_masks_of_other_names_positions_samples_seeds_and_features_are_independent() -> None:
    from megatron_xorl.layers.token_keys import dropout_keys

    positions = torch.arange(1000)
    base = kept("a", dropout_keys(torch.tensor([3]), positions, seed=1), 256)
    others = {
        "name": kept("b", dropout_keys(torch.tensor([3]), positions, seed=1), 256),
        "position": kept("a", dropout_keys(torch.tensor([3]), positions + 1, seed=1), 256),
        "far position": kept("a", dropout_keys(torch.tensor([3]), positions + 10**6, seed=1), 256),
        "sample": kept("a", dropout_keys(torch.tensor([4]), positions, seed=1), 256),
        "seed": kept("a", dropout_keys(torch.tensor([3]), positions, seed=2), 256),
        "feature": kept("a", dropout_keys(torch.tensor([3]), positions, seed=1), 256, first=1),
    }
    for what, other in others.items():
        both = int((~base & ~other).sum())
        # Independent: p^2 of the elements are dropped in both, five standard deviations.
        count, share = base.numel(), P * P
        assert abs(both - count * share) <= 5 * math.sqrt(count * share * (1 - share)), what


def test_keys_are_refused_where_they_do_not_fit() -> None:
    from megatron_xorl.layers.dropout import Drop
    from megatron_xorl.layers.token_keys import dropout_keys

    for samples, positions in (
        (torch.tensor(3), torch.arange(4)),
        (torch.tensor([3]), torch.zeros(2, 4, dtype=torch.int64)),
        (torch.tensor([3.0]), torch.arange(4)),
    ):
        with pytest.raises(DataError, match="a number in the run for each row"):
            dropout_keys(samples, positions)
    with pytest.raises(
        LayoutError, match="3 rows reached an adapter with dropout and 2 token keys"
    ):
        Drop(torch.zeros(2, dtype=torch.int64), 0, P).of(torch.zeros(3, 4))


def test_a_key_in_columns_comes_back_whole_in_every_dtype() -> None:
    from megatron_xorl.layers.token_keys import from_columns, to_columns

    words = keys().view(torch.int64).flatten()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.zeros(LENGTH, 2, 7, dtype=dtype)
        assert torch.equal(from_columns(to_columns(words, rows).flatten(0, 1)), words)


# ---- each projection against a hand-made dropout ---------------------------------------------------


@dataclass
class Case:
    model: Any
    ids: Tensor


@pytest.fixture(scope="module")
def case(tiny_dir: Path) -> Case:
    use_one_process()
    from megatron_xorl.training.model import load_model

    model = load_model(tiny_dir, AdapterConfig(**ADAPTER)).train()
    randomise(model)
    ids = torch.randint(0, 256, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    assert model.glm_config.index_topk < LENGTH
    return Case(model, ids)


def current_tokens_for(model: Any) -> Any:
    from megatron_xorl.layers.token_keys import tokens_of, using

    return using(tokens_of(keys(), model.output_layer.tp_group, split=False))


def by_hand(linear: Any, x: Tensor, prefix: str) -> Tensor:
    """``base(x) + scale B A drop(x)`` of a linear, from the values alone."""
    from megatron_xorl.fp8.linear import frozen_linear

    y = frozen_linear(x, linear.base).clone()
    for leaf, pair in linear.adapters.items():
        assert pair.target == f"{prefix}.{leaf}" and pair.scale == 2.0
        (rows,) = linear.rows_of(leaf)
        y[..., rows] += 2.0 * (oracle_dropped(pair.target, x) @ pair.lora_A.t()) @ pair.lora_B.t()
    return y


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("1.self_attention.linear_q_down_proj", "model.layers.1.self_attn"),
        ("1.self_attention.linear_kv_down_proj", "model.layers.1.self_attn"),
        ("1.self_attention.linear_q_up_proj", "model.layers.1.self_attn"),
        ("1.self_attention.linear_proj", "model.layers.1.self_attn"),
        ("0.mlp.linear_fc1", "model.layers.0.mlp"),
        ("0.mlp.linear_fc2", "model.layers.0.mlp"),
        ("2.mlp.shared_experts.linear_fc1", "model.layers.2.mlp.shared_experts"),
        ("2.mlp.shared_experts.linear_fc2", "model.layers.2.mlp.shared_experts"),
    ],
)
def test_a_linear_is_its_base_and_the_adapter_of_what_was_kept(
    case: Case, path: str, prefix: str
) -> None:
    linear = case.model.decoder.get_submodule(f"layers.{path}")
    x = torch.randn(LENGTH, 2, linear.base.shape[1], generator=torch.Generator().manual_seed(1))
    factors = [factor for pair in linear.adapters.values() for factor in (pair.lora_A, pair.lora_B)]
    found_x, expected_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    with current_tokens_for(case.model):
        found = linear(found_x)[0]
    expected = by_hand(linear, expected_x, prefix)
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), [found_x, *factors]),
        torch.autograd.grad((expected * weight).sum(), [expected_x, *factors]),
        strict=True,
    ):
        assert (one - other).norm() <= 1e-6 * other.norm()
    linear.eval()
    assert torch.equal(linear(x)[0], plain(linear, x))
    linear.train()


def plain(linear: Any, x: Tensor) -> Tensor:
    """The linear without dropout, by another module's code: adapters with dropout 0."""
    for pair in linear.adapters.values():
        pair.dropout = 0.0
    y: Tensor = linear.train()(x)[0]
    for pair in linear.adapters.values():
        pair.dropout = P
    return y


def test_kv_b_drops_the_latents_of_its_keys_as_the_expanded_form_does(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain multi-head attention with keys and values expanded from ``W c + scale B A drop(c)``."""
    from megatron_xorl.layers import absorbed

    attention = case.model.decoder.layers[0].self_attention
    glm, linear = attention.glm, attention.linear_kv_up_proj
    heads, nope, wide = glm.num_attention_heads, glm.qk_nope_head_dim, glm.v_head_dim
    draw = torch.Generator().manual_seed(4)
    latent, queries = (
        torch.randn(LENGTH, 2, *shape, generator=draw)
        for shape in ((glm.kv_lora_rank,), (heads, nope))
    )
    (pair,) = linear.adapters.values()
    name = "model.layers.0.self_attn.kv_b_proj"
    up = by_hand(linear, latent, name.rpartition(".")[0]).unflatten(-1, (heads, nope + wide))
    key, value = up.split([nope, wide], dim=-1)
    scores = torch.einsum("sbhd,tbhd->bhst", queries, key)
    probs = scores.softmax(-1)
    expected = torch.einsum("bhst,tbhd->sbhd", probs, value)

    with current_tokens_for(case.model):
        products = absorbed.key_products(linear, latent)
    assert [tuple(t.shape) for t in products] == [(LENGTH, 2, pair.lora_A.shape[0])]
    whole = torch.cat([latent, *products], dim=-1)
    moved = attention._kv_up(queries, slice(0, nope), contract="rows")
    probs = torch.einsum("sbhc,tbc->bhst", moved, whole).softmax(-1)
    out = torch.einsum("bhst,tbc->sbhc", probs, whole)
    found = attention._kv_up(out, slice(nope, nope + wide), contract="cols")
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    # Control: without the mask it is another result.
    monkeypatch.setattr(pair, "dropout", 0.0)
    moved = attention._kv_up(queries, slice(0, nope), contract="rows")
    probs = torch.einsum("sbhc,tbc->bhst", moved, latent).softmax(-1)
    other = attention._kv_up(
        torch.einsum("bhst,tbc->sbhc", probs, latent), slice(nope, nope + wide), contract="cols"
    )
    assert (other - expected).norm() > 1e-3 * expected.norm()


def test_routed_experts_drop_per_token_for_gate_and_up_and_per_expert_for_down(case: Case) -> None:
    """Against experts one by one, each on the tokens that the router gave it, in both forms of the bank."""
    from megatron_xorl.fp8.linear import frozen_grouped_linear

    moe = case.model.decoder.layers[1].mlp
    x = torch.randn(LENGTH, 2, moe.config.hidden_size, generator=torch.Generator().manual_seed(6))
    probs, chosen = moe.router(x)
    bank, prefix = moe.experts, "model.layers.1.mlp.experts"
    gate, up = (bank.linear_fc1.adapters[leaf] for leaf in ("gate_proj", "up_proj"))
    down = bank.linear_fc2.adapters["down_proj"]
    experts = bank.num_local_experts

    def base(linear: Any, rows: Tensor, expert: int) -> Tensor:
        counts = [0] * experts
        counts[expert] = rows.shape[0]
        return frozen_grouped_linear(rows, linear.base, counts)

    expected = torch.zeros(LENGTH * 2, x.shape[-1])
    for expert in range(experts):
        places = chosen[:, expert].nonzero().squeeze(1)
        gate_up = base(bank.linear_fc1, x.flatten(0, 1)[places], expert)
        parts = list(gate_up.chunk(2, dim=-1))
        for number, (pair, leaf) in enumerate(((gate, "gate_proj"), (up, "up_proj"))):
            dropped = oracle_dropped(f"{prefix}.{leaf}", x).flatten(0, 1)[places]
            parts[number] = (
                parts[number] + 2.0 * dropped @ pair.lora_A[0].t() @ pair.lora_B[expert].t()
            )
        h = torch.nn.functional.silu(parts[0]) * parts[1]
        every = torch.zeros(LENGTH * 2, h.shape[-1]).index_copy(0, places, h).view(LENGTH, 2, -1)
        dropped = oracle_dropped(f"{prefix}.{expert}.down_proj", every).flatten(0, 1)[places]
        y = base(bank.linear_fc2, h, expert)
        y = y + 2.0 * dropped @ down.lora_A[expert].t() @ down.lora_B[0].t()
        expected = expected.index_add(0, places, y * probs[places, expert, None])

    shared, moe.use_shared_expert = moe.use_shared_expert, False
    try:
        for once in (True, False):
            bank.once_per_token = once
            with current_tokens_for(case.model):
                found = moe(x)[0].flatten(0, 1)
            assert (found - expected).norm() <= 1e-6 * expected.norm(), once
    finally:
        moe.use_shared_expert, bank.once_per_token = shared, True


def test_the_head_drops_the_same_in_losses_of_any_chunk_and_in_logits(case: Case) -> None:
    model, head = case.model, case.model.output_layer
    x = torch.randn(LENGTH, 2, head.base.shape[1], generator=torch.Generator().manual_seed(8))
    (pair,) = head.adapters.values()
    assert pair.target == "lm_head"
    labels = case.ids[:, 1:].clone()
    labels[:, :7] = -100
    logits = by_hand_head(head, x)
    expected = torch.nn.functional.cross_entropy(
        logits.permute(1, 2, 0), labels, ignore_index=-100, reduction="none"
    )
    results = []
    for chunk in (head.chunk_bytes, 3 * head.base.shape[0] * 4):
        rows = x.clone().requires_grad_()
        head.chunk_bytes, before = chunk, head.chunk_bytes
        with current_tokens_for(model):
            losses = head.losses(rows, labels)
            assert (head(rows)[0] - logits).norm() <= 1e-6 * logits.norm()
        wanted = [rows, pair.lora_A, pair.lora_B]
        results.append(torch.autograd.grad(losses.square().sum(), wanted))
        head.chunk_bytes = before
        assert (losses - expected).norm() <= 1e-6 * expected.norm()
    rows = x.clone().requires_grad_()
    reference = torch.nn.functional.cross_entropy(
        by_hand_head(head, rows).permute(1, 2, 0), labels, ignore_index=-100, reduction="none"
    )
    truth = torch.autograd.grad(reference.square().sum(), [rows, pair.lora_A, pair.lora_B])
    for found in results:
        for one, other in zip(found, truth, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()


def by_hand_head(head: Any, x: Tensor) -> Tensor:
    from megatron_xorl.fp8.linear import frozen_linear

    (pair,) = head.adapters.values()
    dropped = oracle_dropped("lm_head", x)
    return frozen_linear(x, head.base) + 2.0 * (dropped @ pair.lora_A.t()) @ pair.lora_B.t()


# ---- the whole model -------------------------------------------------------------------------------


def test_training_mode_without_samples_is_refused_and_evaluation_has_no_dropout(case: Case) -> None:
    import megatron_xorl as mx

    model, ids = case.model, case.ids[:, :-1]
    with pytest.raises(AdapterError, match=r"q_a_proj has a dropout.*mx\.dropout_keys\(samples"):
        mx.forward_logits(model, ids)
    with torch.no_grad():
        first, again, other = (
            mx.forward_logits(model, ids, samples=torch.tensor(numbers), seed=SEED)
            for numbers in ([5, 6], [5, 6], [7, 8])
        )
        model.eval()
        quiet = mx.forward_logits(model, ids)
        told = mx.forward_logits(model, ids, samples=SAMPLES)
        generated = mx.generate(model.train(), ids[:, :9], max_new_tokens=4)
        for pair in pairs(model):
            pair.dropout = 0.0
        none = mx.forward_logits(model, ids)
        assert torch.equal(mx.generate(model, ids[:, :9], max_new_tokens=4), generated)
        for pair in pairs(model):
            pair.dropout = P
    assert torch.equal(first, again) and (first - other).abs().max() > 1e-2
    assert torch.equal(quiet, none) and torch.equal(told, none)
    assert (first - none).abs().max() > 1e-2


def test_a_mask_of_another_kind_is_not_taken_for_keys(case: Case) -> None:
    ids, places = case.ids[:, :-1], torch.arange(LENGTH).expand(2, LENGTH)
    for mask in (
        None,
        torch.ones(2, LENGTH, dtype=torch.int64),
        torch.ones(1, 1, 4, 4, dtype=torch.bool),
    ):
        with pytest.raises(AdapterError, match="not told which samples"):
            case.model(ids, places, mask, labels=case.ids[:, 1:])
    with pytest.raises(LayoutError, match="token keys"):
        case.model(ids, places, keys(length=LENGTH - 1), labels=case.ids[:, 1:])


def pairs(model: Any) -> Any:
    from megatron_xorl.layers.attach import lora_pairs

    return lora_pairs(model)


def test_the_error_is_the_one_that_the_page_shows(case: Case) -> None:
    import megatron_xorl as mx

    page = Path(__file__).resolve().parents[2] / "docs/dropout.md"
    case.model.train()
    with pytest.raises(AdapterError) as refused:
        mx.forward_logits(case.model, case.ids[:, :-1])
    assert str(refused.value) in " ".join(page.read_text().split())


def test_keys_reach_the_experts_whole_in_bf16(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_one_process()
    import megatron_xorl as mx
    from megatron_xorl.layers import experts

    model = mx.load_model(tiny_dir, AdapterConfig(**ADAPTER), dtype=torch.bfloat16).train()
    seen, original = [], experts.expert_drop

    def watched(pair: Any, training: bool, rows: Tensor, counts: Any) -> Any:
        seen.append(rows)
        return original(pair, training, rows, counts)

    monkeypatch.setattr(experts, "expert_drop", watched)
    ids = torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mx.forward_logits(model, ids, samples=SAMPLES, seed=SEED).sum().backward()
    sent = keys().view(torch.int64).flatten().sort().values
    every = sent.repeat_interleave(model.glm_config.num_experts_per_tok)
    assert len(seen) == 3 and all(torch.equal(rows.sort().values, every) for rows in seen)


def test_each_of_several_adapters_has_its_own_dropout(tiny_dir: Path) -> None:
    use_one_process()
    import megatron_xorl as mx

    model = mx.load_model(tiny_dir, AdapterConfig(**ADAPTER | {"dropout": 0.0})).train()
    mx.add_adapter(model, "dropping", AdapterConfig(**ADAPTER))
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    mx.forward_logits(model, ids)
    mx.set_adapter(model.eval(), "dropping")
    mx.forward_logits(model, ids)
    with pytest.raises(AdapterError, match="not told which samples"):
        mx.forward_logits(model.train(), ids)
    with mx.disable_adapters(model):
        mx.forward_logits(model, ids)


def test_a_dispatch_that_cannot_carry_keys_and_a_layer_without_samples_are_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.layers import moe
    from megatron_xorl.layers.qkv import FusedQKVLinear

    monkeypatch.setattr(moe, "rows_can_carry_columns", lambda config: False)
    mlp = case.model.decoder.layers[1].mlp
    x = torch.zeros(LENGTH, 2, mlp.config.hidden_size)
    with current_tokens_for(case.model), pytest.raises(LayoutError, match="token keys travel"):
        mlp(x)
    with pytest.raises(AdapterError, match="and a model of one's own"):
        FusedQKVLinear.adapt(None, "attention", AdapterConfig(**ADAPTER))  # type: ignore[arg-type]
