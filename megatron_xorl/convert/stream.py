"""Run a planned conversion file by file, so that it can be killed at any moment and continued.

The one idea: the output is complete if and only if its manifest stands. Until then ``progress.jsonl`` does: its first line says
what is being converted and how, and every finished file adds a line once it is on disk. The same command on the same source
continues behind the last line and so repeats at most the file that each worker was at; any other content of the output
directory is refused.

The small files that make a directory look like a checkpoint (config.json, an index, ``.metadata``) are written after the
weights, so that nothing loads half a conversion, whatever reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_xorl.convert.files import PARTIAL, OutputFile, SourceFile, sync_directory
from megatron_xorl.convert.progress import Reporter
from megatron_xorl.convert.values import Block, OutputTensor, pieces
from megatron_xorl.errors import CheckpointError, MegatronXorlError, WeightsError
from megatron_xorl.weights.manifest import MANIFEST, read_manifest, verify_files, write_manifest
from megatron_xorl.weights.opening import PROGRESS_NAME, Checkpoint

__all__ = ["Conversion", "Job", "run"]

Described = dict[str, dict[str, Any]]


class Job(NamedTuple):
    """One output file: literal bytes and tensors in the order in which they are written."""

    file: str
    segments: list[bytes | OutputTensor]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(
            part.nbytes if isinstance(part, OutputTensor) else len(part) for part in self.segments
        )


class Conversion(NamedTuple):
    """What to convert: ``identity`` names source and options, ``small`` are the files that follow the weights, in order."""

    label: str
    out: Path
    source: Checkpoint
    hashes: dict[str, str]
    block: Block | None
    jobs: list[Job]
    small: dict[str, bytes]
    identity: dict[str, Any]
    workers: int
    hashed: bool


def run(conversion: Conversion) -> dict[str, Any]:
    """Convert, or continue, and return ``files`` written in all, ``resumed`` of them by an earlier run, and ``bytes``.

    Raises:
        WeightsError: the output holds something else, the source is damaged, or the disk is full; what was done is kept.
    """
    out = conversion.out
    if (out / MANIFEST).exists():
        return _finished(conversion)
    _check_free(conversion)
    out.mkdir(parents=True, exist_ok=True)
    with _journal(conversion) as (journal, done):
        size = sum(job.size for job in conversion.jobs)
        before = sum(item["size"] for item in done.values())
        with Reporter(conversion.label, size, before) as reporter:
            try:
                files = done | _run_jobs(conversion, done, journal, reporter)
                files |= _write_small(conversion)
            except (OSError, KeyboardInterrupt, MegatronXorlError) as error:
                raise WeightsError(_stopped(conversion, error)) from error
        write_manifest(
            out, {"format_version": 1, "conversion": conversion.identity, "files": files}
        )
        (out / PROGRESS_NAME).unlink()
    sync_directory(out)
    return {"files": len(files), "resumed": len(done), "bytes": size}


def _finished(conversion: Conversion) -> dict[str, Any]:
    """Accept a complete output of the same conversion."""
    try:
        document = read_manifest(conversion.out)
    except CheckpointError as error:
        raise WeightsError(
            f"{conversion.out} holds a damaged manifest; choose another output directory"
        ) from error
    if document.get("conversion") != json.loads(json.dumps(conversion.identity)):
        raise WeightsError(
            f"{conversion.out} holds a checkpoint already, of another source or other options; choose a new directory"
        )
    try:
        verify_files(conversion.out, document["files"], hashes=False)
    except CheckpointError as error:
        raise WeightsError(
            f"{str(error).rpartition('; use another iteration')[0]}; remove {conversion.out} and convert again"
        ) from error
    with contextlib.suppress(FileNotFoundError):
        (conversion.out / PROGRESS_NAME).unlink()  # killed between the manifest and this
    size = sum(job.size for job in conversion.jobs)
    return {
        "files": len(document["files"]),
        "resumed": len(document["files"]),
        "bytes": size,
    }


def _check_free(conversion: Conversion) -> None:
    """Refuse what cannot fit, before an hour is spent on it."""
    place = conversion.out
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise WeightsError(f"{place} is a file; choose a new directory for the output")
    missing = [job for job in conversion.jobs if not (conversion.out / job.file).exists()]
    needed, free = sum(job.size for job in missing), shutil.disk_usage(place).free
    if needed > free:
        raise WeightsError(
            f"{conversion.out} needs {needed / 2**30:.2f} GiB and {place} has {free / 2**30:.2f} GiB free; "
            "free space or choose another disk"
        )


@contextlib.contextmanager
def _journal(conversion: Conversion) -> Iterator[tuple[IO[str], Described]]:
    """Open ``progress.jsonl``, alone, and yield it with the files that an earlier run finished."""
    out, path = conversion.out, conversion.out / PROGRESS_NAME
    found = sorted(item.name for item in out.iterdir() if item.name != PROGRESS_NAME)
    if found and not path.exists():
        raise WeightsError(
            f"{out} is not empty (it holds {found[0]}); choose a new directory for the output"
        )
    with open(path, "a+", encoding="utf-8") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WeightsError(
                f"{out} is being written by another conversion; wait for it or choose another directory"
            ) from None
        journal.seek(0)
        done = _read_journal(conversion, journal.read())
        for item in out.glob(f"*{PARTIAL}"):
            item.unlink()
        # Written again without the line that a kill may have cut.
        journal.seek(0)
        journal.truncate()
        _append(journal, {"conversion": conversion.identity})
        for file, described in done.items():
            _append(journal, {"file": file, **described})
        sync_directory(out)
        yield journal, done


def _read_journal(conversion: Conversion, text: str) -> Described:
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    if not lines:
        return {}
    if lines[0].get("conversion") != json.loads(json.dumps(conversion.identity)):
        raise WeightsError(
            f"{conversion.out} holds an unfinished conversion of another source, or with other options; "
            "finish that one, or choose a new directory"
        )
    sizes = {job.file: job.size for job in conversion.jobs}
    done = {}
    for line in lines[1:]:
        file = line.pop("file")
        path = conversion.out / file
        if path.is_file() and path.stat().st_size == line["size"] == sizes.get(file):
            done[file] = line
    return done


def _append(journal: IO[str], line: dict[str, Any]) -> None:
    journal.write(json.dumps(line) + "\n")
    journal.flush()
    os.fsync(journal.fileno())


def _run_jobs(
    conversion: Conversion, done: Described, journal: IO[str], reporter: Reporter
) -> Described:
    """Write every file that is not done, ``workers`` at a time; the first failure stops all."""
    stop, lock = threading.Event(), threading.Lock()
    files: Described = {}

    def tick(size: int) -> None:
        if stop.is_set():
            raise WeightsError("stopped")
        reporter.advance(size)

    def work(job: Job) -> None:
        described = _write(conversion, job, tick)
        with lock:
            _append(journal, {"file": job.file, **described})
            files[job.file] = described

    with ThreadPoolExecutor(conversion.workers) as pool:
        try:
            waiting = [pool.submit(work, job) for job in conversion.jobs if job.file not in done]
            finished, _ = wait(waiting, return_when=FIRST_EXCEPTION)
            errors = [future.exception() for future in finished]
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        stop.set()
        pool.shutdown(cancel_futures=True)
    for error in errors:
        if error is not None:
            raise error
    return files


def _write(conversion: Conversion, job: Job, tick: Callable[[int], None]) -> dict[str, Any]:
    checkpoint = conversion.source
    names = {part.source for part in job.segments if isinstance(part, OutputTensor)}
    main = {checkpoint.shard_of(name) for name in names}
    with contextlib.ExitStack() as stack:
        opened = {}
        for file in main:
            opened[file] = SourceFile(checkpoint.directory / file, conversion.hashes.get(file))
            stack.callback(opened[file].close)
        output = stack.enter_context(
            OutputFile(conversion.out / job.file, hashed=conversion.hashed)
        )
        for part in job.segments:
            if isinstance(part, OutputTensor):
                for piece in pieces(part, checkpoint, opened, conversion.block):
                    output.write(piece)
                    tick(len(piece))
            else:
                output.write(part)
                tick(len(part))
        for source in opened.values():
            source.finish()
        return output.publish()


def _write_small(conversion: Conversion) -> Described:
    """Write what follows the weights; before the manifest, every name and byte is on disk."""
    files, folders = {}, {conversion.out}
    for name, content in conversion.small.items():
        path = conversion.out / name
        path.parent.mkdir(exist_ok=True)
        folders.add(path.parent)
        with OutputFile(path, hashed=conversion.hashed) as file:
            file.write(content)
            files[name] = file.publish()
    for folder in folders:
        sync_directory(folder)
    return files


def _stopped(conversion: Conversion, error: BaseException) -> str:
    """One line: what happened, how much is done, and how to go on."""
    out = conversion.out
    done = sum((out / job.file).exists() for job in conversion.jobs)
    if isinstance(error, KeyboardInterrupt):
        what = "interrupted"
    elif isinstance(error, OSError):
        where = error.filename or error.filename2 or out
        what = f"{where}: {error.strerror or error}"
    else:
        what = str(error)
    return (
        f"{what}; {out} is incomplete ({done} of {len(conversion.jobs)} files) and says so; "
        "once the cause is gone the same command continues it"
    )
