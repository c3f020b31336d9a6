"""The library's door, and two processes with the experts cut between them against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import ConfigError
from tests.training.comparison import Outcome, assemble, beyond_limits, difference
from tests.training.harness import Job, Trainer, run_layout, sample, use_one_process
from tests.worlds import run_world

ADAPTER = {"rank": {"routed_experts": 3, "default": 4}, "alpha": 8}
SHARED = "model.layers.2.mlp.experts.gate_proj.lora_A"


# ---- the library's door ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> Any:
    use_one_process()
    from megatron_xorl.training.model import load_model

    return load_model(tiny_dir)


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(8))


def test_logits_are_fp32_batch_first_and_as_wide_as_the_vocabulary(model: Any) -> None:
    from megatron_xorl.training.model import forward_logits

    with torch.no_grad():
        logits = forward_logits(model, _ids(3, 45))
        alone = forward_logits(model, _ids(3, 45)[1:2])
    assert logits.shape == (3, 45, 320) and logits.dtype == torch.float32
    # Row 1 is row 1 alone: no sample sees another, and batch and sequence are not exchanged.
    assert (logits[1] - alone[0]).abs().max() <= 5e-6


def test_a_longer_input_does_not_change_earlier_logits(model: Any) -> None:
    from megatron_xorl.training.model import forward_logits

    with torch.no_grad():
        whole, prefix = (
            forward_logits(model, _ids(1, 70)),
            forward_logits(model, _ids(1, 70)[:, :50]),
        )
    assert (whole[:, :50] - prefix).abs().max() <= 5e-6
    assert (whole[:, 20:70] - prefix).abs().max() > 1.0


def test_only_factors_require_a_gradient_and_none_does_before_attachment(tiny_dir: Path) -> None:
    use_one_process()
    from megatron_xorl.training.model import attach_adapters, load_model, trainable_factors

    fresh = load_model(tiny_dir)
    assert not [name for name, p in fresh.named_parameters() if p.requires_grad]
    inventory = attach_adapters(fresh, AdapterConfig(**ADAPTER))
    factors = trainable_factors(fresh)
    assert list(factors) == [f.name for f in inventory.trainable]
    assert {id(p) for p in fresh.parameters() if p.requires_grad} == {
        id(p) for p in factors.values()
    }


def test_factors_take_the_model_s_dtype_and_the_base_keeps_its_bytes(tiny_dir: Path) -> None:
    use_one_process()
    from megatron_xorl.training.model import load_model, trainable_factors

    half = load_model(tiny_dir, AdapterConfig(**ADAPTER), dtype=torch.bfloat16)
    assert {p.dtype for p in trainable_factors(half).values()} == {torch.bfloat16}
    assert half.decoder.layers[0].mlp.linear_fc1.base.codes.dtype == torch.uint8


def test_a_dtype_that_glm_does_not_compute_in_is_refused(tiny_dir: Path) -> None:
    use_one_process()
    from megatron_xorl.training.model import load_model

    with pytest.raises(ConfigError, match=r"torch\.float32 or torch\.bfloat16"):
        load_model(tiny_dir, dtype=torch.float16)


@pytest.mark.parametrize("target", ["*.mlp.experts.*", "lm_head"])
def test_a_head_with_or_without_an_adapter_trains_through_megatron_s_loss(
    target: str, tiny_dir: Path
) -> None:
    # Megatron's cross-entropy subtracts in place from the head's output.
    use_one_process()
    from megatron_xorl.training.model import forward_logits, load_model, trainable_factors

    adapted = load_model(tiny_dir, AdapterConfig(rank=4, alpha=8, lora_target_modules=[target]))
    ids = _ids(1, 41)
    positions = torch.arange(40).unsqueeze(0)
    losses = adapted(ids[:, :-1], positions, None, labels=ids[:, 1:])
    losses.mean().backward()
    assert all(p.grad is not None for p in trainable_factors(adapted).values())
    logits = forward_logits(adapted, ids[:, :-1])
    expected = nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none")
    assert (losses[0] - expected).abs().max() <= 1e-5


# ---- EP=2 equals one process ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tiny_dir: Path) -> Outcome:
    """Twenty steps in one process, two microbatches each."""
    return run_layout(Job(str(tiny_dir), ADAPTER))


@pytest.fixture(scope="module")
def two(tiny_dir: Path, one: Outcome) -> Outcome:
    """The same on two processes, half of the experts and one microbatch each."""
    job = Job(str(tiny_dir), ADAPTER, layout={"ep": 2}, world=2)
    return run_layout(job, states=one.states)


def test_the_samples_of_the_comparison_have_unequal_label_counts_and_some_have_none() -> None:
    counts = {
        (step, index): int(sample(step, index, 40)["mask"].sum())
        for step in range(1, 21)
        for index in range(2)
    }
    assert 0 in counts.values() and len(set(counts.values())) > 10
    assert all(counts[step, 0] != counts[step, 1] for step in range(1, 21))
    assert all(counts[step, 0] + counts[step, 1] for step in range(1, 21))


@pytest.mark.dist
def test_two_processes_with_expert_parallelism_equal_one(one: Outcome, two: Outcome) -> None:
    assert set(one.gradients) == {"step 1", "step 2", "step 10", "step 20", "random"}
    assert all(len(gradients) == 84 for gradients in one.gradients.values())
    assert all(g.count_nonzero() for g in one.gradients["random"].values())
    assert all(torch.equal(two.start[name], value) for name, value in one.start.items())
    worst = difference(one, two)
    print(
        "\n" + "\n".join(f"{kind:10s} {figure:.1e}  {at}" for kind, (figure, at) in worst.items())
    )
    assert not beyond_limits(worst), worst


@pytest.mark.dist
def test_both_processes_choose_the_keys_and_experts_that_one_process_chooses(
    one: Outcome, two: Outcome
) -> None:
    keys = {(sample, layer, "index") for sample in (0, 1) for layer in (0, 1)}
    keys |= {(sample, layer, "route") for sample in (0, 1) for layer in (1, 2, 3)}
    assert one.choices.keys() == two.choices.keys() == keys
    assert all(torch.equal(two.choices[key], chosen) for key, chosen in one.choices.items())


@pytest.mark.dist
def test_factors_that_both_processes_hold_have_the_same_bits_on_both(two: Outcome) -> None:
    # Twenty updates later; assemble() has compared every element that two ranks hold, and counted them.
    from megatron_xorl.adapters.inventory import build_inventory
    from megatron_xorl.config.model import load_glm_config

    inventory = build_inventory(load_glm_config("tiny"), AdapterConfig(**ADAPTER), "float32")
    assert two.copies == sum(f.numel for f in inventory.factors if f.ep_axis is None)
    assert SHARED in {f.name for f in inventory.factors if f.shared}


@pytest.mark.dist
def test_gradients_of_two_processes_with_unlike_expert_loads_reach_every_expert_s_own_factor(
    two: Outcome,
) -> None:
    for name, gradient in two.gradients["random"].items():
        if ".mlp.experts." in name and gradient.shape[0] == 8:
            assert (gradient.flatten(1).norm(dim=1) > 0).sum() >= 6, name


@pytest.mark.dist
def test_a_shared_factor_left_out_of_the_reduction_is_seen(tiny_dir: Path, one: Outcome) -> None:
    job = Job(str(tiny_dir), ADAPTER, steps=0, keep=(), layout={"ep": 2}, world=2, unreduced=SHARED)
    with pytest.raises(AssertionError, match=f"{SHARED}: .* differ between ranks"):
        run_layout(job)


def _marks(directory: str) -> dict[str, int]:
    """In how many buckets each kind of factor lies, and how many parameters the optimizer has."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(ep=2)
    trainer = Trainer(Job(directory, ADAPTER | {"glm52_lora_scope": "routed_experts"}))
    dense, expert = trainer.model.buffers, trainer.model.expert_parallel_buffers
    return {
        "dense": sum(len(buffer.params) for buffer in dense),
        "expert": sum(len(buffer.params) for buffer in expert),
        "elements": sum(p.numel() for b in (*dense, *expert) for p in b.params),
    }


