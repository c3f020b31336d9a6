"""Hashes of the weights when a base is loaded: each file once a host, the ranks of the host share the work.

The one idea: no rank may hash 704 GB, and no rank can hash its slices alone, since a hash is of a whole file. Rank r of the n on
a host hashes every n-th weight file, then all ranks exchange what they found, so that all go on or all stop with one error. Hosts
are told apart because each may read a copy of its own.

Nothing is compared for a directory without manifest (as downloaded), for one whose conversion ran with ``--no-hash``, or where
:data:`VARIABLE` is set. Sizes and small files are compared when the checkpoint is opened, whatever is asked for here.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from megatron_xorl.errors import CheckpointError, WeightsError
from megatron_xorl.weights.completeness import as_weights_error, listed_files, weight_files
from megatron_xorl.weights.manifest import MANIFEST, verify_files

__all__ = ["VARIABLE", "check_weight_hashes"]

VARIABLE = "MEGATRON_XORL_NO_HASH"
"""Environment variable: ``1``, and no other text, leaves the hashes of the weights out."""

log = logging.getLogger(__name__)


def check_weight_hashes(directory: Path, hashes: bool | None = None) -> None:
    """Compare the weight files of a base with its manifest; collective where there is a process group.

    Args:
        directory: of the checkpoint.
        hashes: whether to; None asks the environment (:data:`VARIABLE`). One rank that wants to makes all of them.

    Raises:
        WeightsError: a file of any rank's share is missing or not what the manifest says; raised on every rank.
    """
    import torch.distributed as dist

    wanted = os.environ.get(VARIABLE) != "1" if hashes is None else hashes
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    peers = [(socket.gethostname(), wanted)]
    if not alone:
        peers *= dist.get_world_size()
        dist.all_gather_object(peers, (socket.gethostname(), wanted))
    if not any(want for _, want in peers):
        log.warning("%s: the hashes of the weights are not checked, as asked for", directory)
        return
    rank = 0 if alone else dist.get_rank()
    before = sum(host == socket.gethostname() for host, _ in peers[:rank])
    fault = _fault(directory, before, sum(host == socket.gethostname() for host, _ in peers))
    faults = [fault]
    if not alone:
        faults *= len(peers)
        dist.all_gather_object(faults, fault)
    if found := [text for text in faults if text is not None]:
        raise WeightsError(found[0])


def _fault(directory: Path, first: int, step: int) -> str | None:
    """Say what is wrong with every ``step``-th weight file from the ``first``."""
    if not (directory / MANIFEST).exists():
        return None
    try:
        files, known = listed_files(directory)
        heavy = weight_files(files)
        share = {name: heavy[name] for name in sorted(heavy)[first::step]}
        verify_files(directory, share, hashes=known)
    except CheckpointError as error:
        return str(as_weights_error(error))
    except OSError as error:
        return f"{error.filename or directory}: {error.strerror}; the weights cannot be checked, copy the checkpoint again"
    return None
