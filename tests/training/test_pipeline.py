"""Two pipeline stages, cut legally and unevenly without a word of the user's, train as one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.comparison import Outcome, beyond_limits, difference
from tests.training.harness import Job, run_layout
from tests.training.test_pretrain import arguments, inputs, metrics, ours, run

__all__ = ["inputs"]  # a fixture

pytestmark = pytest.mark.dist

ADAPTER = {"rank": 4, "alpha": 8}


def agree(one: Outcome, other: Outcome) -> None:
    """Losses, gradients at the same state, updates (``comparison.LIMITS``), and every selection and route."""
    worst = difference(one, other)
    print(
        "\n" + "\n".join(f"{kind:10s} {figure:.1e}  {at}" for kind, (figure, at) in worst.items())
    )
    assert not beyond_limits(worst), worst
    assert one.choices.keys() == other.choices.keys()
    assert all(torch.equal(other.choices[key], chosen) for key, chosen in one.choices.items())


def test_a_step_on_two_stages_of_one_and_three_layers_equals_one_process(tiny_dir: Path) -> None:
    job = Job(str(tiny_dir), ADAPTER, steps=1, keep=(1,))
    one = run_layout(job)
    assert len(one.gradients["random"]) == 84
    two = run_layout(replace(job, layout={"pp": 2}, world=2), states=one.states)
    agree(one, two)
    # Nothing is held twice: each stage has its own layers.
    assert two.copies == 0


@pytest.mark.layouts
def test_our_entry_trains_on_two_stages_as_on_one(
    inputs: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for stages, folder in enumerate(folders, 1):
        folder.mkdir()
        size = ["--pipeline-model-parallel-size", str(stages)]
        words = [*arguments(inputs, tiny_dir, folder), *size]
        run(ours, stages, words)
    one, two = ([line["loss"] for line in metrics(folder)] for folder in folders)
    assert len(one) == 5
    # fp32, five steps; the loss is a sum over the tokens of one sequence, the same on both.
    assert two == pytest.approx(one, rel=1e-5)
