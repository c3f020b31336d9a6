"""How tokens reach experts: both of Megatron's dispatchers train alike, nothing is dropped, and choices can be replayed.

Twenty steps with gathered tokens are rows of ``tests/layouts/rows.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_xorl.training.arguments import RULES
from tests.training.harness import Job, Trainer, run_layout
from tests.training.test_pipeline import agree
from tests.worlds import run_world

pytestmark = pytest.mark.dist

ADAPTER = {"rank": 4, "alpha": 8}
GATHER = {"moe_token_dispatcher_type": "allgather"}


def test_a_step_with_gathered_tokens_on_two_expert_ranks_equals_one_process(tiny_dir: Path) -> None:
    job = Job(str(tiny_dir), ADAPTER, steps=1, keep=(1,))
    one = run_layout(job)
    agree(one, run_layout(replace(job, layout={"ep": 2}, world=2, fields=GATHER), one.states))


def test_dropping_and_padding_of_tokens_and_kernels_that_are_not_proven_are_refused() -> None:
    rules = {rule.name: rule for rule in RULES}
    for name, bad in (
        ("moe_expert_capacity_factor", 1.0),
        ("moe_pad_expert_input_to_capacity", True),
        ("moe_token_dispatcher_type", "flex"),
    ):
        assert bad not in rules[name].allowed
    assert rules["moe_expert_capacity_factor"].reason.startswith(
        "dropping tokens changes the model"
    )


def replayed(job: Job) -> list[list[float]]:
    """Losses, as (natural, recorded, replayed, replayed from others' choices), of one batch; gradients compared on the way."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(**job.layout)
    trainer = Trainer(job)
    from tests.training.harness import randomise

    randomise(trainer.chunks)

    def step(action: Any) -> tuple[float, dict[str, torch.Tensor]]:
        RouterReplay.set_global_router_replay_action(action)
        try:
            loss = trainer.forward_backward(1)
        finally:
            RouterReplay.clear_global_router_replay_action()
        return loss, {name: piece[3] for name, piece in trainer.gradient_pieces().items()}

    natural = step(None)
    recorded = step(RouterReplayAction.RECORD)
    choices = RouterReplay.get_recorded_data()
    assert len(choices) == 3  # a router each of the layers that are not dense
    RouterReplay.set_replay_data(choices)
    own = step(RouterReplayAction.REPLAY_FORWARD)
    RouterReplay.clear_global_indices()
    RouterReplay.set_replay_data([(chosen + 1) % 8 for chosen in choices])
    other = step(RouterReplayAction.REPLAY_FORWARD)
    same = [
        all(torch.equal(found[name], value) for name, value in natural[1].items())
        for _, found in (recorded, own, other)
    ]
    return [[loss for loss, _ in (natural, recorded, own, other)], same]


def test_a_replay_of_its_own_choices_is_exact_and_one_of_others_is_not(tiny_dir: Path) -> None:
    # Each rank has one microbatch, so that what is recorded is the whole step.
    job = Job(
        str(tiny_dir),
        ADAPTER,
        layout={"ep": 2},
        world=2,
        fields={"moe_enable_routing_replay": True},
    )
    for (natural, recorded, own, other), same in run_world(replayed, 2, job, timeout=120):
        assert natural == recorded == own != other
        assert same == [True, True, False]
