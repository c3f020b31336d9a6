"""One job at a time writes a checkpoint directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_xorl.errors import CheckpointError
from megatron_xorl.training.run_lock import hold_lock


def test_a_second_job_is_refused_with_the_holder_and_a_later_one_is_not(tmp_path: Path) -> None:
    held = hold_lock(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=f"in use by another job .process {os.getpid()} on "):
        hold_lock(tmp_path / "checkpoints")
    held.close()
    hold_lock(tmp_path / "checkpoints").close()


def test_two_directories_are_two_locks(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "one"), hold_lock(tmp_path / "two"):
        pass
