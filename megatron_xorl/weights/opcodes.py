"""Pickle opcodes, put together by hand: what lets the files of torch be written where torch is not imported.

The one idea: a pickle names its classes by text, so naming ``torch.Size`` needs no torch. Plain values are left to Python's own
pickler, protocol 2, and joined with the opcodes around them. Pieces may follow each other in any order: a piece refers to nothing
outside itself but the :class:`Pool`. Opcodes: Python's ``pickletools``.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Pool", "call", "document", "joined", "named", "plain"]

_FIRST = 200  # memo entries from here on are the pool's; those of plain() begin at 0


def document(content: bytes) -> bytes:
    """Return the pickle of what ``content`` leaves on the stack."""
    return pickle.PROTO + b"\x02" + content + pickle.STOP


def plain(value: Any) -> bytes:
    """Return the opcodes of a number, text, None, or a tuple of them."""
    return pickle.dumps(value, 2)[2:-1]  # without protocol and stop


def named(module: str, name: str) -> bytes:
    """Return the opcodes of a class or other global."""
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def joined(parts: Iterable[bytes]) -> bytes:
    """Return the opcodes of a tuple of parts."""
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def call(function: bytes, *arguments: bytes) -> bytes:
    """Return the opcodes of a function's result, as the reader will compute it."""
    return function + joined(arguments) + pickle.REDUCE


class Pool:
    """Classes and texts that a document repeats: stated once at its begin, then named in two bytes.

    Args:
        content: opcodes by name, at most 56.
    """

    def __init__(self, content: Mapping[str, bytes]) -> None:
        places = {name: bytes([_FIRST + number]) for number, name in enumerate(content)}
        self.begin = b"".join(
            content[name] + pickle.BINPUT + place + pickle.POP for name, place in places.items()
        )
        self._get = {name: pickle.BINGET + place for name, place in places.items()}

    def __getitem__(self, name: str) -> bytes:
        """Return the opcodes that push an entry."""
        return self._get[name]

    def record(self, kind: str, **fields: bytes) -> bytes:
        """Return the opcodes of an instance of class ``kind`` with these attributes."""
        state = b"".join(self._get[name] + value for name, value in fields.items())
        new = self._get[kind] + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        return new + pickle.EMPTY_DICT + pickle.MARK + state + pickle.SETITEMS + pickle.BUILD
