"""Open a base checkpoint of either form: a Hugging Face directory or a Megatron distributed checkpoint.

The one idea: which form a folder has is decided by one file, ``.metadata``, and everything behind this door reads by Hugging Face
name. Where a manifest lies beside the weights, it is checked: sizes always, hashes on request. A folder whose conversion has not
finished is refused in either form.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_xorl.errors import CheckpointError, WeightsError
from megatron_xorl.weights.keys import METADATA_NAME
from megatron_xorl.weights.manifest import MANIFEST, read_manifest, verify_files
from megatron_xorl.weights.reader import HfCheckpoint

if TYPE_CHECKING:
    from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint

__all__ = ["PROGRESS_NAME", "Checkpoint", "is_megatron", "open_checkpoint", "read_files"]

PROGRESS_NAME = "progress.jsonl"
"""Stands in the output of a conversion until its manifest does."""

type Checkpoint = HfCheckpoint | MegatronCheckpoint
"""Either form; both are read by Hugging Face name."""


def open_checkpoint(directory: Path | str, *, hashes: bool = False) -> Checkpoint:
    """Open a checkpoint of either form.

    Args:
        directory: of the checkpoint.
        hashes: compare the SHA-256 of every file of the manifest, which reads all of them; sizes are compared anyway.

    Raises:
        WeightsError: there is no checkpoint, it is unfinished, or it is not what its manifest says.
    """
    directory = Path(directory)
    read_files(directory, hashes=hashes)
    if not is_megatron(directory):
        return HfCheckpoint(directory)
    # torch.distributed.checkpoint takes a second to import, which Hugging Face directories need not wait for
    from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint

    return MegatronCheckpoint(directory)


def is_megatron(directory: Path) -> bool:
    """Whether the folder is, or was going to be, a Megatron distributed checkpoint."""
    return (
        any((directory / name).is_file() for name in (METADATA_NAME, "metadata.json"))
        or next(directory.glob("*.distcp"), None) is not None
    )


def read_files(directory: Path, *, hashes: bool = False) -> dict[str, dict[str, object]]:
    """Check a checkpoint against its manifest and return the files that it lists, empty where a Hugging Face directory has none.

    Raises:
        WeightsError: see :func:`open_checkpoint`.
    """
    if not directory.is_dir():
        raise WeightsError(
            f"{directory} is not a directory; give the folder of a Hugging Face or Megatron checkpoint"
        )
    if not (directory / MANIFEST).exists():
        if (directory / PROGRESS_NAME).exists():
            raise WeightsError(
                f"{directory} is an unfinished conversion; run the command that makes it again, it continues where it stopped"
            )
        if is_megatron(directory):
            raise WeightsError(
                f"{directory} has no {MANIFEST}: it was not finished or was not made by `megatron-xorl import`; import it again"
            )
        return {}
    try:
        files: dict[str, dict[str, object]] = read_manifest(directory)["files"]
        verify_files(directory, files, hashes=hashes and all("sha256" in f for f in files.values()))
    except CheckpointError as error:
        what = str(error).rpartition("; use another iteration")[0] or str(error)
        raise WeightsError(f"{what}; copy or convert the checkpoint again") from error
    return files
