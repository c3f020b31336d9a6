"""Conversion against ``cp`` of the same bytes on the same disk in the same run: bytes a second, and peak memory of the converter.

    python tests/bench/conversion.py --size 4GiB --dir /some/disk [--workers 1] [--no-hash]

How the page cache is accounted: before every measurement the pages of the source are given back to the system
(``posix_fadvise(DONTNEED)``, no privilege needed), so both sides read from the disk; both end when every written byte is on it
(``cp``, then fsync of every copy; a conversion syncs each file before it gives it its name). ``cp`` runs before and after each
conversion and the mean counts, since a shared disk changes its speed from minute to minute. Peak memory is ``ru_maxrss`` of the
converting process as the kernel counts it (what ``/usr/bin/time -v`` prints), mapped file pages included. Rates are of the
conversion itself, imports of torch left out, and of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
    parser.add_argument("--no-hash", action="store_true")
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
        measure("import", source, root / "megatron", flags, limit)
        measure("export", root / "megatron", root / "back", flags, limit)
        same = all(
            (source / path.name).read_bytes() == path.read_bytes()
            for path in (root / "back").glob("*.safetensors")
        )
        print(f"round trip byte for byte: {same}")
    finally:
        shutil.rmtree(root)


def measure(verb: str, source: Path, out: Path, flags: list[str], limit: int) -> None:
    """Run one direction between two copies and print rates, ratio and peak memory."""
    before = copy_rate(source)
    report, wall, peak = convert(verb, source, out, flags)
    after = copy_rate(source)
    copied = (before + after) / 2
    rate = report["bytes"] / report["seconds"]
    print(
        f"{verb}: {rate / 2**20:.0f} MiB/s ({report['bytes'] / wall / 2**20:.0f} with imports), cp {copied / 2**20:.0f} MiB/s "
        f"({before / 2**20:.0f}, {after / 2**20:.0f}), ratio {rate / copied:.2f} (want >= 0.70); "
        f"peak {peak / GIB:.2f} GiB (want <= {limit / GIB:.2f})"
    )


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


def convert(verb: str, source: Path, out: Path, flags: list[str]) -> tuple[dict, float, int]:
    """Run the command in a process of its own; return its report, wall seconds and peak resident bytes."""
    forget(source)
    command = [sys.executable, "-m", "megatron_xorl.cli", verb, str(source), str(out), "--json"]
    start = time.perf_counter()
    child = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE)
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{verb} failed")
    return json.loads(text), time.perf_counter() - start, usage.ru_maxrss * 1024


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
