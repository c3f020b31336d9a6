"""Every error this package raises on purpose.

One base class, so that a caller can catch what is ours; each error also is the standard-library type it replaces, so that
existing ``except ValueError`` code keeps working. A message says what was found, what was expected, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AdapterError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FormatError",
    "LayoutError",
    "MegatronXorlError",
    "PlatformError",
    "ReplicaError",
    "TargetError",
    "WeightsError",
    "nearest",
]


class MegatronXorlError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(MegatronXorlError, ValueError):
    """A model, adapter or run configuration that cannot be used as written."""


class TargetError(MegatronXorlError, ValueError):
    """A target entry that names nothing, too much, or only part of an expert bank."""


class FormatError(MegatronXorlError, ValueError):
    """Block-FP8 bytes that are not what the format says: grid, dtype, non-finite values."""


class WeightsError(MegatronXorlError, ValueError):
    """A base checkpoint on disk that is incomplete, damaged or of another model."""


class LayoutError(MegatronXorlError, ValueError):
    """A parallel layout that this model cannot be cut into."""


class DataError(MegatronXorlError, ValueError):
    """Training data that cannot be turned into samples."""


class AdapterError(MegatronXorlError, ValueError):
    """An adapter file, or the trainability of a factor, that breaks the adapter contract."""


class CheckpointError(MegatronXorlError, RuntimeError):
    """A training checkpoint that is missing, damaged, or of another run."""


class PlatformError(MegatronXorlError, RuntimeError):
    """Devices or installed packages that do not allow what was asked."""


class ReplicaError(MegatronXorlError, RuntimeError):
    """Ranks that hold the same factor hold different bytes of it."""


def nearest(name: str, candidates: Iterable[str], n: int = 3) -> list[str]:
    """Return up to ``n`` candidates that look most like ``name``, best first."""
    return difflib.get_close_matches(name, list(candidates), n=n, cutoff=0.4)
