"""One job at a time writes a checkpoint directory.

An advisory lock on ``<root>/.lock`` is held by rank 0 for as long as its process lives, so it cannot be
left behind. A file system without locks says so and goes on: there the scheduler has to keep jobs apart.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import IO

from megatron_xorl.errors import CheckpointError

__all__ = ["hold_lock"]

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


def hold_lock(root: Path) -> IO[str]:
    """Take the lock of a checkpoint root; it is held until the returned file is closed or the process ends.

    Raises:
        CheckpointError: another process holds it.
    """
    root.mkdir(parents=True, exist_ok=True)
    file = open(root / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held for the process's life
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise CheckpointError(
            f"{root} is in use by another job (process {holder}); wait for it, stop it, or choose another checkpoint directory"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
        logger.warning(
            "%s: this file system has no locks (%s); run one job at a time here", root, error
        )
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file
