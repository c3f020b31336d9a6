"""Open a base checkpoint of either form: a Hugging Face directory or a Megatron distributed checkpoint.

The one idea: which form a folder has is decided by one file, ``.metadata``, and everything behind this door reads by Hugging Face
name. Either form compares itself with its manifest when it is opened (``weights.completeness``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.checkpoint import Checkpoint
from megatron_xorl.weights.completeness import is_megatron, read_files
from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint
from megatron_xorl.weights.reader import HfCheckpoint

__all__ = ["Checkpoint", "open_checkpoint", "refuse_all", "refuse_unreadable"]


def open_checkpoint(directory: Path | str, *, hashes: bool = False) -> Checkpoint:
    """Open a checkpoint of either form.

    Args:
        directory: of the checkpoint.
        hashes: compare the SHA-256 of the weights too, which reads all of them; sizes and small files are compared anyway.

    Raises:
        WeightsError: there is no checkpoint, it is unfinished, or it is not what its manifest says.
    """
    form = MegatronCheckpoint if is_megatron(Path(directory)) else HfCheckpoint
    return form(directory, weights=hashes)


def refuse_unreadable(*directories: Path | str) -> None:
    """Check in a moment, by names and sizes, that each directory can be a checkpoint.

    Raises:
        WeightsError: what is wrong with each of them.
    """
    errors = []
    for directory in directories:
        if not str(directory):
            errors.append(WeightsError("a path is empty, expected the folder of a checkpoint"))
            continue
        try:
            read_files(Path(directory), small=False)
        except WeightsError as error:
            errors.append(error)
    refuse_all(errors)


def refuse_all(errors: Sequence[WeightsError]) -> None:
    """Raise the errors, if there are any, as one with a line each."""
    lines = list(dict.fromkeys(map(str, errors)))
    if len(lines) == 1:
        raise errors[0]
    if lines:
        raise WeightsError("\n".join(lines)) from errors[0]
