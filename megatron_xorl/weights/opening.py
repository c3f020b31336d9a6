"""Open a base checkpoint of either form: a Hugging Face directory or a Megatron distributed checkpoint.

The one idea: which form a folder has is decided by one file, ``.metadata``, and everything behind this door reads by Hugging Face
name. Either form compares itself with its manifest when it is opened (``weights.completeness``).
"""

from __future__ import annotations

from pathlib import Path

from megatron_xorl.weights.checkpoint import Checkpoint
from megatron_xorl.weights.completeness import is_megatron
from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint
from megatron_xorl.weights.reader import HfCheckpoint

__all__ = ["Checkpoint", "open_checkpoint"]


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
