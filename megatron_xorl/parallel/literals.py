"""Change a string literal inside a named function, in place.

Megatron writes its device into the code: ``torch.zeros(1, device='cuda')``, ``param.type() == 'torch.cuda.FloatTensor'``.
Python keeps such literals in the function's code object, so they can be exchanged there once: the function keeps its
identity (names imported elsewhere see the change), every thread sees it, and a call costs exactly what it cost before.
A mode or a wrapper that looks at every tensor call would cost microseconds on each of them.

Refuses to change a function that does not hold the literal: then the installed version is not the one described.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

from megatron_xorl.errors import PlatformError

__all__ = ["exchange_literals", "holds_literal", "resolve"]


def resolve(path: str) -> Any:
    """Return the object that ``package.module:Class.attribute`` names; raises PlatformError if there is none."""
    module_name, _, attributes = path.partition(":")
    try:
        found = importlib.import_module(module_name)
        for attribute in filter(None, attributes.split(".")):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise PlatformError(
            f"{path} was not found in the installed packages ({error}); expected it to exist in "
            "megatron-core 0.19.2 and torch 2.14; install these versions"
        ) from error
    return found


def holds_literal(path: str, literal: str) -> bool:
    """Say whether the function that ``path`` names, or one nested in it, holds the string ``literal``."""
    return _count(_function(path).__code__, literal) > 0


def exchange_literals(path: str, changes: Mapping[str, str]) -> None:
    """Replace each key of ``changes`` by its value in the code of the function that ``path`` names.

    Raises PlatformError if the function holds none of the keys and none of the values.
    """
    function = _function(path)
    found = [old for old in changes if _count(function.__code__, old)]
    if not found and not any(_count(function.__code__, new) for new in changes.values()):
        raise PlatformError(
            f"{path} holds none of the literals {sorted(changes)}; expected the code of megatron-core 0.19.2; "
            "install that version"
        )
    if found:
        function.__code__ = _exchange(function.__code__, changes)


def _function(path: str) -> FunctionType:
    found = resolve(path)
    # A class method's function lies behind the bound method.
    function = inspect.unwrap(getattr(found, "__func__", found))
    if not isinstance(function, FunctionType):
        raise PlatformError(
            f"{path} is a {type(function).__name__}; expected a Python function as in megatron-core 0.19.2; "
            "install that version"
        )
    return function


def _count(constant: Any, literal: str) -> int:
    if isinstance(constant, CodeType):
        return sum(_count(inner, literal) for inner in constant.co_consts)
    if isinstance(constant, tuple | frozenset):
        return sum(_count(inner, literal) for inner in constant)
    return int(isinstance(constant, str) and constant == literal)


def _exchange(constant: Any, changes: Mapping[str, str]) -> Any:
    if isinstance(constant, CodeType):
        inner = tuple(_exchange(inner, changes) for inner in constant.co_consts)
        return constant.replace(co_consts=inner)
    if isinstance(constant, tuple | frozenset):
        return type(constant)(_exchange(inner, changes) for inner in constant)
    return changes.get(constant, constant) if isinstance(constant, str) else constant
