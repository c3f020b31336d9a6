"""What a conversion is made of: its options, and every file of the source by size, time of change and content.

The one idea: an output may be continued, or taken for done, if the same options and the same source would give it. Options, names
and sizes are compared at once, and so is the content of the small files, which decide what is written. A weight file of the same
size and another time of change (a copy, a ``touch``) is hashed again and compared with the hash that it had when it was read.

Refused, by option or file: anything that differs, and another time of change of a file that was used without keeping its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_xorl.weights.manifest import file_sha256

__all__ = ["Hashes", "Origin", "look"]

Hashes = dict[str, str | None]
"""SHA-256 of weight files of the source by name; None of one that was used and not hashed."""


class Origin(NamedTuple):
    """Where an output comes from.

    ``options`` holds what was asked for: ``verb``, ``dtype``, ``quantize``, ``hashed``; ``files`` has ``size`` and ``time`` (of
    change, ns) of every file of the source when it was first looked at, and ``sha256`` of those without weights.
    """

    directory: Path
    options: dict[str, Any]
    files: dict[str, dict[str, Any]]

    def document(self, hashes: Hashes | None = None) -> dict[str, Any]:
        """Return what a journal or manifest says of it, with the hashes of weight files that are known."""
        known = {name: {"sha256": value} for name, value in (hashes or {}).items() if value}
        files = {name: file | known.get(name, {}) for name, file in self.files.items()}
        return {**self.options, "source": files}

    def differs(self, before: Mapping[str, Any]) -> str | None:
        """Say in what ``before``, a :meth:`document`, is of another conversion; times of weight files do not count here."""
        for name, value in self.options.items():
            if before.get(name) != value:
                return _option(name, before.get(name), value)
        files = before.get("source")
        if not isinstance(files, dict) or not all(isinstance(f, dict) for f in files.values()):
            return "it does not say of which source it is"
        for name in sorted(files.keys() ^ self.files.keys()):
            return f"{name} {'is no file' if name in files else 'is a new file'} of the source now"
        for name, now in self.files.items():
            old = files[name]
            if old.get("size") != now["size"]:
                return f"{name} of the source had {old.get('size')} bytes and has {now['size']}"
            if "sha256" in now and old.get("sha256") != now["sha256"]:
                return f"{name} of the source has other content than it had (SHA-256 differs)"
        return None

    def changed(
        self,
        before: Mapping[str, Mapping[str, Any]],
        hashes: Hashes,
        advance: Callable[[int], None] | None = None,
    ) -> str | None:
        """Say which weight file is not what it was.

        Args:
            before: ``files`` of then.
            hashes: of the weight files that were used; others may change.
            advance: told the bytes that are hashed, as they are.
        """
        for name in self.touched(before):
            if name not in hashes:
                continue
            if hashes[name] is None:
                return f"{name} of the source has another time of change, and no hash of it was kept to compare"
            if file_sha256(self.directory / name, advance) != hashes[name]:
                return f"{name} of the source has other content than it had (SHA-256 differs)"
        return None

    def touched(self, before: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the weight files whose time of change is another."""
        heavy = [name for name, file in self.files.items() if "sha256" not in file]
        return [name for name in heavy if before[name].get("time") != self.files[name]["time"]]


def look(
    directory: Path, options: dict[str, Any], weights: Iterable[str], small: Iterable[str]
) -> Origin:
    """Look at the source: sizes and times of all its files, content of the small ones."""
    held = {name: _described(directory / name) for name in weights if (directory / name).exists()}
    for name in small:
        if (directory / name).is_file():
            held[name] = _described(directory / name) | {"sha256": file_sha256(directory / name)}
    return Origin(directory, options, dict(sorted(held.items())))


def _described(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {"size": found.st_size, "time": found.st_mtime_ns}


def _option(name: str, before: Any, now: Any) -> str:
    """An option as it is written on the command line."""
    if name == "verb":
        return f"it is of `{before}`, and this is `{now}`"
    flag = {"hashed": "--no-hash"}.get(name, f"--{name}")
    if not isinstance(now, bool):
        return f"it has {flag} {before}, and this has {flag} {now}"
    used = now if name != "hashed" else not now
    return f"{flag} was {'not given' if used else 'given'} then and is {'given' if used else 'not given'} now"
