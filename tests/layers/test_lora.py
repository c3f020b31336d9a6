"""One adapted projection: what A starts from whatever the layout, and what attachment refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_xorl.adapters.inventory import Factor, build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.layers.lora import FactorSlice, draw_lora_A
from tests.training.harness import use_one_process

WHOLE = (0, 1)


def _factor(name: str) -> Factor:
    return build_inventory(
        load_glm_config("tiny"), AdapterConfig(rank=4, alpha=8), "float32"
    ).by_name[name]


A_FACTORS = [
    "model.layers.1.self_attn.o_proj.lora_A",
    "model.layers.1.self_attn.q_a_proj.lora_A",
    "model.layers.2.mlp.experts.gate_proj.lora_A",
    "model.layers.2.mlp.experts.down_proj.lora_A",
]


@pytest.mark.parametrize("name", A_FACTORS)
def test_a_rank_draws_exactly_its_slice_of_what_one_process_draws(name: str) -> None:
    factor = _factor(name)
    full = draw_lora_A(FactorSlice(factor, WHOLE, WHOLE), seed=1234)
    assert full.shape == factor.shape and full.dtype == torch.float32
    for tp, ep in itertools.product((1, 2, 4), (1, 2, 8)):
        for i, j in itertools.product(range(tp), range(ep)):
            piece = FactorSlice(factor, (i, tp), (j, ep))
            assert torch.equal(draw_lora_A(piece, seed=1234), piece.of(full)), (tp, ep, i, j)


@pytest.mark.parametrize("name", A_FACTORS)
def test_a_is_kaiming_uniform_over_the_full_fan_in(name: str) -> None:
    factor = _factor(name)
    full = draw_lora_A(FactorSlice(factor, WHOLE, WHOLE), seed=1234)
    bound = factor.shape[-1] ** -0.5
    assert full.abs().max() <= bound and full.abs().max() > 0.9 * bound
    assert full.std() == pytest.approx(bound / 3**0.5, rel=0.1)  # the spread of a uniform draw
    # A slice of a cut fan-in keeps the full fan-in's bound, not sqrt(cut) times it.
    if factor.tp_axis is not None:
        piece = draw_lora_A(FactorSlice(factor, (1, 4), WHOLE), seed=1234)
        assert piece.abs().max() <= bound


def test_names_experts_and_seeds_draw_different_values() -> None:
    factor = _factor("model.layers.2.mlp.experts.down_proj.lora_A")
    full = draw_lora_A(FactorSlice(factor, WHOLE, WHOLE), seed=1)
    assert not any(torch.equal(full[a], full[b]) for a, b in itertools.combinations(range(8), 2))
    renamed = replace(factor, name=factor.name.replace("layers.2", "layers.3"))
    assert not torch.equal(full, draw_lora_A(FactorSlice(renamed, WHOLE, WHOLE), seed=1))
    assert not torch.equal(full, draw_lora_A(FactorSlice(factor, WHOLE, WHOLE), seed=2))


def test_attached_factors_are_named_shaped_and_scaled_as_the_inventory_says(
    tiny_dir: Path,
) -> None:
    use_one_process()
    from megatron_xorl.layers.attach import lora_pairs, named_factors
    from megatron_xorl.training.model import load_model

    adapter = AdapterConfig(rank={"routed_experts": 2, "default": 4}, alpha=8)
    model = load_model(tiny_dir, adapter)
    found = named_factors(model)
    expected = build_inventory(model.glm_config, adapter, dtype="float32")
    assert {n: (f, tuple(p.shape)) for n, (f, _, p) in found.items()} == {
        f.name: (f, f.shape) for f in expected.factors
    }
    for pair in lora_pairs(model):
        assert pair.scale == (4.0 if ".mlp.experts." in pair.target else 2.0)
        assert not pair.lora_B.count_nonzero() and pair.lora_A.count_nonzero()
        piece = pair.slices["A"]
        assert torch.equal(pair.lora_A, draw_lora_A(piece, seed=1234))


def test_rslora_and_a_manifest_rank_scale_what_the_forward_adds(tiny_dir: Path) -> None:
    """alpha / sqrt(rank) of the entry's own rank, read off the forward: it is the only unknown in ``y - base(x)``."""
    use_one_process()
    from megatron_xorl.layers.attach import lora_pairs
    from megatron_xorl.layers.switch import disable_adapters
    from megatron_xorl.training.model import load_model
    from tests.training.harness import randomise

    targets = [{"pattern": "*.q_a_proj", "count": 4, "rank": 9}, "*.o_proj"]
    model = load_model(
        tiny_dir, AdapterConfig(rank=4, alpha=6, rslora=True, lora_target_modules=targets)
    )
    randomise(model)
    assert {pair.target.rpartition(".")[2]: pair.scale for pair in lora_pairs(model)} == {
        "q_a_proj": 6 / 9**0.5,
        "o_proj": 6 / 4**0.5,
    }
    attention = model.decoder.layers[0].self_attention
    for linear, expected in ((attention.linear_q_down_proj, 2.0), (attention.linear_proj, 3.0)):
        (pair,) = linear.adapters.values()
        x = torch.randn(5, linear.base.shape[1], generator=torch.Generator().manual_seed(1))
        with torch.no_grad(), disable_adapters(model):
            base = linear(x)[0]
        with torch.no_grad():
            added = (linear(x)[0] - base).double()
            unscaled = x.double() @ pair.lora_A.double().t() @ pair.lora_B.double().t()
        assert float((added * unscaled).sum() / unscaled.square().sum()) == pytest.approx(
            expected, rel=1e-5
        )
        assert (added - expected * unscaled).norm() <= 1e-5 * added.norm()
