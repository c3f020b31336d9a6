"""The files of an adapter directory: its configuration, and which tensor lies in which of its weight files.

The one idea: nothing is opened that is not a plain file, and a document says each thing once; so a pipe in a file's place cannot
stop a reader, and of two values of a key none is silently taken.

Refused: pickled weights, files outside the directory, documents that are no JSON objects or write a key twice, damaged headers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_xorl.errors import AdapterError, WeightsError
from megatron_xorl.weights.adapter_writer import CONFIG_NAME, INDEX_NAME, STEM, WEIGHTS_NAME
from megatron_xorl.weights.manifest import file_fault, parse_json
from megatron_xorl.weights.shards import read_header

__all__ = ["located_tensors", "read_document"]


def read_document(directory: Path) -> dict[str, Any]:
    """Return ``adapter_config.json``.

    Raises:
        AdapterError: there is none, or it is no JSON object.
    """
    if directory.is_file():
        raise AdapterError(
            f"{directory} is a file; give the folder of an exported adapter, which holds {CONFIG_NAME}"
        )
    path = directory / CONFIG_NAME
    document = _json(
        path, f"{directory} has no {CONFIG_NAME}; give the folder of an exported adapter"
    )
    if not isinstance(document, dict):
        raise AdapterError(f"{path} holds no JSON object; export the adapter again")
    return document


def _json(path: Path, missing: str) -> Any:
    """What a document holds; ``missing`` is said where there is none."""
    fault = _fault(path)
    if fault is not None:
        said = missing if fault == "is missing" else f"{path} {fault}; export the adapter again"
        raise AdapterError(said)
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise AdapterError(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
    except ValueError as error:
        raise AdapterError(f"{path} is no JSON ({error}); export the adapter again") from error


def located_tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return ``{key: (file name, shape, dtype)}`` from the checked header of every weight file.

    Raises:
        AdapterError: a file is missing, damaged or pickled, or index and shards disagree.
    """
    names, index = [WEIGHTS_NAME], None
    if _fault(directory / INDEX_NAME) != "is missing":
        index = _index(directory)
        names = sorted(set(index.values()))
    elif not (directory / WEIGHTS_NAME).is_file():
        _refuse_pickled(directory)
    located: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for name in names:
        try:
            entries = read_header(directory / name)
        except WeightsError as error:
            raise AdapterError(
                f"{directory / name} cannot be read ({error}); export the adapter again"
            ) from error
        except OSError as error:
            raise AdapterError(
                f"{directory / name} cannot be read ({error.strerror}); check the path and its permissions"
            ) from error
        for key, entry in entries.items():
            if index is not None and index.get(key) != name:
                raise AdapterError(
                    f"{directory / name} holds {key}, which the index puts into {index.get(key)}; "
                    "export the adapter again"
                )
            located[key] = (name, entry.shape, entry.dtype)
    if index is not None and (lost := sorted(index.keys() - located.keys())):
        raise AdapterError(
            f"{directory / INDEX_NAME} names {lost[0]}, which no shard holds; export the adapter again"
        )
    return located


def _fault(path: Path) -> str | None:
    """As :func:`~megatron_xorl.weights.manifest.file_fault`; a name that cannot be followed is no file either."""
    try:
        return file_fault(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _refuse_pickled(directory: Path) -> None:
    if pickled := sorted(directory.glob(f"{STEM}*.bin")):
        raise AdapterError(
            f"{directory} has pickled weights ({pickled[0].name}); loading them would run code: save the adapter as safetensors"
        )


def _index(directory: Path) -> dict[str, str]:
    """``{key: shard}``; all shards lie in the directory."""
    path = directory / INDEX_NAME
    document = _json(path, f"{path} is missing")
    table = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(table, dict) or not table:
        raise AdapterError(
            f"{path} is no index of shards (a weight_map of keys to file names); export the adapter again"
        )
    for name in table.values():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise AdapterError(
                f"{path} names {name!r}, which is not a file of this index's directory; export the adapter again"
            )
        if not name.endswith(".safetensors"):
            raise AdapterError(
                f"{path} names {name!r}, expected a .safetensors file: pickled weights run code"
            )
    return dict(table)
