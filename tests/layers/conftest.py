"""The tiny checkpoint loaded here and in transformers, for the tests that compare the two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layers.parity_case import ParityCase
from tests.training.harness import use_one_process


@pytest.fixture(scope="session")
def case(tiny_dir: Path) -> ParityCase:
    """The small-block checkpoint; a test that changes the model changes it back."""
    use_one_process()
    return ParityCase(tiny_dir)
