"""Run a planned conversion file by file, so that it can be killed at any moment and continued.

The one idea: the output is complete if and only if its manifest stands. Until then ``progress.jsonl`` does: its first line says
what is being converted and how, and every finished file adds a line once it is on disk (``convert.journal``). The same command on
the same source (``convert.origin``) continues behind the last line and so repeats at most the file that each worker was at; any
other content of the output directory is refused, and so is a source that changed meanwhile.

The small files that make a directory look like a checkpoint (config.json, an index, ``.metadata``) are written after the
weights, so that nothing loads half a conversion, whatever reads it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from megatron_xorl.convert.files import OutputFile, SourceFile, sync_directory
from megatron_xorl.convert.journal import Described, Journal, open_journal
from megatron_xorl.convert.origin import Hashes, Origin, look
from megatron_xorl.convert.progress import Reporter, shown_bytes
from megatron_xorl.convert.values import Block, OutputTensor, pieces
from megatron_xorl.errors import CheckpointError, MegatronXorlError, WeightsError
from megatron_xorl.weights.checkpoint import Checkpoint
from megatron_xorl.weights.completeness import PROGRESS_NAME
from megatron_xorl.weights.manifest import (
    MANIFEST,
    file_sha256,
    read_manifest,
    verify_files,
    write_manifest,
)
from megatron_xorl.weights.names import SCALE_SUFFIX

__all__ = ["Conversion", "Job", "Terminated", "run"]

log = logging.getLogger(__name__)


class Terminated(KeyboardInterrupt):
    """SIGTERM, for whoever turns the signal into an exception: a conversion stops as for Ctrl-C."""


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
    """What to convert.

    ``origin`` has the options, and the source's files when they were first looked at; ``hashes`` are those that its manifest
    gives; ``small`` are the files that follow the weights, in order: content, or a file of the source that is copied.
    """

    label: str
    out: Path
    source: Checkpoint
    hashes: dict[str, str]
    block: Block | None
    jobs: list[Job]
    small: dict[str, bytes | Path]
    origin: Origin
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
    size = sum(job.size for job in conversion.jobs)
    jobs = {job.file for job in conversion.jobs}
    names = jobs | conversion.small.keys()
    with open_journal(out, conversion.origin, jobs, names, hashed=conversion.hashed) as journal:
        try:
            done = _kept(conversion, journal.noted)
            before = sum(item["size"] for item in done.values())
            with Reporter(conversion.label, size, before) as reporter:
                files = done | _run_jobs(conversion, done, journal, reporter)
                files |= _write_small(conversion)
        except (OSError, KeyboardInterrupt, MegatronXorlError) as error:
            raise WeightsError(_stopped(conversion, error)) from error
        try:
            _refuse_changed(conversion, journal.sources)
            made = conversion.origin.document(journal.sources)
            write_manifest(out, {"format_version": 1, "conversion": made, "files": files})
        except (OSError, KeyboardInterrupt) as error:
            raise WeightsError(_stopped(conversion, error)) from error
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
    fault = _other_output(conversion, document.get("conversion"))
    if fault is not None:
        raise WeightsError(
            f"{conversion.out} holds a checkpoint already, of another source or with other options: {fault}; "
            "choose a new directory"
        )
    names = {job.file for job in conversion.jobs} | conversion.small.keys()
    if document["files"].keys() != names:
        name = min(document["files"].keys() ^ names)
        raise WeightsError(
            f"{conversion.out / MANIFEST}: files and this conversion differ in {name}; choose a new directory"
        )
    try:
        total = sum(file["size"] for file in document["files"].values())
        with Reporter(f"check {conversion.out.name}", total) as reporter:
            verify_files(
                conversion.out,
                document["files"],
                hashes=conversion.hashed,
                advance=reporter.advance,
            )
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


def _other_output(conversion: Conversion, made: Any) -> str | None:
    """Say in what a finished output is of another conversion."""
    if not isinstance(made, dict):
        return "its manifest does not say which"
    if (fault := conversion.origin.differs(made)) is not None:
        return fault
    hashes = {name: file.get("sha256") for name, file in made["source"].items()}
    return conversion.origin.changed(made["source"], hashes)


def _check_free(conversion: Conversion) -> None:
    """Refuse what cannot fit, before an hour is spent on it."""
    place = conversion.out
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise WeightsError(f"{place} is a file; choose a new directory for the output")
    missing = [job for job in conversion.jobs if not (conversion.out / job.file).exists()]
    needed = sum(job.size for job in missing) + sum(map(_small_size, conversion.small.values()))
    free = shutil.disk_usage(place).free
    if needed > free:
        raise WeightsError(
            f"{conversion.out} needs {shown_bytes(needed)} and {place} has {shown_bytes(free)} free; "
            "free space or choose another disk"
        )


def _kept(conversion: Conversion, noted: Described) -> Described:
    """Return the noted files that still are what was noted; the others are written again."""
    sizes = {job.file: job.size for job in conversion.jobs}

    def same(file: str) -> bool:
        path = conversion.out / file
        if not path.is_file() or not path.stat().st_size == noted[file]["size"] == sizes[file]:
            return False
        return not conversion.hashed or file_sha256(path, reporter.advance) == noted[file]["sha256"]

    total = sum(file["size"] for file in noted.values())
    label = f"check what an earlier run finished in {conversion.out.name}"
    with Reporter(label, total) as reporter, ThreadPoolExecutor(conversion.workers) as pool:
        good = list(pool.map(same, noted))
    for file, fine in zip(noted, good, strict=True):
        if not fine:
            log.warning("%s is not what it was when it was finished; it is written again", file)
    return {file: noted[file] for file, fine in zip(noted, good, strict=True) if fine}


def _refuse_changed(conversion: Conversion, hashes: Hashes) -> None:
    """Check that the source is what it was at the start: half of one and half of another would pass every hash."""
    before = conversion.origin
    weights = [name for name, file in before.files.items() if "sha256" not in file]
    small = before.files.keys() - set(weights)
    now = look(before.directory, before.options, weights, small)
    fault = now.differs(before.document()) or now.changed(before.files, hashes)
    if fault is not None:
        raise WeightsError(
            f"{before.directory} changed while it was converted: {fault}; {conversion.out} is incomplete and says so: "
            "remove it and convert again"
        )


def _run_jobs(
    conversion: Conversion, done: Described, journal: Journal, reporter: Reporter
) -> Described:
    """Write every file that is not done, ``workers`` at a time; the first failure stops all."""
    stop, lock = threading.Event(), threading.Lock()
    files: Described = {}
    errors: list[BaseException] = []

    def tick(size: int) -> None:
        if stop.is_set():
            raise WeightsError("stopped")
        reporter.advance(size)

    def work(job: Job) -> None:
        try:
            tick(0)
            described, sources = _write(conversion, job, tick)
            with lock:
                journal.append(job.file, described, sources)
                journal.sources.update(sources)
                files[job.file] = described
        except BaseException as error:
            errors.append(
                error
            )  # the first is the cause, those behind it say that they were stopped
            stop.set()
            raise

    with ThreadPoolExecutor(conversion.workers) as pool:
        try:
            waiting = [pool.submit(work, job) for job in conversion.jobs if job.file not in done]
            wait(waiting, return_when=FIRST_EXCEPTION)
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        stop.set()
        pool.shutdown(cancel_futures=True)
    if errors:
        raise errors[0]
    return files


def _write(
    conversion: Conversion, job: Job, tick: Callable[[int], None]
) -> tuple[dict[str, Any], Hashes]:
    """Write one file and return what the manifest says of it, and the hashes of what it was made of."""
    checkpoint = conversion.source
    parts = [part for part in job.segments if isinstance(part, OutputTensor)]
    main = {checkpoint.shard_of(part.source) for part in parts}
    sources: Hashes = dict.fromkeys(
        checkpoint.shard_of(part.source + SCALE_SUFFIX)
        for part in parts
        if part.recipe == "dequantize"
    )
    with contextlib.ExitStack() as stack:
        opened = {}
        for file in sorted(main):
            opened[file] = SourceFile(
                checkpoint.directory / file,
                conversion.hashes.get(file),
                hashed=conversion.hashed,
            )
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
        sources |= {file: source.finish() for file, source in opened.items()}
        return output.publish(), sources


def _write_small(conversion: Conversion) -> Described:
    """Write what follows the weights; before the manifest, every name and byte is on disk."""
    files, folders = {}, {conversion.out}
    for name, content in conversion.small.items():
        path = conversion.out / name
        path.parent.mkdir(exist_ok=True)
        folders.add(path.parent)
        with OutputFile(path, hashed=conversion.hashed) as file:
            for piece in [content] if isinstance(content, bytes) else _copied(conversion, content):
                file.write(piece)
            files[name] = file.publish()
    for folder in folders:
        sync_directory(folder)
    return files


def _small_size(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _copied(conversion: Conversion, path: Path) -> Iterator[bytes | memoryview]:
    """Yield a file of the source, and compare its hash where its manifest has one."""
    name = path.relative_to(conversion.source.directory).as_posix()
    source = SourceFile(path, conversion.hashes.get(name))
    try:
        yield from source.pieces(0, path.stat().st_size)
        source.finish()
    finally:
        source.close()


def _stopped(conversion: Conversion, error: BaseException) -> str:
    """One line: what happened, how much is done, and how to go on."""
    out = conversion.out
    done = sum((out / job.file).exists() for job in conversion.jobs)
    advice = "once the cause is gone the same command continues it"
    if isinstance(error, Terminated):
        what, advice = "ended by SIGTERM", "the same command continues it"
    elif isinstance(error, KeyboardInterrupt):
        what, advice = "interrupted", "the same command continues it"
    elif isinstance(error, OSError):
        where = Path(error.filename or error.filename2 or out)
        what = f"{where}: {error.strerror or error}{_space(where, error)}"
    else:
        what = str(error)
        advice = "repair the source and run the same command again, or convert with other options into another directory"
    return f"{what}; {out} is incomplete ({done} of {len(conversion.jobs)} files) and says so; {advice}"


def _space(path: Path, error: OSError) -> str:
    """Say how full the file system of a path is, where that is the error."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    place = path.resolve()
    while not place.is_mount() and place.parent != place:
        place = place.parent
    return f" (the file system at {place} has {shutil.disk_usage(place).free:,} bytes free)"
