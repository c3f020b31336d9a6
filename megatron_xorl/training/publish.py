"""How a finished checkpoint directory gets its name, and which older ones go.

The order is the contract: files, manifest, the directory's name, ``latest``, and only then anything is removed. So there is at
every moment a checkpoint that ``latest``, or the only complete directory, leads to.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron_xorl.training.resume import LATEST, REPLACED, iteration_directory
from megatron_xorl.weights.manifest import MANIFEST

__all__ = ["publish", "retain"]


def publish(root: Path, partial: Path, final: Path, iteration: int) -> None:
    """Give the finished directory its name and point ``latest`` at it."""
    replaced = final.with_name(final.name + REPLACED)
    # Where there is no final one, an earlier save was killed here, and the one moved aside is all there is.
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(partial, final)
    pointer = root / f"{LATEST}.partial"
    with open(pointer, "w", encoding="utf-8") as stream:
        stream.write(f"{iteration}\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(pointer, root / LATEST)
    handle = os.open(root, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    shutil.rmtree(replaced, ignore_errors=True)


def retain(root: Path, newest: int, keep_last: int | None, keep_every: int | None = None) -> None:
    """Remove older checkpoints, ``latest`` never; nothing is removed without ``keep_last``.

    Args:
        root: checkpoint root.
        newest: iteration that was just saved.
        keep_last: how many of the newest stay, this one included.
        keep_every: iterations that are multiples of it stay too.
    """
    if keep_last is None:
        return
    complete = {
        int(text): path
        for path in root.glob("iter_*")
        if (text := path.name.removeprefix("iter_")).isdigit() and (path / MANIFEST).is_file()
    }
    newer = sorted(iteration for iteration in complete if iteration != newest)
    kept = {newest, *newer[max(0, len(newer) - (keep_last - 1)) :]}
    for iteration in newer:
        if iteration in kept or (keep_every and iteration % keep_every == 0):
            continue
        if complete[iteration] != iteration_directory(root, newest):
            shutil.rmtree(complete[iteration])
