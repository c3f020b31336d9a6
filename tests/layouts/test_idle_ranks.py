"""Ranks with nothing to train, or nothing to compute, train like one process: no hang, no NaN, no missing gradient."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.layouts.matrix import ADAPTER, base_job, job_of, judge
from tests.layouts.rows import Row
from tests.training.comparison import Outcome
from tests.training.harness import Job, run_layout

pytestmark = [pytest.mark.dist, pytest.mark.layouts]

ROUTED = ADAPTER | {"glm52_lora_scope": "routed_experts"}
DENSE_STAGE = {"pipeline_model_parallel_layout": "Et|ttttL"}
"""The first stage has the dense layer alone."""


def compared(job: Job, row: Row) -> tuple[Outcome, Outcome]:
    """Two steps and a step from random factors, in one process and on ``row``, found equal and finite.

    The distance travelled is judged after twenty steps (``test_matrix.py``): the first two are a tenth of the rate and of Adam's
    whole steps for gradients that are nothing but noise.
    """
    job = replace(job, steps=2, keep=(1, 2), global_batch=row.batch)
    one = run_layout(job)
    other = run_layout(job_of(row, job), one.states)
    failed = judge(one, other, row.name).failed
    assert failed.keys() <= {"drift"}, failed
    for found in (one, other):
        assert all(map(math.isfinite, [*found.losses, *found.norms]))
        assert all(g.isfinite().all() for part in found.gradients.values() for g in part.values())
    return one, other


@pytest.mark.parametrize("frozen", ["keep", "drop"])
def test_a_stage_without_a_routed_expert_under_routed_experts(frozen: str, model_dir: Path) -> None:
    job = base_job(model_dir, adapter=ROUTED | {"frozen_factors": frozen})
    row = Row(2, pp=2, fields=DENSE_STAGE)
    one, _ = compared(job, row)
    names = one.gradients["random"].keys()
    assert names and all(".mlp.experts." in name for name in names)
    assert any(".layers.0." in name for name in one.end) == (frozen == "keep")


def test_a_stage_without_a_routed_expert_recomputed_and_split_over_experts(model_dir: Path) -> None:
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    compared(base_job(model_dir, adapter=ROUTED), Row(4, pp=2, ep=2, fields=DENSE_STAGE | full))


@pytest.fixture(scope="module")
def lopsided_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature with a correction bias that no token can overcome: experts 4 to 7 are never chosen."""
    folder = tmp_path_factory.mktemp("lopsided") / "model"
    shutil.copytree(model_dir, folder)
    changed = 0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
            tensors[name][4:] -= 100.0
            changed += 1
        save_file(tensors, path, metadata={"format": "pt"})
    assert changed
    return folder


@pytest.mark.parametrize(
    "row",
    [Row(4, ep=4), Row(4, tp=2, etp=2, ep=2)],
    ids=lambda row: row.name.replace(" ", "-"),
)
def test_expert_ranks_whose_experts_get_no_token(row: Row, lopsided_dir: Path) -> None:
    _, other = compared(base_job(lopsided_dir), row)
    routes = [chosen for (_, _, kind), chosen in other.random_choices.items() if kind == "route"]
    assert routes and not any(chosen[:, 4:].any() for chosen in routes)
    for name, gradient in other.gradients["random"].items():
        if gradient.dim() == 3 and gradient.shape[0] == 8:
            assert not gradient[4:].any() and gradient[:4].any(), name


def test_data_ranks_whose_samples_have_no_label(model_dir: Path) -> None:
    # Step 1's fourth sample has none, and is all that the fourth rank has.
    from tests.training.harness import sample

    assert [int(sample(1, index, 40)["mask"].sum() > 0) for index in range(4)] == [1, 1, 1, 0]
    compared(base_job(model_dir), Row(4, ep=2))
