"""Conversion against ``cp`` of the same bytes on the same disk in the same run: bytes a second, peak memory, and kills.

    python tests/bench/conversion.py --size 4GiB --dir /some/disk [--kills 3] [--seed 1] [--workers 1] [--no-hash]

The first figure is of the whole command, as ``time megatron-xorl import`` sees it: start of Python and imports included. How the
page cache is accounted: before every measurement the pages of the source are given back to the system
(``posix_fadvise(DONTNEED)``, no privilege needed), so both sides read from the disk; both end when every written byte is on it
(``cp``, then fsync of every copy; a conversion syncs each file before it gives it its name). ``cp`` runs before and after each
conversion and the mean counts, since a shared disk changes its speed from minute to minute. Peak memory is the maximum
resident set size of the converting process, mapped file pages included: the line of ``/usr/bin/time -v`` where that is
installed, else ``ru_maxrss`` of the child, the same number.

``--kills N`` sends SIGKILL at N random moments of each direction, continues after each, and compares every file of the output
with that of the run that nothing disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_xorl.convert.sized import parse_size
from megatron_xorl.convert.tiny import make_tiny

GIB = 2**30


def main() -> None:
    """Print one line a direction, and the two limits of the design."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--workers", default="1")
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs of a direction, the median counts"
    )
    parser.add_argument("--no-hash", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; printed")
    arguments = parser.parse_args()
    flags = ["--workers", arguments.workers, *(["--no-hash"] if arguments.no_hash else [])]
    root = Path(tempfile.mkdtemp(prefix="conversion_", dir=arguments.dir))
    try:
        source = make_tiny(root / "hf", block=128, size=parse_size(arguments.size))
        shards = [path.stat().st_size for path in source.glob("*.safetensors")]
        limit = 2 * max(shards) + GIB
        print(
            f"{sum(shards) / GIB:.2f} GiB in {len(shards)} shards, the largest {max(shards) / GIB:.2f} GiB"
        )
        seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
        generator = random.Random(seed)
        print(f"seed of the kills: {seed}") if arguments.kills else None
        for verb, given, out in (
            ("import", source, root / "megatron"),
            ("export", root / "megatron", root / "back"),
        ):
            seconds = measure(verb, given, out, flags, limit, arguments.repeat)
            if arguments.kills:
                moments = [generator.uniform(0, seconds / 2) for _ in range(arguments.kills)]
                kill(verb, given, out, root / "killed", flags, moments)
        same = all(
            (source / path.name).read_bytes() == path.read_bytes()
            for path in (root / "back").glob("*.safetensors")
        )
        print(f"round trip byte for byte: {same}")
    finally:
        shutil.rmtree(root)


def measure(verb: str, source: Path, out: Path, flags: list[str], limit: int, repeat: int) -> float:
    """Run one direction ``repeat`` times, print the median ratio, leave the last output; returns the last run's seconds."""
    ratios = []
    for _ in range(repeat):
        shutil.rmtree(out, ignore_errors=True)
        wall, ratio = measure_once(verb, source, out, flags, limit)
        ratios.append(ratio)
    print(
        f"{verb}: median ratio of {repeat} runs {statistics.median(ratios):.2f} (want >= 0.70)",
        flush=True,
    )
    return wall


def measure_once(
    verb: str, source: Path, out: Path, flags: list[str], limit: int
) -> tuple[float, float]:
    """Run one direction between two copies, print rates, ratio and peak memory; returns seconds and ratio."""
    before = copy_rate(source)
    report, wall, peak = convert(verb, source, out, flags)
    after = copy_rate(source)
    copied = (before + after) / 2
    whole, inner = report["bytes"] / wall, report["bytes"] / report["seconds"]
    print(
        f"{verb}: whole command {whole / 2**20:.0f} MiB/s, cp {copied / 2**20:.0f} MiB/s "
        f"({before / 2**20:.0f}, {after / 2**20:.0f}), ratio {whole / copied:.2f} (want >= 0.70); without start "
        f"{inner / 2**20:.0f} MiB/s, ratio {inner / copied:.2f}; start {wall - report['seconds']:.1f} s; "
        f"peak {peak / GIB:.2f} GiB (want <= {limit / GIB:.2f})",
        flush=True,
    )
    return wall, whole / copied


def kill(
    verb: str, source: Path, whole: Path, out: Path, flags: list[str], moments: list[float]
) -> None:
    """Kill a conversion at each of ``moments`` (seconds after its start), finish it, and compare it with ``whole``."""
    journal = out / "progress.jsonl"
    for moment in moments:
        child = subprocess.Popen(command(verb, source, out, flags), stdout=subprocess.DEVNULL)
        try:
            child.wait(moment)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
        lines = journal.read_text().splitlines()[1:] if journal.exists() else []
        noted = {json.loads(line)["file"] for line in lines}
        begun = {path.name.removesuffix(".partial") for path in out.glob("*.*")}
        begun = {name for name in begun if name.endswith((".distcp", ".safetensors"))}
        print(
            f"{verb}: killed after {moment:.1f} s, {len(noted)} files done, to be done again: {len(begun - noted)}"
        )
    subprocess.run(command(verb, source, out, flags), stdout=subprocess.DEVNULL, check=True)
    same = digests(out) == digests(whole)
    print(f"{verb}: every file as without kills: {same}", flush=True)
    shutil.rmtree(out)


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file by its name."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                name = str(path.relative_to(directory))
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def copy_rate(source: Path) -> float:
    """Bytes a second of ``cp`` of the weights, from the disk and to the disk."""
    files = [path for path in source.iterdir() if path.suffix in (".safetensors", ".distcp")]
    forget(source)
    target = source.with_name("copy")
    target.mkdir()
    start = time.perf_counter()
    subprocess.run(["cp", *map(str, files), str(target)], check=True)
    for path in target.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return sum(path.stat().st_size for path in files) / seconds


def command(verb: str, source: Path, out: Path, flags: list[str]) -> list[str]:
    """The command line of one direction."""
    return [
        sys.executable,
        "-m",
        "megatron_xorl.cli",
        verb,
        str(source),
        str(out),
        "--json",
        *flags,
    ]


def convert(verb: str, source: Path, out: Path, flags: list[str]) -> tuple[dict, float, int]:
    """Run the command in a process of its own; return its report, wall seconds and peak resident bytes."""
    forget(source)
    timed = Path("/usr/bin/time")
    measured = source.parent / "time.txt"
    before = [str(timed), "-v", "-o", str(measured)] if timed.exists() else []
    start = time.perf_counter()
    child = subprocess.Popen([*before, *command(verb, source, out, flags)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{verb} failed")
    peak = usage.ru_maxrss
    if before:
        (line,) = re.findall(r"Maximum resident set size.*", measured.read_text())
        print(f"{verb}, /usr/bin/time -v: {line}")
        peak = int(line.split()[-1])
    return json.loads(text), wall, peak * 1024


def forget(directory: Path) -> None:
    """Give the pages of a directory's files back, so that the next reader reads the disk."""
    for path in directory.iterdir():
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


if __name__ == "__main__":
    main()
