"""What an update does after a resume: with a new rate, from an adapter file alone, with zero gradients in every layout."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_xorl as mx
from megatron_xorl.errors import CheckpointError
from tests.training.test_checkpoint import SMALL
from tests.workers.adapter_job import Job, digest
from tests.worlds import run_world

pytestmark = pytest.mark.dist

# --- a new rate ---------------------------------------------------------------------------------------------------------------


def resume_with_rate(model: Path, folder: Path, flags: dict[str, bool]) -> tuple[str, set[float]]:
    """Resume through the launch a job saved after 10 steps at rate 1e-2 with one of rate 2e-2; return the groups' rates."""
    import megatron_xorl.training.launch as product
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.weights.reader import HfCheckpoint

    job = Job(model, SMALL, base=False)
    job.scheduler.step(increment=10)
    extra = {"consumed_train_samples": 20, "floating_point_operations": 0.0}
    common = job.common
    job.common = lambda: common() | extra  # type: ignore[method-assign]
    job.save(folder, 10)
    again = Job(model, SMALL, base=False)
    again.scheduler.max_lr = 2e-2
    for group in again.groups():  # as Megatron builds them from --lr
        group["max_lr"] = 2e-2
    product.get_args = lambda: SimpleNamespace(
        load=str(folder), exit_on_missing_checkpoint=False, consumed_train_samples=0, **flags
    )
    launch = product.Launch(
        model_dir=model,
        glm=load_glm_config(model),
        adapter=AdapterConfig(**SMALL),
        checkpoint=HfCheckpoint(model),
        seed=1234,
        keep_last=None,
        base_fingerprint="base",
    )
    again.scheduler.use_checkpoint_opt_param_scheduler = False
    try:
        launch.load([again.model], again.optimizer, again.scheduler)
    except CheckpointError as error:
        return str(error), set()
    return "resumed", {group["lr"] for group in again.groups()}


def test_a_new_rate_is_refused_or_with_its_flag_taken_whole(tiny_dir: Path, tmp_path: Path) -> None:
    ((said, _),) = run_world(resume_with_rate, 1, tiny_dir, tmp_path / "a", {})
    assert "was trained on another schedule" in said
    assert "--override-lr" in said
    ((said, rates),) = run_world(
        resume_with_rate, 1, tiny_dir, tmp_path / "b", {"override_lr": True}
    )
    # Cosine from 2e-2 to 1e-4 over 20 steps after 4 of warm-up, at step 10: nothing of the old 1e-2.
    share = 0.5 * (1 + math.cos(math.pi * (10 - 4) / (20 - 4)))
    assert said == "resumed"
    assert list(rates) == [pytest.approx(1e-4 + share * (2e-2 - 1e-4))]


# --- from an adapter file -----------------------------------------------------------------------------------------------------


def start(model: Path, folder: Path, bf16: bool, refreshed: bool) -> dict[str, Any]:
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.training.adapter_io import load_adapter

    adapter = {"rank": 2, "alpha": 4}
    job = Job(model, adapter, bf16=bf16)
    if not folder.exists():
        job.fill(1)
        mx.export_adapter(job.model, folder)
    job = Job(model, adapter, bf16=bf16)
    job.step(0)  # moments and masters of another run
    if refreshed:
        mx.start_from_adapter(job.model, job.optimizer, folder)
    else:
        load_adapter(job.model, folder)
    factors = {name: p for name, (_, _, p) in named_factors(job.model).items()}
    loaded = {name: p.detach().clone() for name, p in factors.items()}
    told: dict[str, Any] = {"loaded": {name: digest(p) for name, p in factors.items()}}
    told["steps"] = {int(group.get("step", 0)) for group in job.groups()}
    for rate in (0.0, 1e-3):
        for group in job.groups():
            group["lr"] = rate
        job.step(1)
        far = [
            (p.detach().float() - loaded[name].float()).abs().max().item()
            for name, p in factors.items()
        ]
        told[rate] = max(far)
    return told


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_from_an_adapter_file_an_update_at_rate_0_changes_nothing(
    tiny_dir: Path, tmp_path: Path, bf16: bool
) -> None:
    (told,) = run_world(start, 1, tiny_dir, tmp_path / "adapter", bf16, True, timeout=120)
    assert told["steps"] == {0}
    assert told[0.0] == 0.0
    # Two updates were counted; a second one of Adam's moves an element by at most rate * (1 - b1^2) ... < 2 rate, and weight
    # decay by rate * 0.01 * |w|, |w| < 6. bf16 rounds to 2^-8 of the value.
    assert 0 < told[1e-3] < 2e-3 + 6e-5 + (6 * 2**-8 if bf16 else 0)
    if bf16:  # the control: without the refresh the old masters come back
        (told,) = run_world(start, 1, tiny_dir, tmp_path / "adapter", bf16, False, timeout=120)
        assert told[0.0] > 0.1


# --- zero gradients -----------------------------------------------------------------------------------------------------------


def zero_steps(model: Path, root: Path) -> list[float]:
    """Three updates with zero gradients: every factor is stepped and decays, whichever rank holds it."""
    job = Job(model, SMALL, base=False)
    job.fill(1)
    job.save(root / "before", 3)
    for _ in range(3):
        job.chunk.zero_grad_buffer()
        _, norm, _ = job.optimizer.step()
    job.save(root / "after", 6)
    return [float(norm)]


@pytest.mark.parametrize("kind", ["megatron", "torch"])
def test_zero_gradients_step_and_decay_equally_at_every_expert_parallel_size_and_never_under_torch_without_one(
    tiny_dir: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "torch":
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.5)
        mx.materialize_adam_state(optimizer)
        optimizer.step()
        assert torch.equal(parameter, torch.ones(4))
        assert optimizer.state[parameter]["step"] == 0
        return
    for world in (1, 2, 4):
        assert run_world(zero_steps, world, tiny_dir, tmp_path / str(world)) == [[0.0]] * world
    for world in (2, 4):
        for when in ("before", "after"):
            assert mx.compare_states(tmp_path / "1" / when, tmp_path / str(world) / when) == ()
    moved = {(d.what) for d in mx.compare_states(tmp_path / "1/before", tmp_path / "1/after")}
    assert {"step", "lora", "exp_avg"} <= moved
