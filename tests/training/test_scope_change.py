"""A resume that trains more, or less, than the checkpoint: what joins, what is kept, what is refused.

The oracle of a first update is torch's own AdamW on the same gradient; bits are compared with a fresh optimizer of the kind that
trains here.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_xorl as mx
from megatron_xorl.errors import MegatronXorlError
from megatron_xorl.training.resume import MAY_CHANGE
from megatron_xorl.weights.adapter_files import AdapterFile
from tests.training.test_checkpoint import read_tensors
from tests.workers.adapter_job import ADAPTER, Job
from tests.worlds import run_world

pytestmark = pytest.mark.dist

TARGETS = ["*.layers.1.mlp.experts.*", "*.layers.1.self_attn.o_proj", "lm_head"]
ALL = ADAPTER | {"lora_target_modules": TARGETS}
ROUTED = ALL | {"glm52_lora_scope": "routed_experts"}
ALLOWED = ROUTED | {"allow_nonzero_frozen": True}
MARK = 100
"""The step that the checkpoint's factors are at."""


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("megatron_xorl").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def save_at(model: Path, folder: Path, adapter: dict[str, Any], step: int, **options: Any) -> None:
    """Save a job that has drawn values and moments and is at ``step``; an untouched one at step 0."""
    from megatron_xorl.training.step_groups import set_steps

    job = job_of(model, adapter, base=options.pop("base", False))
    if step:
        job.fill(1)
        for part in _parts(job):
            mains = [main for group in part.optimizer.param_groups for main in group["params"]]
            set_steps(part, dict.fromkeys(mains, step), {step})
    job.save(folder, step, **options)


def job_of(model: Path, adapter: dict[str, Any], **options: Any) -> Job:
    """With a base or without one, which checkpoints cannot tell."""
    job = Job(model, adapter, **options)
    job.fingerprint = "base"
    return job


def _parts(job: Job) -> list[Any]:
    return list(getattr(job.optimizer, "chained_optimizers", [job.optimizer]))


def named_mains(job: Job) -> dict[str, torch.Tensor]:
    """This rank's pieces of masters by logical name."""
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.training.optimizer_state import _homes

    parameters = {n: p for n, (f, _, p) in named_factors(job.model).items() if f.trainable}
    homes = _homes(job.optimizer, parameters)
    return {name: home.main for name, home in homes.items() if home.main is not None}


def widened(model: Path, folder: Path, one_step: bool) -> dict[str, Any]:
    """Resume a narrower checkpoint with everything; one training step; every update beside its oracles'."""
    from megatron_xorl.parallel.cpu_adam import CpuFusedAdam

    said = Said()
    job = job_of(model, ALL)
    assert job.load(folder) == MARK
    if one_step:  # the control: as if all were at the run's step
        for group in job.groups():
            group["step"] = MARK
    mains = named_mains(job)
    # The draw of a routed factor is large; the base's loss stays finite.
    before = {name: main.detach().clone() for name, main in mains.items()}
    moments = {
        name: {k: v.clone() for k, v in _state(job, main).items()} for name, main in mains.items()
    }
    groups = {name: _group(job, main) for name, main in mains.items()}
    steps = {name: group["step"] for name, group in groups.items()}
    job.step(0)
    told: dict[str, Any] = {"said": said.lines, "steps": steps, "wrong": [], "far": []}
    for name, main in mains.items():
        clone = torch.nn.Parameter(before[name].clone())
        options = {key: groups[name][key] for key in ("betas", "eps", "weight_decay")}
        fresh = CpuFusedAdam([clone], lr=RATE, **options)
        if name in ROUTED_NAMES(job):
            fresh.state[clone] = moments[name]
            fresh.param_groups[0]["step"] = MARK
        else:
            oracle = torch.nn.Parameter(before[name].clone())
            theirs = torch.optim.AdamW([oracle], lr=RATE, **options)
            oracle.grad = main.grad.clone()
            theirs.step()
            if not torch.allclose(oracle, main, rtol=1e-6, atol=1e-9):
                told["far"].append(name)
        clone.grad = main.grad.clone()
        fresh.step()
        if not torch.equal(clone, main):
            told["wrong"].append(name)
    told["fresh names"] = sorted(name for name in mains if name not in ROUTED_NAMES(job))
    job.save(folder.with_name(folder.name + " later"), MARK + 1)
    return told


RATE = 1e-3  # of the first step of the jobs' schedule


def ROUTED_NAMES(job: Job) -> set[str]:
    return {f.name for f in job.model.inventory.factors if ".mlp.experts." in f.name}


