"""YAML as people write it, read strictly.

The one idea: the three traps of YAML that lose a fine-tuning run are turned into one clear line
each. An unquoted glob (``[*.mlp.experts.*]``) is an alias to YAML: we say "quote the pattern". A
key written twice keeps only its last value: we refuse it. Numbers such as ``1e-4`` arrive as
strings: the typed fields (``strict.py``) read them as numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_xorl.errors import ConfigError

__all__ = ["load_yaml", "parse_yaml"]


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(getattr(key, "value", key))
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(
                    f"line {key.start_mark.line + 1}: key {name!r} is written twice; keep one"
                )
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


def parse_yaml(text: str, source: str = "YAML text") -> Any:
    """Return the value of one YAML document.

    Raises:
        ConfigError: the text is not YAML, holds an unquoted glob, or writes a key twice. The message begins with ``source``.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    except (ValueError, OverflowError) as error:  # a date that YAML's pattern admits, 2024-99-99
        raise ConfigError(
            f"{source}: a value looks like a date or number but is none ({error}); correct it or put it in quotes"
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{source}: nested too deeply to be read; expected a few levels, flatten it"
        ) from None


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping written in the YAML file ``path``; an empty file is an empty mapping.

    Raises:
        ConfigError: as :func:`parse_yaml`; also if the file is missing or its top level is not a mapping with string keys.
    """
    file = Path(path)
    try:
        if file.exists() and not (
            file.is_file() or file.is_dir()
        ):  # reading a pipe would never end
            raise ConfigError(f"{file}: is no file; expected a YAML file")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); expected a YAML file") from None
    value = parse_yaml(text, str(file))
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(
            f"{file}: found a {type(value).__name__}, expected a mapping of names to values"
        )
    return value


def _explain(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    alias = "alias" in f"{error.context or ''} {error.problem or ''}"
    if alias:
        return f'{place}a value that begins with * is a YAML alias; quote the pattern, for example "*.mlp.experts.*"'
    return f"{place}not YAML: {error.problem or error.context}"
