"""Which checkpoint a run resumes from, and whether it is this run's: decided from small files alone.

A root holds ``iter_0000040/`` directories and ``latest``, one line of text. This module reads those and manifests, in any
process, before anything is built; :mod:`megatron_xorl.training.checkpoint` reads and writes the tensors.

A save over an existing iteration moves the old directory aside (``.replaced``) before the new one takes its name. A writer
that is killed in between leaves the old one there, and :func:`checkpoint_directory` finds it.

Refused: a pointer that is no iteration, another base, other adapters, another forward mode, another format version.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import CheckpointError
from megatron_xorl.fp8.engine import forward_record
from megatron_xorl.weights.manifest import MANIFEST

__all__ = [
    "ANY_FORWARD",
    "FORMAT_VERSION",
    "LATEST",
    "MAY_CHANGE",
    "check_agrees",
    "check_version",
    "checkpoint_directory",
    "iteration_directory",
    "latest_iteration",
    "run_identity",
]

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
LATEST = "latest"
REPLACED = ".replaced"
UNFINISHED = (REPLACED, ".partial")
ANY_FORWARD: dict[str, Any] = {}
"""In the place of a run's ``forward``: a checkpoint of any mode and backend may be resumed (``--allow-forward-change``)."""

MAY_CHANGE = ("glm52_lora_scope", "frozen_factors", "allow_nonzero_frozen", "export_format")
"""Adapter keys that a resume may change: what trains (``training.scope_change`` decides), and how files are written."""

IN_A_LINE = 2  # differences that a message tells in its sentence; more are a table

MAX_DIGITS = 15  # of an iteration; more is damage, and no file name can hold hundreds


def run_identity(base_fingerprint: str, adapter: AdapterConfig, seed: int) -> dict[str, Any]:
    """What a checkpoint of a run must agree with, value by value, to be resumed: ``base``, ``adapter`` and ``forward``."""
    return {
        "base": {"fingerprint": base_fingerprint},
        "adapter": adapter.to_dict() | {"seed": seed},
        "forward": forward_record(),
    }


def iteration_directory(root: Path, iteration: int) -> Path:
    """``<root>/iter_0000040``."""
    return root / f"iter_{iteration:07d}"


def checkpoint_directory(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies: under its name, or moved aside by a save that was killed."""
    final = iteration_directory(root, iteration)
    replaced = final.with_name(final.name + REPLACED)
    return replaced if not final.exists() and (replaced / MANIFEST).is_file() else final


def latest_iteration(root: Path) -> int | None:
    """Iteration that ``<root>/latest`` names, or None when nothing was ever saved there.

    The very first save may be killed between naming its directory and writing ``latest``; a single complete checkpoint is
    the latest without it.

    Raises:
        CheckpointError: ``latest`` is unreadable, or there are several checkpoints and no ``latest``.
    """
    pointer = root / LATEST
    if not os.path.lexists(
        pointer
    ):  # a dangling link is a pointer that was lost, not one never written
        found = sorted(
            path.parent
            for path in root.glob(f"iter_*/{MANIFEST}")
            if path.parent.suffix not in UNFINISHED
        )
        if len(found) > 1:
            raise CheckpointError(
                f"{root} has {len(found)} checkpoints but no {LATEST} file; "
                "write the iteration to resume from into it (one line, e.g. 40)"
            )
        return _named_iteration(found[0]) if found else None
    try:
        text = pointer.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise CheckpointError(
            f"{pointer} cannot be read ({error.strerror}); expected a file with one iteration number; "
            "write the one to resume from"
        ) from error
    if not _is_iteration(text):
        raise CheckpointError(
            f"{pointer} holds {text[:40]!r}; expected one iteration number; write the one to resume from"
        )
    return int(text)


def _named_iteration(directory: Path) -> int:
    text = directory.name.removeprefix("iter_")
    if not _is_iteration(text):
        raise CheckpointError(
            f"{directory} has a manifest, but its name ends in {text[:40]!r}; expected iter_ and an iteration number such as "
            "iter_0000040; rename or remove it"
        )
    return int(text)


def _is_iteration(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def check_agrees(directory: Path, manifest: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare a manifest with what :func:`run_identity` says of this run, but for the scope, which may change.

    Raises:
        CheckpointError: another format version, or a table of every value that differs.
    """
    check_version(directory, manifest)
    rows = []
    for section in ("base", "adapter", "forward"):
        saved, wanted = manifest.get(section, {}), expected[section]
        if wanted is ANY_FORWARD:
            _note_change(directory, saved)
            continue
        rows += [
            (f"{section}.{key}", _shown(saved, key), _shown(wanted, key))
            for key in sorted(saved.keys() | wanted.keys())
            if saved.get(key) != wanted.get(key)
            and not (section == "adapter" and key in MAY_CHANGE)
        ]
    if rows:
        advice = "resume with the same base and adapter config, or in another directory"
        if rows[-1][0].startswith("forward."):
            advice = "resume with the same forward, or pass --allow-forward-change"
        shown = _sentence(rows) if len(rows) <= IN_A_LINE else f"\n{_table(rows)}\n"
        raise CheckpointError(f"{directory} is of another run: {shown}{advice}")


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "-"


def _sentence(rows: list[tuple[str, str, str]]) -> str:
    return "".join(f"{key}: checkpoint has {a}, this run has {b}; " for key, a, b in rows)


def _table(rows: list[tuple[str, str, str]]) -> str:
    """Rows under a heading, each column as wide as its longest entry."""
    lines = [("setting", "checkpoint", "this run"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in lines)


def _note_change(directory: Path, saved: dict[str, str]) -> None:
    if saved != (now := forward_record()):
        logger.warning("%s was trained with forward %s and goes on with %s", directory, saved, now)


def check_version(directory: Path, manifest: dict[str, Any]) -> None:
    """Refuse a checkpoint that another version of this package saved in another format.

    Raises:
        CheckpointError: names both versions.
    """
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has format version {version}; this version reads {FORMAT_VERSION}; use the version that saved it"
        )
