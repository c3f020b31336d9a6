"""Open a base checkpoint of either form: a Hugging Face directory or a Megatron distributed checkpoint.

The one idea: which form a folder has is decided by one file, ``.metadata``, and everything behind this door reads by Hugging Face
name. Where a manifest lies beside the weights, it is checked: sizes and the hashes of the small files always (``.metadata``, the
layout and config.json decide which bytes are which tensor), hashes of the weights on request. A folder whose conversion has not
finished is refused in either form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_xorl.errors import CheckpointError, WeightsError
from megatron_xorl.weights.keys import METADATA_NAME
from megatron_xorl.weights.manifest import MANIFEST, read_manifest, verify_files
from megatron_xorl.weights.reader import HfCheckpoint

if TYPE_CHECKING:
    from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint

__all__ = [
    "LAYOUT_NAME",
    "PROGRESS_NAME",
    "Checkpoint",
    "is_megatron",
    "open_checkpoint",
    "read_files",
    "refuse_unlisted",
]

PROGRESS_NAME = "progress.jsonl"
"""Stands in the output of a conversion until its manifest does."""

LAYOUT_NAME = "hf/shards.json"
"""How the Hugging Face shards were laid out that a Megatron checkpoint was made of."""

_WEIGHTS = (".distcp", ".safetensors")
_NEEDED = (METADATA_NAME, "config.json", LAYOUT_NAME)

type Checkpoint = HfCheckpoint | MegatronCheckpoint
"""Either form; both are read by Hugging Face name."""


def open_checkpoint(directory: Path | str, *, hashes: bool = False) -> Checkpoint:
    """Open a checkpoint of either form.

    Args:
        directory: of the checkpoint.
        hashes: compare the SHA-256 of the weights too, which reads all of them; sizes and small files are compared anyway.

    Raises:
        WeightsError: there is no checkpoint, it is unfinished, or it is not what its manifest says.
    """
    directory = Path(directory)
    listed = read_files(directory, weights=hashes)
    checkpoint: Checkpoint
    if is_megatron(directory):
        # torch.distributed.checkpoint takes a second to import, which Hugging Face directories need not wait for
        from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint

        checkpoint = MegatronCheckpoint(directory)
    else:
        checkpoint = HfCheckpoint(directory)
    refuse_unlisted(directory, checkpoint.shards(), listed)
    return checkpoint


def is_megatron(directory: Path) -> bool:
    """Whether the folder is, or was going to be, a Megatron distributed checkpoint."""
    return (
        any((directory / name).is_file() for name in (METADATA_NAME, "metadata.json"))
        or next(directory.glob("*.distcp"), None) is not None
    )


def refuse_unlisted(directory: Path, names: Iterable[str], listed: Mapping[str, object]) -> None:
    """Check that a manifest, where there is one, lists every file that is going to be read.

    Raises:
        WeightsError: it leaves one out, so nothing says what that file must be.
    """
    missing = [name for name in names if name not in listed]
    if missing and (directory / MANIFEST).exists():
        raise WeightsError(
            f"{directory / MANIFEST}: files leaves out {missing[0]}, which the checkpoint needs; "
            "copy or convert the checkpoint again"
        )


def read_files(
    directory: Path, *, weights: bool = False, small: bool = True
) -> dict[str, dict[str, Any]]:
    """Check a checkpoint against its manifest and return the files that it lists, empty where a Hugging Face directory has none.

    Args:
        directory: of the checkpoint.
        weights: compare the SHA-256 of the weight files.
        small: compare the SHA-256 of all other files.

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
        document = read_manifest(directory)
        files: dict[str, dict[str, Any]] = document["files"]
        heavy = {name: files[name] for name in files if name.endswith(_WEIGHTS)}
        light = {name: files[name] for name in files if name not in heavy}
        # A conversion with --no-hash has no hashes at all, and says so; one that is merely absent is a fault.
        known = _hashed(document)
        verify_files(directory, light, hashes=small and known)
        verify_files(directory, heavy, hashes=weights and known)
    except CheckpointError as error:
        what = str(error).rpartition("use another iteration")[0].rstrip(";: ") or str(error)
        raise WeightsError(f"{what}; copy or convert the checkpoint again") from error
    if is_megatron(directory):
        refuse_unlisted(directory, _NEEDED, files)
    return files


def _hashed(document: dict[str, Any]) -> bool:
    """Whether a manifest has hashes; all files have one then.

    Raises:
        CheckpointError: a file has none.
    """
    conversion = document.get("conversion")
    files = document["files"]
    without = [name for name, described in files.items() if "sha256" not in described]
    meant = isinstance(conversion, dict) and conversion.get("hashed") is False
    if without and not (meant and len(without) == len(files)):
        raise CheckpointError(
            f"{MANIFEST}: files, {without[0]!r}: sha256 is missing; use another iteration"
        )
    return not meant
