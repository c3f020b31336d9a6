"""Which checkpoints stay, and that `latest` is changed after everything and before anything is removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import megatron_xorl.training.publish as product
from megatron_xorl.training.publish import publish, retain


def made(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        directory = root / f"iter_{iteration:07d}"
        directory.mkdir()
        (directory / "manifest.json").write_text("{}")


def kept(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in root.glob("iter_*"))


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expected"),
    [
        (None, None, [10, 20, 30, 40, 50, 60]),
        (None, 20, [10, 20, 30, 40, 50, 60]),
        (2, None, [50, 60]),
        (1, None, [60]),
        (1, 20, [20, 40, 60]),
        (2, 30, [30, 50, 60]),
        (9, 20, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_the_newest_and_the_multiples_stay(
    tmp_path: Path, keep_last: int | None, keep_every: int | None, expected: list[int]
) -> None:
    made(tmp_path, 10, 20, 30, 40, 50, 60)
    retain(tmp_path, 60, keep_last, keep_every)
    assert kept(tmp_path) == expected


def test_what_was_just_saved_stays_though_older_runs_left_later_iterations(tmp_path: Path) -> None:
    made(tmp_path, 40, 50, 60)
    (tmp_path / "iter_0000055").mkdir()  # unfinished: no manifest
    retain(tmp_path, 40, 2)
    assert kept(tmp_path) == [40, 55, 60]


def test_latest_changes_last_and_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, 40)
    partial = tmp_path / "iter_0000050.partial"
    partial.mkdir()
    (partial / "manifest.json").write_text("{}")
    seen: list[str] = []
    for name in ("rename", "replace"):
        original = getattr(os, name)

        def told(source: Path, target: Path, original: object = original) -> None:
            seen.append(Path(target).name)
            original(source, target)  # type: ignore[operator]

        monkeypatch.setattr(product.os, name, told)
    publish(tmp_path, partial, tmp_path / "iter_0000050", 50)
    assert seen == ["iter_0000050", "latest"]
    assert (tmp_path / "latest").read_text() == "50\n"
    retain(tmp_path, 50, 1)
    assert kept(tmp_path) == [50]
