"""PEFT's ``rank_pattern`` and ``alpha_pattern``: a regular expression on the end of a name, the first that matches wins."""

from __future__ import annotations

import re
from typing import Any

from megatron_xorl.errors import AdapterError

__all__ = ["pattern_value"]


def pattern_value(patterns: object, name: str, default: Any) -> Any:
    """Return the value that ``patterns`` gives the module or parameter ``name``, or ``default``.

    Raises:
        AdapterError: the patterns are no table, or one is no regular expression.
    """
    if patterns is None:
        return default
    if not isinstance(patterns, dict):
        raise AdapterError(
            f"a pattern table is {patterns!r}, expected an object of patterns and numbers in adapter_config.json"
        )
    exact = re.escape(name)
    for pattern, value in patterns.items():
        if pattern in (name, exact):
            return value
    for pattern, value in patterns.items():
        if _is_other_name(pattern):
            continue
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as error:
            raise AdapterError(
                f"adapter_config.json: pattern {pattern!r} is no regular expression ({error})"
            ) from None
    return default


def _is_other_name(pattern: str) -> bool:
    """Whether a pattern is a plain full name, which only itself matches: a file of this package has one a target."""
    plain = pattern.replace("\\.", ".")
    return plain.startswith("model.layers.") and re.fullmatch(r"[\w.]+", plain) is not None