@pytest.mark.dist
def test_only_in_scope_factors_lie_in_ddp_s_buffers_shared_ones_apart_from_per_expert_ones(
    tiny_dir: Path,
) -> None:
    # 3 layers x (gate A, up A, down B) shared, and as many per expert, of which a rank holds 4 of 8.
    shared, own = 3 * 3 * (3 * 128), 3 * 3 * (4 * 3 * 128)
    for found in run_world(_marks, 2, str(tiny_dir)):
        assert found == {"dense": 9, "expert": 9, "elements": shared + own}


def test_assembling_refuses_copies_that_differ_and_parts_that_nobody_holds() -> None:
    box = ((0, 2), (0, 2))
    full, copies = assemble(
        [{"w": (box, 0, 3, torch.arange(3.0))}, {"w": (box, 2, 4, torch.arange(2.0, 4.0))}]
    )
    assert torch.equal(full["w"], torch.arange(4.0).view(2, 2)) and copies == 1
    with pytest.raises(AssertionError, match="1 elements differ"):
        assemble([{"w": (box, 0, 4, torch.zeros(4))}, {"w": (box, 2, 3, torch.ones(1))}])
    with pytest.raises(AssertionError, match="no rank holds"):
        assemble([{"w": (box, 0, 3, torch.zeros(3))}])


def test_the_limits_see_a_factor_that_is_a_little_off(one: Outcome) -> None:
    name = "model.layers.1.mlp.experts.down_proj.lora_B"
    gradients = {s: g | {name: g[name] * (1 + 3e-5)} for s, g in one.gradients.items()}
    assert beyond_limits(difference(one, replace(one, gradients=gradients))).keys() == {"gradient"}
    losses = [loss * (1 + 2e-5) for loss in one.losses]
    assert beyond_limits(difference(one, replace(one, losses=losses))).keys() == {"loss"}
    moved = one.end[name] + 2e-3 * (one.end[name] - one.start[name])
    end = one.end | {name: moved}
    assert beyond_limits(difference(one, replace(one, end=end))).keys() == {"drift"}
    assert not beyond_limits(difference(one, one))
