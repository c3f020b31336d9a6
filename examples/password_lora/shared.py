"""What the scripts of this folder share: where things are, commands that are printed as they run, and a folder of one's own.

The one idea: a script that writes takes a folder for itself and marks it. Refused: a folder with content and without the mark,
since what is in it may be somebody's.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOB = Path("examples/password_lora")
PYTHON = Path(sys.executable)
if PYTHON.is_relative_to(ROOT):
    PYTHON = PYTHON.relative_to(ROOT)
PROGRAM = PYTHON.with_name("megatron-xorl")
TORCHRUN = PYTHON.with_name("torchrun")
START = time.monotonic()


class CommandError(Exception):
    """A command of the job did not end as it must."""


def claim(folder: Path, mark: str, owner: str, note: str) -> None:
    """Make ``folder`` with a file ``mark`` in it that says ``note``; one that has the mark already is taken as it is.

    Raises:
        FileExistsError: the folder holds something and has no mark, or is a file or a link; it is left as it is.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise FileExistsError(f"{folder} is not a plain folder; move it, then start again")
    marked = (folder / mark).is_file()
    if folder.exists() and any(folder.iterdir()) and not marked:
        raise FileExistsError(
            f"{folder} has no file {mark}, so what is in it may be yours and stays; {owner}"
            f" needs this name for itself: move or remove {folder}, then start again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not marked:
        (folder / mark).write_text(f"{note}\n")


def execute(words: Sequence[object], log: Path, codes: tuple[int, ...] = (0,)) -> str:
    """Run a command, its stderr to the log; returns its stdout."""
    announce(words)
    with open(log, "a") as stream:
        done = subprocess.run(
            list(map(str, words)), stdout=subprocess.PIPE, stderr=stream, text=True
        )
        stream.write(done.stdout)
    if done.returncode not in codes:
        raise CommandError(f"exit code {done.returncode} of {spelled(words)}")
    return done.stdout


def announce(words: Sequence[object]) -> None:
    """Print a command exactly as it runs in the project's root."""
    say(f"$ {spelled(words)}")


def spelled(words: Sequence[object]) -> str:
    """The command, word for word, quoted for a shell."""
    return shlex.join(map(str, words))


def set_words(settings: Sequence[str]) -> list[str]:
    """The settings as words of a command."""
    return [word for text in settings for word in ("--set", text)]


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - START:4.0f} s] {text}", flush=True)


def log_end(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def folder_bytes(folder: Path, pattern: str = "*") -> int:
    """Bytes of the files of a folder that match."""
    return sum(file.stat().st_size for file in folder.glob(pattern) if file.is_file())
