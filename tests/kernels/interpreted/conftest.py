"""Every kernel test here runs in the corrected interpreter, under the sanitizer, with uninitialised memory full of NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels import interpreter, sanitizer

interpreter.install()
sanitizer.install()


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """``torch.empty`` is NaN, or the largest integer: an element that no program writes is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
