"""The state comparer: what is equal, what differs, each told by its logical name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatron_xorl as mx
from megatron_xorl.errors import CheckpointError
from tests.training.test_checkpoint import SMALL
from tests.workers.adapter_job import Job
from tests.worlds import run_world


def pair(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"used": nn.Linear(2, 2, bias=False), "late": nn.Linear(2, 2, bias=False)}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model["used"].weight.grad = torch.ones(2, 2)
        optimizer.step()
    return model, optimizer


def test_absent_and_zero_step_state_are_equal_and_anything_more_is_a_difference() -> None:
    absent, zero = pair(2), pair(2)
    assert mx.materialize_adam_state(zero[1]) == 1
    assert mx.compare_states(absent, zero) == ()
    state = zero[1].state[zero[0]["late"].weight]
    state["exp_avg"][0, 1] = 1e-30
    (found,) = mx.compare_states(absent, zero)
    assert str(found) == "late.weight: exp_avg: 1 of 4 elements, largest 1e-30"
    state["exp_avg"].zero_()
    state["step"] += 1
    (found,) = mx.compare_states(zero, absent)
    assert (found.name, found.what, found.detail) == ("late.weight", "step", "1 and 0")


def test_every_kind_of_state_is_compared_and_factors_that_only_one_has_are_named() -> None:
    one, other = pair(2), pair(3)
    kinds = {(found.name, found.what) for found in mx.compare_states(one, other)}
    assert kinds == {
        ("used.weight", what) for what in ("lora", "master", "exp_avg", "exp_avg_sq", "step")
    } - {("used.weight", "master")}
    other = pair(2)
    other[0]["late"].requires_grad_(False)
    (found,) = mx.compare_states(one, other)
    assert str(found) == "late.weight: factor: only in the first"


def saved_and_live(model: Path, folder: Path, form: str) -> dict[str, Any]:
    job = Job(model, SMALL, base=False, bf16=True)
    fresh = Job(model, SMALL, base=False, bf16=True)
    live, other = ([job.model], job.optimizer), ([fresh.model], fresh.optimizer)
    told: dict[str, Any] = {"fresh": mx.compare_states(live, other)}
    job.fill(1)
    fresh.fill(1)
    directory = job.save(folder, 3, form=form)
    told["same"] = mx.compare_states(live, other) + mx.compare_states(live, directory)
    fresh.fill(2)
    told["other"] = mx.compare_states(live, other)
    told["file"] = mx.compare_states(directory, other)
    return told


@pytest.mark.dist
@pytest.mark.parametrize(("world", "form"), [(1, "dcp"), (2, "torch_dist"), (2, "dcp")])
def test_live_states_and_checkpoints_of_any_layout_and_form_are_compared_alike(
    tiny_dir: Path, tmp_path: Path, world: int, form: str
) -> None:
    for told in run_world(saved_and_live, world, tiny_dir, tmp_path / "a", form):
        assert told["fresh"] == told["same"] == ()
        names = {found.name for found in told["other"]}
        assert len(told["other"]) == 4 * len(names)
        assert told["file"] == told["other"]
    run_world(saved_and_live, 1, tiny_dir, tmp_path / "b", "torch_dist")
    assert mx.compare_states(tmp_path / "a", tmp_path / "b") == ()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        mx.compare_states(tmp_path / "none", tmp_path / "b")
