"""Masters, moments and steps through a checkpoint: a resumed run is the uninterrupted one, bit for bit.

The state is compared as bytes of Megatron's own optimizer tensors, not through the module under test.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_xorl.errors import CheckpointError
from tests.training.test_checkpoint import SMALL, read_tensors, save_filled, wrong_values
from tests.workers.adapter_job import ADAPTER, Job
from tests.worlds import run_world

pytestmark = pytest.mark.dist

STEPS, STOP = 6, 3
FORGET = ("moments", "step", "master", "factor", "scheduler", "random state")


def uninterrupted(model: Path, folder: Path, bf16: bool) -> dict[str, Any]:
    """Train 6 steps; save before the first one and after the third."""
    job = Job(model, ADAPTER, bf16=bf16)
    job.save(folder / "fresh", 0)
    fresh = job.state()
    reports = [job.step(number) for number in range(STOP)]
    job.save(folder / "stop", STOP)
    stop = job.state()
    reports.append(job.step(STOP))
    after_stop = reports[STOP], job.state()
    reports += [job.step(number) for number in range(STOP + 1, STEPS)]
    return {
        "fresh": fresh,
        "stop": stop,
        "after stop": after_stop,
        "end": job.state(),
        "reports": reports,
    }


def resumed(model: Path, folder: Path, bf16: bool, forget: bool) -> dict[str, Any]:
    """In a fresh world: resume from the third step; resume from before the first; resume and forget something."""
    job = Job(model, ADAPTER, bf16=bf16)
    assert job.load(folder / "stop") == STOP
    found: dict[str, Any] = {"stop": job.state()}
    found["reports"] = [job.step(number) for number in range(STOP, STEPS)]
    found["end"] = job.state()
    assert job.load(folder / "fresh") == 0
    found["fresh"] = job.state()
    found["first"] = job.step(0)
    found["forgotten"] = {}
    for what in ("nothing", *FORGET) if forget else ():
        job.load(folder / "stop")
        _forget(job, what)
        found["forgotten"][what] = (job.step(STOP), job.state())
    return found


def _forget(job: Job, what: str) -> None:
    if what == "scheduler":
        job.scheduler.num_steps = 0
        job.scheduler.step(increment=0)
    elif what == "random state":
        torch.manual_seed(99)
    elif what == "step":
        for group in job.groups():
            group["step"] = 0
    elif what == "factor":
        # bf16 factors are rounded again from their masters only after the next update.
        with torch.no_grad():
            for name, parameter in job.model.named_parameters():
                if name.endswith("lora_B"):
                    parameter.zero_()
    for main, moments in job.optimizer_tensors():
        if what == "moments":
            moments["exp_avg"].zero_()
        elif what == "master":
            with torch.no_grad():
                main.mul_(1.5)


@pytest.mark.parametrize(
    ("world", "bf16", "forget"),
    [(2, False, False), pytest.param(1, True, True, marks=pytest.mark.slow)],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tiny_dir: Path, tmp_path: Path, world: int, bf16: bool, forget: bool
) -> None:
    whole = run_world(uninterrupted, world, tiny_dir, tmp_path, bf16, timeout=120)
    again = run_world(resumed, world, tiny_dir, tmp_path, bf16, forget, timeout=120)
    for before, after in zip(whole, again, strict=True):
        assert after["stop"] == before["stop"]
        assert after["reports"] == before["reports"][STOP:]
        assert after["end"] == before["end"]
        # An optimizer that never stepped: zero moments, step 0, and the same first update.
        assert after["fresh"] == before["fresh"]
        assert after["first"] == before["reports"][0]
        assert before["fresh"] != before["stop"] != before["end"]
        assert after["forgotten"].pop("nothing", before["after stop"]) == before["after stop"]
        # The control: each thing that a resume could leave out changes what follows.
        for what, after_stop in after["forgotten"].items():
            assert after_stop != before["after stop"], what
    losses = [report["loss"] for report in whole[0]["reports"]]
    assert len(set(losses)) == STEPS
    manifest = json.loads((tmp_path / "fresh/iter_0000000/manifest.json").read_text())
    assert {factor["step"] for factor in manifest["factors"].values()} == {0}
    tensors = read_tensors(tmp_path / "fresh/iter_0000000")
    moments = [value for key, value in tensors.items() if key.startswith("exp_avg")]
    assert len(moments) == 2 * len(manifest["factors"])
    assert not any(value.any() for value in moments)


def pass_on(model: Path, source: Path, target: Path) -> dict[str, Any]:
    """Load in this layout and save again; return the steps and whether random state was restored."""
    job = Job(model, SMALL, base=False, bf16=True)
    job.fill(9)
    before = {key: value for key, value in job.state().items() if key.startswith("rng")}
    assert job.load(source) == 3
    after = {key: value for key, value in job.state().items() if key.startswith("rng")}
    job.save(target, 3)
    return {"steps": {int(group["step"]) for group in job.groups()}, "rng kept": before == after}


def test_a_checkpoint_of_two_expert_ranks_resumes_on_one_process_and_back_with_the_same_state(
    tiny_dir: Path, tmp_path: Path
) -> None:
    run_world(save_filled, 2, tiny_dir, tmp_path / "two", 1, 3, SMALL)
    for world, source, target in ((1, "two", "one"), (2, "one", "two again")):
        for found in run_world(pass_on, world, tiny_dir, tmp_path / source, tmp_path / target):
            assert found == {"steps": {3}, "rng kept": True}
        assert wrong_values(tmp_path / target / "iter_0000003", SMALL, 1) == []
    # The control: another draw is told apart, in every tensor.
    keys = wrong_values(tmp_path / "two again/iter_0000003", SMALL, 2)
    assert (
        len(keys)
        == len(json.loads((tmp_path / "two/iter_0000003/manifest.json").read_text())["factors"]) * 4
    )


def complaints(model: Path, root: Path) -> list[str]:
    """Return the messages of what the optimizer's side refuses."""
    from megatron_xorl.training.optimizer_state import gather_state

    job = Job(model, SMALL, base=False)
    job.fill(1)
    if torch.distributed.get_rank() == 1:  # what one rank finds stops both
        _, moments = job.optimizer_tensors()[0]
        del moments["exp_avg_sq"]
    messages = []
    stranger = torch.nn.Parameter(torch.zeros(2, 2))
    for attempt in (
        lambda: list(gather_state(job.optimizer, {"stranger.lora_A": stranger})),
        lambda: job.save(root, 1),
    ):
        try:
            attempt()
        except CheckpointError as error:
            messages.append(str(error))
        else:
            messages.append("accepted")
    return messages


def test_what_the_optimizer_cannot_hold_or_give_is_refused_by_name(
    tiny_dir: Path, tmp_path: Path
) -> None:
    messages, same = run_world(complaints, 2, tiny_dir, tmp_path)
    assert messages == same
    assert messages[0].startswith("stranger.lora_A trains but no optimizer holds it")
    assert re.match(r"(model|lm_head)\S*\.lora_[AB] has exp_avg and no exp_avg_sq", messages[1])
    assert list(tmp_path.iterdir()) == []
