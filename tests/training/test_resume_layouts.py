"""Resume in another layout: the state exactly, the next ten losses to 1e-5 relative.

One process trains three steps and goes on to thirteen. Its checkpoint is loaded in the first layout of a row and saved there,
then loaded in the second, where the ten steps are trained. So what the first layout writes is compared with what one process
wrote, and the second layout's losses with the uninterrupted run's.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import megatron_xorl as mx
from tests.training.harness import Job, Trainer
from tests.worlds import run_world

pytestmark = [pytest.mark.dist, pytest.mark.layouts]

SAVED, NEXT, LIMIT = 3, 10, 1e-5
FINGERPRINT = "base"

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "DP2": (2, {}),
    "EP2": (2, {"ep": 2}),
    "EP4": (4, {"ep": 4}),
    "TP2": (2, {"tp": 2, "etp": 1}),
    "ETP2": (2, {"tp": 2, "etp": 2}),
    "PP2": (2, {"pp": 2}),
    "CP2": (2, {"cp": 2}),
    "TP2 EP2": (2, {"tp": 2, "ep": 2, "etp": 1}),
    "PP2 EP2": (4, {"pp": 2, "ep": 2}),
    "TP2 PP2": (4, {"tp": 2, "pp": 2, "etp": 2}),
}

CHANGES = [
    ("1", "DP2"),
    ("DP2", "1"),
    ("1", "EP2"),
    ("EP2", "EP4"),
    ("EP4", "1"),
    ("TP2", "PP2"),
    ("PP2", "TP2"),
    ("DP2", "EP2"),
    ("EP2", "CP2"),
    ("CP2", "DP2"),
    ("ETP2", "TP2 EP2"),
    ("TP2 EP2", "ETP2"),
    ("TP2 PP2", "EP2"),
    ("EP4", "PP2 EP2"),
    ("PP2 EP2", "TP2 PP2"),
]


class Run:
    """The harness's trainer with our checkpoints."""

    def __init__(self, job: Job) -> None:
        from megatron_xorl.parallel.cpu import use_cpu
        from megatron_xorl.parallel.groups import initialize

        use_cpu()
        initialize(**job.layout)
        self.job, self.trainer = job, Trainer(job)
        self.chunks, self.optimizer = self.trainer.chunks, self.trainer.optimizer

    def common(self) -> dict[str, Any]:
        from megatron_xorl.config.adapter import AdapterConfig
        from megatron_xorl.parallel.layout import current_layout
        from megatron_xorl.training.resume import run_identity

        identity = run_identity(FINGERPRINT, AdapterConfig(**self.job.adapter), 1234)
        return identity | {"layout": asdict(current_layout())}

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            losses.append(self.trainer.forward_backward(step))
            self.trainer.update(step)
        return losses

    def save(self, root: Path, form: str) -> None:
        from megatron_xorl.training.checkpoint import save_checkpoint

        save_checkpoint(root, SAVED, self.chunks, self.optimizer, self.common(), form=form)

    def load(self, root: Path) -> None:
        from megatron_xorl.training.checkpoint import load_checkpoint

        manifest = load_checkpoint(root, self.chunks, self.optimizer, self.common())
        assert manifest is not None and manifest["iteration"] == SAVED


def uninterrupted(job: Job, root: Path) -> list[float]:
    run = Run(job)
    run.train(1, SAVED)
    run.save(root, "torch_dist")
    return run.train(SAVED + 1, SAVED + NEXT)


def pass_on(job: Job, source: Path, target: Path, form: str) -> None:
    run = Run(job)
    run.load(source)
    run.save(target, form)


def resume(job: Job, root: Path) -> tuple[list[str], list[float]]:
    run = Run(job)
    run.load(root)
    wrong = mx.compare_states(root, (run.chunks, run.optimizer))
    return [str(found) for found in wrong], run.train(SAVED + 1, SAVED + NEXT)


@pytest.fixture(scope="module")
def one(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path, list[float]]:
    """The job, its checkpoint after three steps, and the ten losses after it."""
    root = tmp_path_factory.mktemp("one")
    job = Job(str(tiny_dir), {"rank": 2, "alpha": 4}, global_batch=4)
    (losses,) = run_world(uninterrupted, 1, job, root, timeout=240)
    return job, root, losses


@pytest.mark.parametrize(
    ("before", "now"), CHANGES, ids=[" to ".join(change) for change in CHANGES]
)
def test_the_state_is_exact_and_the_next_ten_losses_are_those_of_the_uninterrupted_run(
    one: tuple[Job, Path, list[float]], tmp_path: Path, before: str, now: str
) -> None:
    job, root, losses = one
    world, layout = LAYOUTS[before]
    form = "dcp" if CHANGES.index((before, now)) % 3 == 2 else "torch_dist"
    run_world(
        pass_on, world, replace(job, layout=layout, world=world), root, tmp_path, form, timeout=240
    )
    assert [d for d in mx.compare_states(root, tmp_path) if d.name] == []
    world, layout = LAYOUTS[now]
    found = run_world(
        resume, world, replace(job, layout=layout, world=world), tmp_path, timeout=240
    )
    for wrong, told in found:
        assert wrong == []
        worst = max(abs(a - b) / abs(b) for a, b in zip(told, losses, strict=True))
        assert worst <= LIMIT, (worst, told, losses)
    print(f"{before} to {now}: largest relative difference of a loss {worst:.1e}")


def test_the_table_has_the_changes_that_were_asked_for() -> None:
    assert len(CHANGES) >= 12
    asked = {("1", "DP2"), ("DP2", "1"), ("EP2", "EP4"), ("TP2", "PP2"), ("DP2", "EP2")}
    assert asked <= set(CHANGES)
