"""Read and write adapter directories: ``adapter_config.json`` beside one safetensors file, or shards and an index above a size.

The file holds exactly the factors that trained: A and B in pairs, no zero-size tensor, key set
equal to the list it was written from. Writing goes to a sibling directory that is renamed when it
is complete; an existing output is refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_xorl.adapters.formats import PREFIX, adapter_document, file_key
from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError
from megatron_xorl.fp8.linear import FORWARD
from megatron_xorl.weights.writer import write_checkpoint

__all__ = ["CONFIG_NAME", "ITEM_BYTES", "WEIGHTS_NAME", "AdapterFile", "write_adapter"]

CONFIG_NAME = "adapter_config.json"
STEM = "adapter_model"
WEIGHTS_NAME = f"{STEM}.safetensors"
INDEX_NAME = f"{STEM}.safetensors.index.json"
SHARD_BYTES = 5 * 10**9

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of an element by the dtypes that factors may have, as safetensors spells them."""

_KEY = re.compile(
    re.escape(PREFIX) + r"(model\.layers\.\d+\.(self_attn|mlp)(\.\w+)+|lm_head)\.lora_[AB]\.weight"
)


def write_adapter(
    out: Path,
    factors: tuple[Factor, ...],
    tensors: Mapping[str, Tensor],
    adapter: AdapterConfig,
    *,
    base_model: str,
    base_fingerprint: str,
    forward: Mapping[str, str] = FORWARD,
    max_bytes: int = SHARD_BYTES,
) -> Path:
    """Write an adapter directory in ``sglang_shared_outer`` form.

    Args:
        out: directory to make; must not exist.
        factors: the factors that trained, in inventory order.
        tensors: ``{factor name: tensor of its full logical shape}``, exactly those factors.
        adapter: the configuration that trained them.
        base_model, base_fingerprint: the base they were trained on.
        forward: mode and backend of the base's products while they trained.
        max_bytes: above this the weights are sharded with an index.

    Raises:
        AdapterError: ``out`` exists, a factor is missing, half a pair, or of another shape.
    """
    if out.exists():
        raise AdapterError(f"{out} exists; choose another output directory or remove it")
    _check_complete(factors, tensors)
    document = adapter_document(
        adapter,
        factors,
        base_model=base_model,
        base_fingerprint=base_fingerprint,
        forward=forward,
    )
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    named = {file_key(factor): tensors[factor.name].contiguous() for factor in factors}
    size = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
    if size <= max_bytes:
        save_file(named, partial / WEIGHTS_NAME, metadata={"format": "pt"})
    else:
        write_checkpoint(partial, named, max_bytes=max_bytes, stem=STEM)
    (partial / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.rename(partial, out)
    return out


def _check_complete(factors: tuple[Factor, ...], tensors: Mapping[str, Tensor]) -> None:
    faults = []
    sides: dict[str, str] = {}
    for factor in factors:
        sides[factor.target] = sides.get(factor.target, "") + factor.side
        tensor = tensors.get(factor.name)
        if tensor is None:
            faults.append(f"{factor.name} is missing")
        elif tuple(tensor.shape) != factor.shape or tensor.numel() == 0:
            faults.append(f"{factor.name} is {list(tensor.shape)}, expected {list(factor.shape)}")
    faults += [
        f"{target} has only lora_{found}"
        for target, found in sides.items()
        if sorted(found) != ["A", "B"]
    ]
    faults += [
        f"{name} is not a factor of this adapter"
        for name in tensors.keys() - {factor.name for factor in factors}
    ]
    if faults:
        raise AdapterError(f"the adapter is incomplete: {'; '.join(faults[:5])}")


class AdapterFile:
    """An adapter directory on disk.

    Args:
        directory: as written by :func:`write_adapter`.

    Raises:
        AdapterError: files are missing or damaged, a tensor is no factor or of a dtype that factors do not have, or the
            directory was not written by this package.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.document = self._read_config()
        base = self.document.get("base_model_name_or_path")
        if not isinstance(base, str):
            raise AdapterError(
                f"{self.directory / CONFIG_NAME}: base_model_name_or_path is {base!r}, expected the name of the base; "
                "export the adapter again"
            )
        self.base_model: str = base
        own = self.document.get("megatron_xorl")
        if not isinstance(own, dict) or own.get("format") != "sglang_shared_outer":
            raise AdapterError(
                f"{self.directory / CONFIG_NAME} has no megatron_xorl section with format sglang_shared_outer; "
                "only adapters written by megatron-xorl can be loaded"
            )
        if not isinstance(own.get("adapter"), dict) or not isinstance(
            own.get("base_fingerprint"), str
        ):
            raise AdapterError(
                f"{self.directory / CONFIG_NAME} lacks adapter or base_fingerprint in its megatron_xorl section; "
                "export the adapter again"
            )
        self.adapter = AdapterConfig.from_dict(own["adapter"], str(self.directory / CONFIG_NAME))
        self.base_fingerprint: str = own["base_fingerprint"]
        self._files = self._locate()

    def keys(self) -> set[str]:
        """Keys of all tensors in the file or its shards."""
        return set(self._files)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """``{key: (shape, dtype as safetensors spells it)}`` of every tensor, from the headers alone."""
        found = {}
        for name in dict.fromkeys(self._files.values()):
            with safe_open(str(self.directory / name), framework="pt", device="cpu") as stream:
                for key in stream.keys():  # noqa: SIM118 - safe_open is no mapping
                    part = stream.get_slice(key)
                    found[key] = (tuple(part.get_shape()), part.get_dtype())
        return found

    def read(self, factor: Factor, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Return a factor, or the part of it given by one slice an axis.

        Raises:
            AdapterError: it is not in the file, has another shape, or holds inf or NaN.
        """
        key = file_key(factor)
        if key not in self._files:
            raise AdapterError(
                f"{self.directory} holds no {key}; it was trained with other targets or another scope"
            )
        with safe_open(
            str(self.directory / self._files[key]), framework="pt", device="cpu"
        ) as stream:
            part = stream.get_slice(key)
            if tuple(part.get_shape()) != factor.shape:
                raise AdapterError(
                    f"{key} is {part.get_shape()}, the model needs {list(factor.shape)}; it is of another base or rank"
                )
            value: Tensor = part[slices] if slices is not None else stream.get_tensor(key)
        finite = torch.isfinite(value)
        if not finite.all():
            raise AdapterError(
                f"{key} has {int((~finite).sum())} inf or NaN values of {value.numel()}, expected finite ones; "
                "export an earlier checkpoint"
            )
        return value

    def check_keys(self, factors: tuple[Factor, ...]) -> None:
        """Compare the file's keys with the factors of a model, both ways.

        Raises:
            AdapterError: lists what is missing and what is extra.
        """
        wanted = {file_key(factor) for factor in factors}
        missing, extra = sorted(wanted - self.keys()), sorted(self.keys() - wanted)
        if missing or extra:
            raise AdapterError(
                f"{self.directory} does not fit the model: {len(missing)} factors missing{_first(missing)}, "
                f"{len(extra)} extra{_first(extra)}; load it with the adapter config it was trained with"
            )

    def _read_config(self) -> dict[str, Any]:
        path = self.directory / CONFIG_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise AdapterError(
                f"{self.directory} has no {CONFIG_NAME}; give the folder of an exported adapter"
            ) from None
        except NotADirectoryError:
            raise AdapterError(
                f"{self.directory} is a file; give the folder of an exported adapter, which holds {CONFIG_NAME}"
            ) from None
        except OSError as error:
            raise AdapterError(
                f"{path} cannot be read ({error.strerror}); give the folder of an exported adapter"
            ) from error
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{path} is no JSON ({error}); export the adapter again") from error
        if not isinstance(document, dict):
            raise AdapterError(f"{path} holds no JSON object; export the adapter again")
        return document

    def _locate(self) -> dict[str, str]:
        """``{key: file name}``, every file opened once to see that it is whole."""
        names = [WEIGHTS_NAME]
        if (self.directory / INDEX_NAME).is_file():
            names = self._indexed()
        located: dict[str, str] = {}
        for name in names:
            path = self.directory / name
            try:
                with safe_open(str(path), framework="pt", device="cpu") as stream:
                    dtypes = {key: stream.get_slice(key).get_dtype() for key in stream.keys()}  # noqa: SIM118
            except Exception as error:  # safetensors raises its own type, not an OSError
                raise AdapterError(
                    f"{path} cannot be read ({error}); export the adapter again"
                ) from error
            for key, dtype in dtypes.items():
                _check_entry(path, key, dtype)
            located.update(dict.fromkeys(dtypes, name))
        return located

    def _indexed(self) -> list[str]:
        """Shards that the index names; all lie in the directory."""
        path = self.directory / INDEX_NAME
        try:
            names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise AdapterError(
                f"{path} is no index of shards (a weight_map of keys to file names); export the adapter again"
            ) from None
        if outside := [name for name in names if Path(name).name != name]:
            raise AdapterError(
                f"{path} names {outside[0]!r}, which is not a file of this index's directory; export the adapter again"
            )
        return names


def _check_entry(path: Path, key: str, dtype: str) -> None:
    if not _KEY.fullmatch(key):
        raise AdapterError(
            f"{path} holds {key}, which is no LoRA factor of this model family; export the adapter again"
        )
    if dtype not in ITEM_BYTES:
        raise AdapterError(
            f"{path}: {key} is {dtype}, expected one of {', '.join(ITEM_BYTES)}; export the adapter again"
        )


def _first(names: list[str]) -> str:
    return f" (first {names[0]})" if names else ""