def _state(job: Job, main: torch.Tensor) -> dict[str, torch.Tensor]:
    return next(part.optimizer.state[main] for part in _parts(job) if main in part.optimizer.state)


def _group(job: Job, main: torch.Tensor) -> dict[str, Any]:
    return next(g for g in job.groups() if any(main is held for held in g["params"]))


def train_on(model: Path, folder: Path, adapter: dict[str, Any]) -> list[Any]:
    job = job_of(model, adapter)
    job.load(folder)
    return [job.step(number) for number in range(3)]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_widened_at_step_100_a_new_factor_s_first_update_is_a_fresh_adam_s(
    tiny_dir: Path, tmp_path: Path, world: int
) -> None:
    folder = tmp_path / "routed"
    run_world(save_at, 1, tiny_dir, folder, ROUTED, MARK)
    found = run_world(widened, world, tiny_dir, folder, False, timeout=120)
    names = set()
    for told in found:
        assert told["wrong"] == told["far"] == []
        names |= set(told["fresh names"])
        assert {step for name, step in told["steps"].items() if ".mlp.experts." in name} == {MARK}
        assert {told["steps"][name] for name in told["fresh names"]} <= {0}
    assert names == {
        f"{t}.lora_{s}" for t in ("lm_head", "model.layers.1.self_attn.o_proj") for s in "AB"
    }
    (line,) = [text for text in found[0]["said"] if "join" in text]
    assert "scope routed_experts and goes on with all" in line
    assert "4 join with zero Adam state at step 0" in line
    later = json.loads((tmp_path / "routed later/iter_0000101/manifest.json").read_text())
    steps = {name: factor["step"] for name, factor in later["factors"].items()}
    assert {steps[name] for name in names} == {1}
    assert {step for name, step in steps.items() if name not in names} == {MARK + 1}
    # They are resumed at different steps too, in another layout.
    assert (
        len(run_world(train_on, 3 - world, tiny_dir, tmp_path / "routed later", ALL, timeout=120))
        == 3 - world
    )
    # The control: at the run's step the same test fails, for every new factor and for no other.
    if world == 1:
        (told,) = run_world(widened, 1, tiny_dir, folder, True, timeout=120)
        assert set(told["far"]) == {
            name for name in names if name.endswith("lora_B")
        }  # A's gradient is zero at first


def widen_and_pass_on(model: Path, source: Path, target: Path, form: str) -> None:
    job = job_of(model, ALL, base=False)
    job.load(source)
    live = ([job.model], job.optimizer)
    told = [d for d in mx.compare_states(source, live) if d.what != "factor"]
    assert told == []
    job.save(target, 7, form=form)
    again = job_of(model, ALL, base=False)
    again.load(target)
    assert mx.compare_states(live, ([again.model], again.optimizer)) == ()


@pytest.mark.parametrize("form", ["torch_dist", "dcp"])
def test_before_the_first_step_and_widened_states_come_back_in_both_forms(
    tiny_dir: Path, tmp_path: Path, form: str
) -> None:
    for step in (0, MARK):
        source, target = tmp_path / f"source {step}", tmp_path / f"target {step}"
        run_world(save_at, 2, tiny_dir, source, ROUTED, step, form=form)
        run_world(widen_and_pass_on, 2, tiny_dir, source, target, form)
        manifest = json.loads((target / "iter_0000007/manifest.json").read_text())
        assert (manifest["form"], manifest["frozen"]) == (form, {})
        steps = {name: factor["step"] for name, factor in manifest["factors"].items()}
        assert {step for name, step in steps.items() if ".mlp.experts." in name} == {step}
        assert {step for name, step in steps.items() if ".mlp.experts." not in name} == {0}


# --- narrower -----------------------------------------------------------------------------------------------------------------


def try_load(model: Path, folder: Path, adapter: dict[str, Any]) -> tuple[str, bool]:
    """What a load said, and whether it changed anything."""
    job = job_of(model, adapter, base=False)
    before = job.state()
    try:
        job.load(folder)
    except MegatronXorlError as error:
        return f"{type(error).__name__}: {error}", job.state() != before
    return "loaded", job.state() != before


def loss_of(model: Path, folder: Path, adapter: dict[str, Any], target: Path | None) -> float:
    job = job_of(model, adapter)
    job.load(folder)
    if target is not None:
        job.save(target, MARK + 1)
    return job.step(0)["loss"]


