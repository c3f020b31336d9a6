"""Fresh worlds of N processes for tests, in a fraction of a second each.

One server process imports torch, megatron.core and megatron.training once (imports only: no operation, no thread, no
process group) and is then forked for every rank. ``run_world`` runs a function on every rank and returns the results in
rank order::

    def summed(value):                       # at module level, in the test file itself or anywhere importable
        tensor = torch.tensor(float(dist.get_rank() + value))
        dist.all_reduce(tensor)
        return tensor.item()

    def test_the_sum_is_over_all_ranks():
        assert run_world(summed, 2, 10) == [21.0, 21.0]

The child finds the function by module name, or, if that cannot be imported (pytest's importlib mode), by loading the file
that defines it; so it must stand at module level, and its arguments and results must pickle and be of importable types.
Each rank has a gloo process group already (``process_group=False``: only torchrun's environment variables), one thread,
the parent's environment and folder, and its own log, whose end is part of every error.

An exception in a rank is raised in the parent, with the rank and its traceback as a note, and the other ranks are killed.
A world that takes longer than ``timeout`` is killed and reported as WorldTimeoutError with the stack of every rank.
``start_world`` returns a handle instead, to ``kill`` single ranks and ``wait``.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait as wait_for_sentinels
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from tests.world_child import RankJob, run_rank

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "pytest",
    "megatron.core",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.training",
    "tests.world_child",
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RankError(RuntimeError):
    """A rank raised an exception that does not pickle, or ended without a result (killed, os._exit)."""


class WorldTimeoutError(TimeoutError):
    """A world did not end in time; the message holds the stack of every rank that was still running."""


def run_world(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    process_group: bool = True,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on every rank of a fresh world; return the results in rank order."""
    with start_world(
        fn, world_size, *args, process_group=process_group, env=env, **kwargs
    ) as world:
        return world.results(timeout)


def start_world(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    process_group: bool = True,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> World:
    """Start ``fn(*args, **kwargs)`` on every rank and return the handle; leaving its ``with`` block kills what runs."""
    module, source = _locate(fn)
    folder = tempfile.mkdtemp(prefix="world_")
    shared = {**os.environ, **_ONE_THREAD, **_rendezvous(world_size), **(env or {})}
    jobs = [
        RankJob(
            module=module,
            source=source,
            qualname=fn.__qualname__,
            args=pickle.dumps((args, kwargs)),
            rank=rank,
            world_size=world_size,
            folder=folder,
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            process_group=process_group,
        )
        for rank in range(world_size)
    ]
    return World(jobs)


class World:
    """N running ranks; use it as a context manager."""

    def __init__(self, jobs: list[RankJob]) -> None:
        """Fork one process a job from the preloaded server."""
        self.jobs = jobs
        self.processes = [_context().Process(target=run_rank, args=(job,)) for job in jobs]
        with _without_main_module():
            for process in self.processes:
                process.start()

    def __enter__(self) -> World:
        """Return the world itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill what still runs, whatever the ranks started included, and remove the world's files."""
        self.kill_all()
        shutil.rmtree(self.jobs[0].folder, ignore_errors=True)

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal (kill -9 by default) to one rank."""
        os.kill(self.processes[rank].pid, signal_number)

    def kill_all(self) -> None:
        """Kill every rank and every process it started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.is_alive():
                process.kill()
            process.join()

    def wait(self, timeout: float = 60.0) -> list[int]:
        """Wait until every rank has ended and return the exit codes (-9: killed); raises WorldTimeoutError."""
        self._wait_while(timeout, lambda: True)
        return [process.exitcode for process in self.processes]

    def results(self, timeout: float = 60.0) -> list[Any]:
        """Return every rank's result; raises a rank's own exception, RankError or WorldTimeoutError."""
        self._wait_while(timeout, lambda: not self._failed())
        if self._failed() or not all(job.path("result").exists() for job in self.jobs):
            self._raise_failure()
        return [pickle.loads(job.path("result").read_bytes()) for job in self.jobs]

    def log(self, rank: int) -> str:
        """Return what a rank has written to stdout and stderr so far."""
        path = self.jobs[rank].path("log")
        return path.read_text(errors="replace") if path.exists() else ""

    def _failed(self) -> list[int]:
        return [
            rank for rank, process in enumerate(self.processes) if process.exitcode not in (None, 0)
        ]

    def _wait_while(self, timeout: float, proceed: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout
        while running := [process for process in self.processes if process.exitcode is None]:
            if not proceed():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                self._raise_timeout(timeout)
            wait_for_sentinels([process.sentinel for process in running], timeout=left)

    def _raise_timeout(self, timeout: float) -> None:
        running = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                self.kill(rank, signal.SIGUSR1)  # faulthandler writes the stacks
        time.sleep(0.3)
        self.kill_all()
        stacks = "\n".join(f"--- rank {rank}\n{self.log(rank)[-4000:]}" for rank in running)
        raise WorldTimeoutError(
            f"ranks {running} of {len(self.jobs)} were still running after {timeout} s; "
            f"their output ends with their stacks:\n{stacks}"
        )

    def _raise_failure(self) -> None:
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        told = [
            (*pickle.loads(job.path("failure").read_bytes()), job.rank)
            for job in self.jobs
            if job.path("failure").exists()
        ]
        self.kill_all()
        if not told or any(code is not None and code < 0 for code in codes.values()):
            logs = "\n".join(f"--- rank {rank}\n{self.log(rank)[-2000:]}" for rank in codes)
            raise RankError(
                f"a rank of {len(self.jobs)} ended without a result; exit codes {codes} (None: still running, "
                f"negative: the signal that ended it); output ends:\n{logs}"
            )
        # The earliest: later ones are mostly its consequences.
        _, pickled, text, rank = min(told, key=lambda item: item[0])
        note = f"rank {rank} of {len(self.jobs)} raised:\n{text}"
        error = RankError(note) if pickled is None else pickle.loads(pickled)
        # An exit or an interrupt of a rank is not the parent's.
        if not isinstance(error, Exception):
            error = RankError(note)
        if not isinstance(error, RankError):
            error.add_note(note)
        raise error


def _locate(fn: Callable[..., Any]) -> tuple[str, str | None]:
    """Return the module name of a function, and its file where a fresh import of that name would not lead there."""
    if "<" in fn.__qualname__:
        raise TypeError(
            f"{fn.__qualname__} is defined inside a function; a world runs module-level functions"
        )
    source = Path(inspect.getfile(fn)).resolve()
    parts = fn.__module__.split(".")
    for folder in sys.path:
        stem = Path(folder or ".").joinpath(*parts)
        for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
            if candidate.exists():
                return fn.__module__, None if candidate.resolve() == source else str(source)
    return fn.__module__, str(source)


def _rendezvous(world_size: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _context() -> multiprocessing.context.ForkServerContext:
    """Return the forkserver context; its server is started once, with one-thread libraries."""
    context = multiprocessing.get_context("forkserver")
    from multiprocessing import forkserver

    if forkserver._forkserver._forkserver_pid is None:
        before = {name: os.environ.get(name) for name in (*_ONE_THREAD, "PYTHONPATH")}
        root = str(Path(__file__).resolve().parents[1])
        os.environ.update(
            _ONE_THREAD, PYTHONPATH=os.pathsep.join(filter(None, (root, before["PYTHONPATH"])))
        )
        context.set_forkserver_preload(list(PRELOAD))
        forkserver.ensure_running()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide ``__main__``: multiprocessing would run it again (pytest's, or a script's) in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
