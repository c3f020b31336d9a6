"""Is a checkpoint's folder whole? What its manifest says is compared with what is there.

The one idea: sizes, and the hashes of the small files, are compared whenever a checkpoint is opened (``.metadata``, the layout
and config.json decide which bytes are which tensor); hashes of the weights where they are asked for. A Megatron checkpoint must
have a manifest; a Hugging Face directory as downloaded has none, and then nothing is compared.

Refused: a directory that holds both forms, a conversion that has not finished, a manifest of another version, files that are
missing, of another size or content, or that the manifest leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_xorl.errors import CheckpointError, WeightsError
from megatron_xorl.weights.keys import METADATA_NAME
from megatron_xorl.weights.manifest import MANIFEST, read_manifest, verify_files

__all__ = [
    "COMMON_NAME",
    "LAYOUT_NAME",
    "PROGRESS_NAME",
    "as_weights_error",
    "is_megatron",
    "listed_files",
    "read_files",
    "refuse_unlisted",
    "weight_files",
]

PROGRESS_NAME = "progress.jsonl"
"""Stands in the output of a conversion until its manifest does."""

LAYOUT_NAME = "hf/shards.json"
"""How the Hugging Face shards were laid out that a Megatron checkpoint was made of."""

COMMON_NAME = "common.pt"
"""What Megatron keeps beside the tensors; of a base, its iteration alone."""

_WEIGHTS = (".distcp", ".safetensors")
_VERSION = 1
_NEEDED = (METADATA_NAME, "config.json", LAYOUT_NAME, COMMON_NAME)


def is_megatron(directory: Path) -> bool:
    """Whether the folder is, or was going to be, a Megatron distributed checkpoint."""
    return _sign(directory, METADATA_NAME, "metadata.json", "*.distcp") is not None


def _sign(directory: Path, *patterns: str) -> str | None:
    """Return the name of a file that tells a form, if there is one."""
    found = (path.name for pattern in patterns for path in sorted(directory.glob(pattern)))
    return next(found, None)


def _refuse_both_forms(directory: Path) -> None:
    theirs = _sign(directory, "model.safetensors.index.json", "*.safetensors")
    ours = _sign(directory, METADATA_NAME, "metadata.json", "*.distcp")
    if theirs and ours:
        raise WeightsError(
            f"{directory} holds files of two forms, {theirs} of a Hugging Face checkpoint and {ours} of a Megatron one; "
            "take the files that do not belong there out of the directory"
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
        WeightsError: see the module's list of refusals.
    """
    if not directory.is_dir():
        raise WeightsError(
            f"{directory} is not a directory; give the folder of a Hugging Face or Megatron checkpoint"
        )
    _refuse_both_forms(directory)
    if not (directory / MANIFEST).exists():
        _refuse_unfinished(directory)
        return {}
    try:
        files, known = listed_files(directory)
        heavy = weight_files(files)
        light = {name: files[name] for name in files if name not in heavy}
        verify_files(directory, light, hashes=small and known)
        verify_files(directory, heavy, hashes=weights and known)
    except CheckpointError as error:
        raise as_weights_error(error) from error
    if is_megatron(directory):
        refuse_unlisted(directory, _NEEDED, files)
    return files


def listed_files(directory: Path) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return the files of a manifest, and whether it has hashes: all of them have one then.

    Raises:
        CheckpointError: there is no manifest, it is damaged or of another version, or a file has no hash.
    """
    document = read_manifest(directory)
    version = document.get("format_version")
    if type(version) is not int or version != _VERSION:
        raise CheckpointError(
            f"{directory / MANIFEST}: format_version is {version!r}, this version of megatron-xorl reads {_VERSION}; "
            "use another iteration"
        )
    conversion, files = document.get("conversion"), document["files"]
    without = [name for name, described in files.items() if "sha256" not in described]
    # A conversion with --no-hash has no hashes at all, and says so; one that is merely absent is a fault.
    meant = isinstance(conversion, dict) and conversion.get("hashed") is False
    if without and not (meant and len(without) == len(files)):
        raise CheckpointError(
            f"{MANIFEST}: files, {without[0]!r}: sha256 is missing; use another iteration"
        )
    return files, not meant


def weight_files(files: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return those of a manifest's files that hold weights."""
    return {name: described for name, described in files.items() if name.endswith(_WEIGHTS)}


def as_weights_error(error: CheckpointError) -> WeightsError:
    """Return what a manifest's error says, with the advice that helps where there is no other iteration."""
    what = str(error).rpartition("use another iteration")[0].rstrip(";: ") or str(error)
    return WeightsError(f"{what}; copy or convert the checkpoint again")


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


def _refuse_unfinished(directory: Path) -> None:
    if (directory / PROGRESS_NAME).exists():
        raise WeightsError(
            f"{directory} is an unfinished conversion; run the command that makes it again, it continues where it stopped"
        )
    if is_megatron(directory):
        raise WeightsError(
            f"{directory} has no {MANIFEST}: it was not finished or was not made by `megatron-xorl import`; import it again"
        )
