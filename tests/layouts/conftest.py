"""The miniature of the matrix, its one-process runs, and the table at the end of the session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.layouts.matrix import Verdict, base_job
from tests.layouts.table import lines
from tests.training.comparison import Outcome
from tests.training.harness import run_layout
from tests.training.test_virtual_stages import write_model

VERDICTS: list[Verdict] = []
"""Of this session, in the order in which they were found."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, four of which own an indexer; fp8 blocks of 32."""
    return write_model(tmp_path_factory.mktemp("layouts") / "model")


@pytest.fixture(scope="session")
def one_process(model_dir: Path) -> Callable[[int], Outcome]:
    """Twenty fp32 steps in one process, of so many samples each: what every row is held to. Each is run once a session."""
    return cache(lambda batch: run_layout(base_job(model_dir, global_batch=batch)))


@pytest.fixture(scope="session")
def one_process_bf16(model_dir: Path, one_process: Callable[[int], Outcome]) -> Outcome:
    """Two samples a step in bf16, gradients taken at the fp32 run's states."""
    job = base_job(model_dir, global_batch=2, dtype="bfloat16")
    return run_layout(job, one_process(2).states)


@pytest.fixture(scope="session")
def table() -> list[Verdict]:
    """Where a test leaves its verdict for the table."""
    return VERDICTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of the layouts that were run."""
    if not VERDICTS:
        return
    terminalreporter.section("layouts against one process")
    for line in lines(VERDICTS):
        terminalreporter.write_line(line)
