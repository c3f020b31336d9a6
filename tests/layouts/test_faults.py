"""Each mistake of ``faults.py`` is seen by the check of the matrix that is named for it, and by no other that should be blind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.layouts import faults
from tests.layouts.matrix import base_job, judge_row
from tests.layouts.rows import FULL, Row
from tests.training.comparison import Outcome

pytestmark = [pytest.mark.dist, pytest.mark.layouts]

SEVERAL_IN_FLIGHT = Row(2, pp=2, fields=FULL | {"pipeline_model_parallel_layout": "Etttt|tL"})
"""The layer that shares an indexer is on the first of two stages, which holds two microbatches at a time."""

FAULTS: dict[str, tuple[Callable[[], None], Row, set[str]]] = {
    "shared factor left out of the EP reduction": (
        faults.shared_factor_not_reduced,
        Row(2, ep=2),
        {"replicas"},
    ),
    "shared factor reduced twice": (
        faults.shared_factor_reduced_twice,
        Row(2, ep=2),
        {"gradient", "grad_norm"},
    ),
    "A drawn per shard": (faults.a_drawn_per_shard, Row(2, tp=2), {"start"}),
    "adapter output added before the row-parallel reduction": (
        faults.adapter_added_before_the_reduction,
        Row(2, tp=2),
        {"gradient"},
    ),
    "selection of another microbatch": (
        faults.selection_left_on_the_module,
        SEVERAL_IN_FLIGHT,
        {"gradient"},
    ),
    "experts' own factors summed over tensor ranks": (
        faults.experts_counted_for_every_tensor_rank,
        Row(2, tp=2, ep=2),
        {"gradient"},
    ),
    "gradient norm counts copies": (faults.norm_counts_copies, Row(2, tp=2), {"grad_norm"}),
}


def first_step(one: Outcome) -> Outcome:
    """What a run of one step, with gradients at steps 1 and 2 and at random factors, must give."""
    kept = ("step 1", "step 2", "random")
    return replace(
        one,
        losses=one.losses[:1],
        norms=one.norms[:1],
        end=one.states["step 2"],
        gradients={state: one.gradients[state] for state in kept},
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_seen_by_its_check(
    fault: str, model_dir: Path, one_process: Callable[[int], Outcome]
) -> None:
    before, row, expected = FAULTS[fault]
    job = base_job(model_dir, steps=1, keep=(1, 2))
    verdict = judge_row(row, replace(job, before=before), first_step(one_process(row.batch)))
    print(verdict.failed)
    assert expected <= verdict.failed.keys(), verdict
    if "replicas" in expected:
        assert faults.SHARED in verdict.failed["replicas"]


def test_the_layout_of_the_selection_s_fault_is_right_without_it(
    model_dir: Path, one_process: Callable[[int], Outcome]
) -> None:
    job = base_job(model_dir, steps=1, keep=(1, 2))
    verdict = judge_row(SEVERAL_IN_FLIGHT, job, first_step(one_process(SEVERAL_IN_FLIGHT.batch)))
    assert not verdict.failed, verdict.failed
