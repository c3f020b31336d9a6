"""Every layout of the table trains the adapter that one process trains (``rows.py``; ``matrix.py`` has the rule)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.layouts.matrix import TIMEOUT, Verdict, base_job, job_of, judge_bf16, judge_row, judged
from tests.layouts.rows import BF16_ROWS, ROWS, Row
from tests.layouts.table import line
from tests.training.comparison import Outcome
from tests.training.harness import run_layout

pytestmark = [pytest.mark.dist, pytest.mark.layouts]


def _ids(row: Row) -> str:
    return row.name.replace(" ", "-")


@pytest.mark.parametrize("row", ROWS, ids=_ids)
def test_a_layout_trains_as_one_process_does(
    row: Row, model_dir: Path, one_process: Callable[[int], Outcome], table: list[Verdict]
) -> None:
    verdict = judge_row(row, base_job(model_dir), one_process(row.batch))
    table.append(verdict)
    print(verdict.row, line(verdict))
    assert not verdict.failed, verdict.failed


@pytest.mark.parametrize("row", BF16_ROWS, ids=_ids)
def test_in_bf16_a_layout_adds_no_more_than_bf16_does(
    row: Row,
    model_dir: Path,
    one_process: Callable[[int], Outcome],
    one_process_bf16: Outcome,
    table: list[Verdict],
) -> None:
    exact = one_process(row.batch)
    job = job_of(row, base_job(model_dir, dtype="bfloat16"))
    compare = partial(judge_bf16, exact, one_process_bf16)
    verdict = judged(row.name, lambda: run_layout(job, exact.states, TIMEOUT), compare)
    table.append(verdict)
    print(verdict.row, line(verdict))
    assert not verdict.failed, verdict.failed