def test_narrowing_is_refused_while_a_frozen_factor_contributes_and_nothing_changes(
    tiny_dir: Path, tmp_path: Path
) -> None:
    run_world(save_at, 2, tiny_dir, tmp_path, ALL, MARK)
    for world in (1, 2):
        for said, changed in run_world(try_load, world, tiny_dir, tmp_path, ROUTED):
            assert said.startswith("CheckpointError")
            assert "2 factors would be frozen that are not zero, first lm_head.lora_B" in said
            assert "allow_nonzero_frozen: true" in said
            assert not changed
    ((said, changed),) = run_world(
        try_load, 1, tiny_dir, tmp_path, ALLOWED | {"frozen_factors": "drop"}
    )
    assert "2 factors that are not zero would be dropped" in said
    assert not changed


def test_narrowing_before_the_first_update_keeps_what_trains_and_needs_no_permission(
    tiny_dir: Path, tmp_path: Path
) -> None:
    run_world(save_at, 1, tiny_dir, tmp_path, ALL, 0)
    for adapter in (ROUTED, ROUTED | {"frozen_factors": "drop"}):
        assert run_world(try_load, 1, tiny_dir, tmp_path, adapter)[0][0] == "loaded"


@pytest.mark.slow
def test_what_is_frozen_with_permission_goes_on_contributing_is_carried_and_can_train_again(
    tiny_dir: Path, tmp_path: Path
) -> None:
    whole, narrow = tmp_path / "whole", tmp_path / "narrow"
    run_world(save_at, 1, tiny_dir, whole, ALL, MARK)
    (full,) = run_world(loss_of, 1, tiny_dir, whole, ALL, None, timeout=120)
    assert (
        run_world(loss_of, 2, tiny_dir, whole, ALLOWED, narrow, timeout=120)
        == [pytest.approx(full, rel=1e-5)] * 2
    )
    directory = narrow / f"iter_{MARK + 1:07d}"
    manifest = json.loads((directory / "manifest.json").read_text())
    frozen = {f"{t}.lora_{s}" for t in ("lm_head", "model.layers.1.self_attn.o_proj") for s in "AB"}
    assert set(manifest["frozen"]) == frozen
    assert not frozen & manifest["factors"].keys()
    before, after = read_tensors(whole / f"iter_{MARK:07d}"), read_tensors(directory)
    assert all(torch.equal(before[f"lora/{name}"], after[f"lora/{name}"]) for name in frozen)
    assert not any(f"exp_avg/{name}" in after for name in frozen)
    # Again from there; without permission it is refused there too; widened they have their values and zero state.
    assert run_world(loss_of, 1, tiny_dir, narrow, ALLOWED, None, timeout=120) == [
        pytest.approx(full, rel=1e-5)
    ]
    assert "not zero" in run_world(try_load, 1, tiny_dir, narrow, ROUTED)[0][0]
    # An exported adapter holds them too, and says which of its targets did not train.
    told = mx.export_checkpoint(narrow, tmp_path / "exported", "hf_peft")
    assert told["factors"] == len(manifest["factors"]) + len(frozen)
    document = json.loads((tmp_path / "exported/adapter_config.json").read_text())
    assert document["megatron_xorl"]["frozen"] == ["model.layers.1.self_attn.o_proj", "lm_head"]
    file = AdapterFile(tmp_path / "exported")
    assert {factor.name for factor in file.factors if not factor.trainable} == frozen
    for factor in file.factors:
        assert factor.name not in frozen or torch.equal(
            file.read(factor), before[f"lora/{factor.name}"]
        )
    (told,) = run_world(widened_values, 1, tiny_dir, narrow)
    assert told == dict.fromkeys(sorted(frozen), (0, True))


def widened_values(model: Path, folder: Path) -> dict[str, tuple[int, bool]]:
    job = job_of(model, ALL, base=False)
    job.load(folder)
    frozen = json.loads((folder / f"iter_{MARK + 1:07d}/manifest.json").read_text())["frozen"]
    from megatron_xorl.layers.attach import named_factors

    tensors = read_tensors(folder / f"iter_{MARK + 1:07d}")
    held, mains = named_factors(job.model), named_mains(job)
    return {
        name: (
            _group(job, mains[name])["step"],
            torch.equal(held[name][2], tensors[f"lora/{name}"]),
        )
        for name in sorted(frozen)
    }


def test_what_may_change_is_these_keys_and_no_other() -> None:
    assert set(MAY_CHANGE) == {
        "glm52_lora_scope",
        "frozen_factors",
        "allow_nonzero_frozen",
        "export_format",
    }
