"""Which checkpoint is the latest, and whether it is this run's: every pointer that is damaged, another forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_xorl.errors import CheckpointError
from megatron_xorl.fp8.engine import forward_record
from megatron_xorl.training.resume import (
    ANY_FORWARD,
    FORMAT_VERSION,
    check_agrees,
    latest_iteration,
)


def checkpoint(root: Path, name: str) -> None:
    (root / name).mkdir()
    (root / name / "manifest.json").write_text("{}")


def test_nothing_saved_is_none_and_unfinished_saves_do_not_count(tmp_path: Path) -> None:
    assert latest_iteration(tmp_path / "none") is None
    checkpoint(tmp_path, "iter_0000003.partial")
    checkpoint(tmp_path, "iter_0000003.replaced")
    assert latest_iteration(tmp_path) is None


def test_the_pointer_or_the_only_checkpoint_is_the_latest(tmp_path: Path) -> None:
    checkpoint(tmp_path, "iter_0000003")
    assert latest_iteration(tmp_path) == 3
    (tmp_path / "latest").write_text("000000000000040\n")
    assert latest_iteration(tmp_path) == 40


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda root: checkpoint(root, "iter_foo"), "its name ends in 'foo'; expected iter_"),
        (lambda root: checkpoint(root, "iter_1.5"), r"its name ends in '1\.5'"),
        (lambda root: checkpoint(root, "iter_"), "its name ends in ''"),
        (lambda root: (root / "latest").write_text("1" * 5000), "holds '1{40}'; expected one"),
        (lambda root: (root / "latest").write_text("1" * 300), "holds '1{40}'; expected one"),
        (lambda root: (root / "latest").write_text(""), "holds ''; expected one"),
        (lambda root: (root / "latest").mkdir(), "latest cannot be read"),
        (lambda root: (root / "latest").symlink_to("gone"), "latest cannot be read"),
    ],
    ids=["foo", "1.5", "nothing", "5000 digits", "300 digits", "empty", "a folder", "a lost link"],
)
def test_a_damaged_pointer_is_never_taken_for_no_checkpoint(
    damage: Callable[[Path], None], complaint: str, tmp_path: Path
) -> None:
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=complaint):
        latest_iteration(tmp_path)


def test_another_forward_is_refused_unless_it_is_allowed_and_then_it_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = forward_record()
    saved = {
        "format_version": FORMAT_VERSION,
        "base": {"fingerprint": "f"},
        "adapter": {"rank": 4},
        "forward": now | {"mode": "w8a8"},
    }
    expected = {"base": {"fingerprint": "f"}, "adapter": {"rank": 4}, "forward": now}
    with pytest.raises(
        CheckpointError, match=r"forward\.mode: checkpoint has 'w8a8'.*--allow-forward-change"
    ):
        check_agrees(tmp_path, saved, expected)
    check_agrees(tmp_path, saved, expected | {"forward": ANY_FORWARD})
    assert "goes on with" in caplog.text
    # What is allowed is another forward, not another base.
    with pytest.raises(CheckpointError, match=r"base\.fingerprint"):
        check_agrees(
            tmp_path, saved, expected | {"forward": ANY_FORWARD, "base": {"fingerprint": "g"}}
        )


def test_many_differences_are_a_table_of_both_sides(tmp_path: Path) -> None:
    saved = {
        "format_version": FORMAT_VERSION,
        "base": {"fingerprint": "f"},
        "adapter": {
            "rank": 4,
            "alpha": 8.0,
            "lora_target_modules": ["*.q_a_proj"],
            "glm52_lora_scope": "moe",
        },
        "forward": forward_record(),
    }
    now = {
        "rank": {"default": 8},
        "alpha": 16.0,
        "glm52_lora_scope": "all",
        "export_format": "hf_peft",
    }
    with pytest.raises(CheckpointError) as refused:
        check_agrees(tmp_path, saved, saved | {"adapter": now})
    assert str(refused.value).splitlines() == [
        f"{tmp_path} is of another run: ",
        "  setting                      checkpoint      this run",
        "  adapter.alpha                8.0             16.0",
        "  adapter.lora_target_modules  ['*.q_a_proj']  -",
        "  adapter.rank                 4               {'default': 8}",
        "resume with the same base and adapter config, or in another directory",
    ]
