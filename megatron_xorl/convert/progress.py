"""How far a conversion is: a bar with bytes a second and the time left on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["Reporter", "shown_bytes"]

_LINE_SECONDS = 30.0


class Reporter:
    """Counts bytes from any thread and shows them on stderr.

    Args:
        label: what is being done.
        total: bytes that it takes, those of an earlier run included.
        done: bytes that an earlier run did.
    """

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        self.label, self.total, self.done = label, total, done
        self._first = done
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(label, total=total, completed=done)

    def __enter__(self) -> Reporter:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()

    def advance(self, size: int) -> None:
        """Count ``size`` more bytes."""
        with self._lock:
            self.done += size
            if self._bar is not None:
                self._bar.update(self._task, completed=self.done)
            elif (now := time.monotonic()) - self._last >= _LINE_SECONDS:
                self._last = now
                print(self.line(now), file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        """Return the plain line: percent, bytes a second, time left."""
        speed = (self.done - self._first) / max(now - self._start, 1e-9)
        left = (self.total - self.done) / speed if speed else 0.0
        return (
            f"{self.label}: {self.done / max(self.total, 1):.0%} of {shown_bytes(self.total)}, "
            f"{shown_bytes(speed)}/s, {int(left) // 60} min {int(left) % 60:02d} s left"
        )


def shown_bytes(size: float) -> str:
    """Return bytes for people, in the largest unit that leaves at least one: ``4.09 GiB``, ``512.0 KiB``, ``12 bytes``."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.{2 if power >= 30 else 1}f} {unit}"
    return f"{size:.0f} bytes"
