"""The child's side of tests/worlds.py: one rank of a world, forked from the preloaded server.

It lives apart so that a child imports nothing it does not need.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankJob:
    """What one rank has to run, and where it leaves its result and its output."""

    module: str
    source: str | None
    qualname: str
    args: bytes
    rank: int
    world_size: int
    folder: str
    environment: dict[str, str] = field(repr=False)
    process_group: bool

    def path(self, kind: str) -> Path:
        """Return this rank's file of a kind: ``result``, ``failure`` or ``log``."""
        return Path(self.folder) / f"{kind}.{self.rank}"


def run_rank(job: RankJob) -> None:
    """Run one rank and leave a ``result`` file, or a ``failure`` file and exit status 1."""
    os.setpgid(0, 0)  # so that whatever this rank starts can be ended with it
    os.environ.clear()
    os.environ.update(job.environment)
    _redirect_output(job)
    try:
        result = _call(job)
        _write(job.path("result"), pickle.dumps(result))
    except BaseException as error:
        _write(job.path("failure"), _describe(error))
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)


def load_function(module: str, source: str | None, qualname: str) -> Any:
    """Return a module-level function by module name, or by the path of the file that defines it."""
    if source is None:
        found: Any = importlib.import_module(module)
    else:
        name = f"world_{Path(source).stem}"
        spec = importlib.util.spec_from_file_location(name, source)
        found = importlib.util.module_from_spec(spec)
        sys.modules[name] = found
        spec.loader.exec_module(found)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _call(job: RankJob) -> Any:
    import torch

    torch.set_num_threads(1)
    if job.process_group:
        import torch.distributed as dist

        store = dist.FileStore(f"{job.folder}/store", job.world_size)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size)
    function = load_function(job.module, job.source, job.qualname)
    args, kwargs = pickle.loads(job.args)
    return function(*args, **kwargs)


def _redirect_output(job: RankJob) -> None:
    log = open(job.path("log"), "wb", buffering=0)  # noqa: SIM115 - stays open as long as the process
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)


def _describe(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        exception = pickle.dumps(error)
        pickle.loads(exception)
    except Exception:  # what cannot be pickled travels as text
        exception = None
    return pickle.dumps((time.monotonic(), exception, text))


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_bytes(content)
    temporary.rename(path)
