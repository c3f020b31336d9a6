"""The IndexShare schedule: which layers own a DSA indexer and which reuse the indices of an earlier layer.

The one idea: a tuple of ``"full"`` and ``"shared"``, one per layer, is the only form the rest of
the package sees. A config file may write it out (``indexer_types``), as a string of F and S
(``index_topk_pattern``), or as a period (``index_topk_freq`` with ``index_skip_topk_offset``); a
written-out list wins. Refused: a wrong length, an unknown word, a schedule whose first layer is
shared (it would have nothing to share).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megatron_xorl.errors import ConfigError

__all__ = ["DEFAULT_OFFSET", "indexer_schedule", "shown"]

log = logging.getLogger(__name__)

DEFAULT_OFFSET = (
    2  # transformers 5.23 GlmMoeDsaConfig: the fallback when index_skip_topk_offset is absent
)
_LETTERS = {"F": "full", "S": "shared"}


def indexer_schedule(raw: Mapping[str, Any], layers: int, source: str) -> tuple[str, ...]:
    """Return ``"full"`` or ``"shared"`` for each of ``layers`` layers.

    Raises:
        ConfigError: the schedule has the wrong length, other words, or begins with ``"shared"``.
    """
    derived = _derived(raw, layers, source)
    written = raw.get("indexer_types")
    if written is None:
        return _validated(derived[1], layers, source, derived[0])
    if not isinstance(written, list | tuple):
        raise ConfigError(
            f"{source}: indexer_types is {shown(written)}, expected a list of {layers} words, full or shared"
        )
    types = _validated(tuple(written), layers, source, "indexer_types")
    if _says_anything(raw) and types != derived[1]:
        log.warning("%s: indexer_types and %s disagree; indexer_types is used", source, derived[0])
    return types


def _says_anything(raw: Mapping[str, Any]) -> bool:
    return any(raw.get(key) is not None for key in ("index_topk_freq", "index_topk_pattern"))


def _derived(raw: Mapping[str, Any], layers: int, source: str) -> tuple[str, tuple[Any, ...]]:
    pattern = raw.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str | list | tuple):
            raise ConfigError(
                f"{source}: index_topk_pattern is {shown(pattern)}, expected a string of {layers} letters F or S"
            )
        return "index_topk_pattern", tuple(
            _LETTERS.get(item, item) if isinstance(item, str) else item for item in pattern
        )
    freq = _count(raw, "index_topk_freq", 1, source, least=1)
    offset = _count(raw, "index_skip_topk_offset", DEFAULT_OFFSET, source, least=0)
    types = tuple(
        "full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(layers)
    )
    return f"index_topk_freq {freq} with index_skip_topk_offset {offset}", types


def _count(raw: Mapping[str, Any], key: str, default: int, source: str, least: int) -> int:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{source}: {key} is {shown(value)}, expected a whole number of at least {least}"
        )
    return value


def _validated(types: tuple[Any, ...], layers: int, source: str, key: str) -> tuple[str, ...]:
    if len(types) != layers:
        raise ConfigError(
            f"{source}: {key} has {len(types)} entries, expected one for each of the {layers} layers"
        )
    for layer, word in enumerate(types):
        if word not in ("full", "shared"):
            raise ConfigError(
                f"{source}: {key} says {shown(word)} for layer {layer}, expected full or shared (F or S in a pattern)"
            )
    if types[0] != "full":
        raise ConfigError(
            f"{source}: {key} makes layer 0 shared, but no earlier layer has indices; it must be full"
        )
    return types


def shown(value: object) -> str:
    """A value as a message shows it: long ones cut, and numbers that Python will not print named by their size."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
