"""Fixtures that many rooms share: the tiny checkpoint, on a small block and on the shipped one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Set before anything imports torch. The tensors here are tiny: threads that wait for each other make the suite several
# times slower on a busy machine, and one thread count makes sums reproducible.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default tiny GLM-5.2-FP8 checkpoint, seed 0, block 32; read-only by agreement."""
    from megatron_xorl.convert.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=0, block=32)


@pytest.fixture(scope="session")
def tiny128_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint on the shipped block of 128, seed 0, with GLM-5.2's own head geometry; read-only by agreement."""
    from megatron_xorl.convert.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny128") / "model", seed=0, block=128)
