"""Copies of a factor are compared by hash across every axis that copies it, and a difference is named and stops the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_xorl.errors import ReplicaError
from tests.training.harness import Job, Trainer
from tests.training.test_pretrain import arguments, inputs, ours, run
from tests.worlds import run_world

__all__ = ["inputs"]  # a fixture

pytestmark = pytest.mark.dist

ADAPTER = {"rank": 4, "alpha": 8}
SHARED = "model.layers.1.mlp.experts.gate_proj.lora_A"
LAYOUTS = {
    "tp2": ({"tp": 2}, 2),
    "ep2": ({"ep": 2}, 2),
    "dp2": ({}, 2),
    "ep2,dp2": ({"ep": 2}, 4),
}


def _trained(job: Job) -> Trainer:
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(**job.layout)
    trainer = Trainer(job)
    for step in range(1, job.steps + 1):
        trainer.forward_backward(step)
        trainer.update(step)
    return trainer


def _job(directory: Path, layout: str, **more: Any) -> Job:
    sizes, world = LAYOUTS[layout]
    return Job(str(directory), ADAPTER, layout=sizes, world=world, **more)


def checked(job: Job) -> str:
    """Train, then check; what the check said on this rank."""
    from megatron_xorl.training.replicas import check_replicas

    try:
        check_replicas(_trained(job).module, "at the end")
    except ReplicaError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.slow), "ep2", "dp2"])
def test_copies_are_equal_everywhere_after_twenty_steps(layout: str, tiny_dir: Path) -> None:
    job = _job(tiny_dir, layout, steps=20, seq=24)
    assert run_world(checked, job.world, job, timeout=240) == ["", ""]


def test_a_shared_factor_left_out_of_the_reduction_is_named_after_one_update(
    tiny_dir: Path,
) -> None:
    # Step 1 moves lora_B alone (lora_A's gradient is zero while B is), so the second update makes A differ.
    job = _job(tiny_dir, "ep2", steps=2, seq=24, unreduced=SHARED)
    for said in run_world(checked, 2, job, timeout=120):
        assert "at the end: copies of 1 factor differ between ranks" in said
        assert f"{SHARED}: rank 0 against rank 1" in said
        assert "targets CONFIG --ownership" in said


def nudged(job: Job, factors: dict[str, int]) -> str:
    """Check a fresh model in which each of ``factors`` was changed in one element, by one bit, on the rank given."""
    from megatron_xorl.training.replicas import check_replicas

    trainer = _trained(job)
    for name, rank in factors.items():
        if dist.get_rank() == rank:
            values = trainer.factors[name][2].detach().view(-1)
            values[-1:].view(torch.int32).bitwise_xor_(1)
    try:
        check_replicas(trainer.module)
    except ReplicaError as error:
        return str(error)
    return ""


def test_one_bit_on_one_rank_is_named_with_the_factor_and_the_rank(tiny_dir: Path) -> None:
    job = _job(tiny_dir, "ep2,dp2", steps=0)
    own, dense = "model.layers.1.mlp.experts.gate_proj.lora_B", "lm_head.lora_B"
    for said in run_world(nudged, 4, job, {SHARED: 3, own: 2, dense: 1}, timeout=120):
        assert "copies of 3 factors differ" in said
        assert f"{SHARED}: rank 3 differs from 3 others" in said
        assert f"{dense}: rank 1 differs from 3 others" in said
        # Expert-data copies of rank 2's experts are on rank 0 alone.
        assert f"{own}: rank 0 against rank 2" in said


def test_tensor_parts_of_a_cut_factor_are_no_copies(tiny_dir: Path) -> None:
    job = _job(tiny_dir, "tp2", steps=0)
    whole, cut = (
        "model.layers.0.self_attn.q_a_proj.lora_A",
        "model.layers.0.self_attn.q_b_proj.lora_B",
    )
    for said in run_world(nudged, 2, job, {whole: 0, cut: 1}, timeout=120):
        assert "copies of 1 factor differ" in said
        assert f"{whole}: rank 0 against rank 1" in said


def nudging(argv: list[str], at: int) -> None:
    """Our entry; rank 1's copy of the shared factor is changed after iteration ``at`` (the next all-gather would mend it)."""
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.training.launch import Launch

    original = Launch.check_first_iteration

    def check(self: Any) -> None:
        original(self)
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == at and dist.get_rank() == 1:
            named_factors(self.chunks)[SHARED][2].detach().view(-1)[0] += 1

    Launch.check_first_iteration = check
    ours(argv)


def test_a_run_stops_before_the_checkpoint_of_the_step_that_was_checked(
    inputs: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    argv = [
        *arguments(inputs, tiny_dir, tmp_path),
        *("--expert-model-parallel-size", "2", "--check-replicas", "2"),
    ]
    with pytest.raises(
        ReplicaError, match=rf"after iteration 4: .*{SHARED}: rank 0 against rank 1"
    ):
        run(nudging, 2, argv, 4)
    # The step was 4; the checkpoint of iteration 2, which agreed, is the last.
    assert (tmp_path / "checkpoints/latest").read_text() == "2\n"
