"""Strict field types for configurations written by hand.

The one idea: a value either means exactly one thing or is refused with the field's name. ``1e-4``
is a string to YAML 1.1 and is read as the number it looks like; ``on`` is a boolean to YAML and is
refused where a word was expected; a key nobody knows is refused with the nearest one that exists.
pydantic does the walking, this file does the wording.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from megatron_xorl.errors import ConfigError, nearest

__all__ = [
    "Flag",
    "Number",
    "NumberAsGiven",
    "StrictModel",
    "Text",
    "Whole",
    "did_you_mean",
    "one_of",
    "raise_config_error",
    "show",
    "whole",
]


MOST_BITS = 64
"""Of a whole number: nothing here counts further, and what uses it could not hold it."""
LONGEST_SHOWN = 80
"""Letters of a value in a message."""


def show(value: object) -> str:
    """Return ``value`` as a message should show it, saying so when it is a YAML boolean."""
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()} (YAML reads unquoted on/off, yes/no and true/false so)"
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known name, or an empty string."""
    close = nearest(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def whole(value: object) -> int:
    """Return ``value`` as a whole number; a numeric string counts, a boolean does not (ValueError)."""
    number = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = _float_or_none(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"found {show(value)}, expected a whole number")
    if number.bit_length() > MOST_BITS:
        raise ValueError(f"found {show(number)}, expected at most {MOST_BITS} bits")
    return number


def _number(value: object) -> float:
    return float(_as_given(value))


def _as_given(value: object) -> int | float:
    number = _float_or_none(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not _finite(number):
        raise ValueError(f"found {show(value)}, expected a finite number")
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else number


def _finite(number: float) -> bool:
    """Whether ``number`` is a finite float; a whole number may be too large for one."""
    return abs(number) <= sys.float_info.max


def _float_or_none(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"found {show(value)}, expected a non-empty string; put it in quotes")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"found {show(value)}, expected true or false")
    return value


def one_of(values: Iterable[str], synonyms: Mapping[str, str] | None = None) -> BeforeValidator:
    """Return a validator that admits exactly ``values`` and, through ``synonyms``, other spellings of them."""
    allowed, other = tuple(values), dict(synonyms or {})

    def check(value: object) -> str:
        if isinstance(value, str) and value in other:
            return other[value]
        if isinstance(value, str) and value in allowed:
            return value
        hint = (
            did_you_mean(value, (*allowed, *other))
            if isinstance(value, str)
            else "; put the word in quotes"
        )
        raise ValueError(f"found {show(value)}, expected one of {', '.join(allowed)}{hint}")

    return BeforeValidator(check)


Whole = Annotated[int, BeforeValidator(whole)]
Number = Annotated[float, BeforeValidator(_number)]
NumberAsGiven = Annotated[int | float, BeforeValidator(_as_given)]
"""A number that stays whole where it was given whole, so that what is written of it reads as it was written."""
Text = Annotated[str, BeforeValidator(_text)]
Flag = Annotated[bool, BeforeValidator(_flag)]


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )


def raise_config_error(
    model: type[BaseModel], error: ValidationError, also_known: Iterable[str] = ()
) -> NoReturn:
    """Raise ConfigError saying, key by key, everything pydantic refused in ``model``.

    ``also_known`` are top-level spellings accepted beside the field names; they take part in the
    nearest-name hints.
    """
    lines = [_line(model, dict(item), tuple(also_known)) for item in error.errors()]
    raise ConfigError("; ".join(dict.fromkeys(lines))) from None


def _line(model: type[BaseModel], item: dict[str, Any], also_known: tuple[str, ...]) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        known = _keys_at(model, path[:-1])
        spellings = (*known, *also_known) if len(path) == 1 else known
        return f"unknown key {key!r}{did_you_mean(path[-1], spellings)} (known here: {', '.join(sorted(known))})"
    if item["type"] == "missing":
        return f"{key} is missing"
    if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}: found {show(item['input'])}, expected a mapping{_with_keys(_keys_at(model, path))}"
    cause = item.get("ctx", {}).get("error")
    text = (
        str(cause)
        if cause is not None
        else f"found {show(item['input'])}; {item['msg'][0].lower()}{item['msg'][1:]}"
    )
    return f"{key}: {text}" if key else text


def _with_keys(keys: tuple[str, ...]) -> str:
    return f" with keys {', '.join(keys)}" if keys else ""


def _keys_at(model: type[BaseModel], path: list[str]) -> tuple[str, ...]:
    here: Any = model
    for part in path:
        fields = here.model_fields if isinstance(here, type) and issubclass(here, BaseModel) else {}
        named = {(field.alias or name): field for name, field in fields.items()}
        here = named[part].annotation if part in named else None
    if not (isinstance(here, type) and issubclass(here, BaseModel)):
        return ()
    return tuple(field.alias or name for name, field in here.model_fields.items())
