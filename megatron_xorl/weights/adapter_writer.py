"""Write adapter directories, a factor at a time: ``adapter_config.json`` beside one safetensors file, or shards and an index.

The file holds exactly the factors that trained: A and B in pairs, no zero-size tensor, key set equal to the format's table.
Writing goes to a sibling directory, ``OUT.partial``, that is renamed when it is complete, so that nothing that loads is left of a
writer that was killed or ran out of disk; the next writer removes what a killed one left there. An existing output is refused,
and so is a sibling with anything in it that no writer makes. Memory is the factors of one bank, whatever the adapter.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from megatron_xorl.adapters.documents import adapter_document
from megatron_xorl.adapters.formats import check_size, file_entries
from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.adapters.recovery import FILE_DTYPES
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError, WeightsError
from megatron_xorl.fp8.engine import forward_record
from megatron_xorl.weights.adapter_layouts import compose_stream
from megatron_xorl.weights.tensor_stream import Slot, write_stream

__all__ = [
    "CONFIG_NAME",
    "INDEX_NAME",
    "SHARD_BYTES",
    "SPELLED",
    "STEM",
    "WEIGHTS_NAME",
    "check_output",
    "write_adapter",
]

CONFIG_NAME = "adapter_config.json"
STEM = "adapter_model"
WEIGHTS_NAME = f"{STEM}.safetensors"
INDEX_NAME = f"{STEM}.safetensors.index.json"
SHARD_BYTES = 5 * 10**9

SPELLED = {dtype: name for name, dtype in FILE_DTYPES.items()}
"""Names that safetensors gives the dtypes of factors."""


def check_output(
    out: Path, factors: Sequence[Factor], format: str, *, allow_expanded: bool = False
) -> int:
    """Return the bytes that an export will take, before anything is read or gathered.

    Raises:
        AdapterError: ``out`` exists, the format cannot hold the factors or is needlessly large, half a pair, or the disk is full.
    """
    _check_pairs(factors)
    size = check_size(factors, format, allow_expanded=allow_expanded)
    if "\0" in str(out):
        raise AdapterError(f"{str(out)!r} has a zero byte, which no path may have; check the path")
    try:
        if os.path.lexists(out):
            raise AdapterError(f"{out} exists; choose another output directory or remove it")
        _check_partial(_partial(out))
        parent = next(folder for folder in out.absolute().parents if folder.exists())
    except OSError as error:
        raise _readable(out, error) from error
    if not parent.is_dir():
        raise AdapterError(
            f"{out} cannot be made: {parent} is no folder; choose another output directory"
        )
    if (free := shutil.disk_usage(parent).free) < size:
        raise AdapterError(
            f"{parent} has {free:,} bytes free, the adapter takes {size:,}; free some space or choose another disk"
        )
    return size


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _check_partial(partial: Path) -> None:
    """Return if there is nothing but what a writer that was killed has left."""
    if not os.path.lexists(partial):
        return
    if partial.is_symlink() or not partial.is_dir():
        raise AdapterError(f"{partial} is in the way and no folder; move it away")
    for path in sorted(partial.iterdir()):
        if path.name != CONFIG_NAME and not path.name.startswith(f"{STEM}"):
            raise AdapterError(f"{partial} is in the way and holds {path.name}; move it away")


def write_adapter(
    out: Path,
    factors: Sequence[Factor],
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    adapter: AdapterConfig,
    *,
    base_model: str,
    base_fingerprint: str | None,
    format: str = "sglang_shared_outer",
    forward: Mapping[str, str] | None = None,
    max_bytes: int = SHARD_BYTES,
    allow_expanded: bool = False,
) -> Path:
    """Write an adapter directory.

    Args:
        out: directory to make; must not exist.
        factors: the factors that trained, in inventory order.
        tensors: ``(factor name, tensor of its full logical shape)`` of exactly those factors in that order, taken one by one;
            or a table of them.
        adapter: the configuration that trained them.
        base_model, base_fingerprint: the base they were trained on.
        format: ``sglang_shared_outer``, ``hf_peft`` or ``hf_peft_fused``.
        forward: mode and backend of the base's products while they trained; this installation's own by default.
        max_bytes: above this the weights are sharded with an index.
        allow_expanded: write an expanded form that is far larger than the shared one.

    Raises:
        AdapterError: see :func:`check_output`; a factor is missing, not announced or of another shape; the disk is full.
    """
    check_output(out, factors, format, allow_expanded=allow_expanded)
    document = adapter_document(
        adapter,
        factors,
        base_model=base_model,
        base_fingerprint=base_fingerprint,
        forward=forward_record() if forward is None else forward,
        format=format,
    )
    stream = tensors.items() if isinstance(tensors, Mapping) else tensors
    if isinstance(tensors, Mapping):
        _check_complete(factors, tensors)
        stream = ((factor.name, tensors[factor.name]) for factor in factors)
    entries = file_entries(factors, format)
    slots = [Slot(entry.key, SPELLED[entry.dtype], entry.shape, entry.nbytes) for entry in entries]
    composed = compose_stream(entries, _checked(factors, stream))
    partial = _partial(out)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        named = ((entry.key, tensor) for entry, tensor in composed)
        write_stream(partial, slots, named, stem=STEM, max_bytes=max_bytes)
        text = json.dumps(document, indent=2) + "\n"
        (partial / CONFIG_NAME).write_text(text, encoding="utf-8")
        os.rename(partial, out)
    except (OSError, WeightsError, AdapterError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _readable(out, error) from error
    return out


_SPACE = "free some space or choose another disk"
_REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "raise the file size limit (ulimit -f) or choose another disk",
    errno.EROFS: "choose another disk, this one is read-only",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def _readable(out: Path, error: Exception) -> AdapterError:
    if isinstance(error, AdapterError):
        return error
    if isinstance(error, OSError):
        todo = _REMEDIES.get(error.errno or 0, "check the path and its permissions")
        return AdapterError(
            f"{out} could not be written ({error.strerror or error}); nothing is left of it: {todo}"
        )
    return AdapterError(f"the adapter is incomplete: {error}")


def _checked(
    factors: Sequence[Factor], stream: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Pass a stream on that is exactly ``factors``, in order."""
    arriving = iter(stream)
    for factor in factors:
        found = next(arriving, None)
        if found is None or found[0] != factor.name:
            came = "the end" if found is None else found[0]
            raise AdapterError(
                f"the adapter is incomplete: {factor.name} is missing, {came} came in its place"
            )
        if tuple(found[1].shape) != factor.shape:
            raise AdapterError(
                f"the adapter is incomplete: {factor.name} is {list(found[1].shape)}, expected {list(factor.shape)}"
            )
        yield found
    if (surplus := next(arriving, None)) is not None:
        raise AdapterError(f"{surplus[0]} is not a factor of this adapter")


def _check_pairs(factors: Sequence[Factor]) -> None:
    sides: dict[str, str] = {}
    for factor in factors:
        sides[factor.target] = sides.get(factor.target, "") + factor.side
        if factor.numel == 0:
            raise AdapterError(
                f"the adapter is incomplete: {factor.name} is {list(factor.shape)}, which holds nothing"
            )
    for target, found in sides.items():
        if sorted(found) != ["A", "B"]:
            raise AdapterError(f"the adapter is incomplete: {target} has only lora_{found}")


def _check_complete(factors: Sequence[Factor], tensors: Mapping[str, Tensor]) -> None:
    """Name several faults at once where all tensors are at hand."""
    faults = []
    for factor in factors:
        tensor = tensors.get(factor.name)
        if tensor is None:
            faults.append(f"{factor.name} is missing")
        elif tuple(tensor.shape) != factor.shape:
            faults.append(f"{factor.name} is {list(tensor.shape)}, expected {list(factor.shape)}")
    known = {factor.name for factor in factors}
    faults += [f"{name} is not a factor of this adapter" for name in tensors if name not in known]
    if faults:
        raise AdapterError(f"the adapter is incomplete: {'; '.join(faults[:5])}")
