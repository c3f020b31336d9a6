"""Compare a checkpoint on disk with the name table, and list everything that is wrong in one error.

One run names all of it: a person with 141 shards to fetch should not learn of the faults one by
one. Headers alone are read, plus the FP8 scales (small) for non-finite values. Decided by what the
file holds, not by ``modules_to_not_convert``: an entry of that list that names no module is a
warning, but for the misspelling that the shipped checkpoints have (``indexers_proj``).
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_xorl.errors import WeightsError, nearest
from megatron_xorl.weights.names import SCALE_SUFFIX, TensorRow, rows_by_name, unmatched_entries
from megatron_xorl.weights.shards import Entry

if TYPE_CHECKING:
    from megatron_xorl.config.model import GlmConfig
    from megatron_xorl.weights.checkpoint import Checkpoint

__all__ = ["check_checkpoint", "read_headers"]

log = logging.getLogger(__name__)

_FILE_DTYPES = {"fp8": "F8_E4M3", "bf16": "BF16", "fp32": "F32"}
_SHOWN = 20
_INFINITY = 0x7F800000  # bits of fp32 infinity (IEEE 754)


def check_checkpoint(checkpoint: Checkpoint, config: GlmConfig) -> None:
    """Raise one ``WeightsError`` with every problem of ``checkpoint`` as a checkpoint of ``config``; warn on what is only odd.

    Raises:
        WeightsError: missing, truncated, empty or duplicated shards and tensors; names, shapes or dtypes that the config does
            not have; an FP8 weight without scale, a scale without FP8 weight, a grid that does not fit, a bad scale value.
    """
    entries, problems = read_headers(checkpoint)
    problems += _names(checkpoint, config)
    rows = rows_by_name(config)
    quantized = any(entry.dtype == "F8_E4M3" for entry in entries.values())
    if quantized != config.quantized and entries:
        problems.append(_one_sided(quantized))
        entries = {}  # every weight would repeat it
    for name, entry in entries.items():
        if name in rows:
            problems += _tensor(rows[name], entry, name + SCALE_SUFFIX in checkpoint)
        elif name.endswith(SCALE_SUFFIX):
            problems += _scale(checkpoint, name, entry, entries, rows)
    _warn_of_unmatched(config)
    if problems:
        raise WeightsError(_message(checkpoint, problems))


def _message(checkpoint: Checkpoint, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{checkpoint.directory}: {problems[0]}"
    shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
    more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return f"{checkpoint.directory}: {len(problems)} problems:{shown}{more}"


def read_headers(checkpoint: Checkpoint) -> tuple[dict[str, Entry], list[str]]:
    """Compare the shards of a checkpoint with its index.

    Returns:
        Entries of the tensors that lie where the index says; a line for each fault: shards that cannot be read, a name in two
        shards, and for each shard the tensors that it holds or lacks against the index.
    """
    entries: dict[str, Entry] = {}
    homes: dict[str, list[str]] = {}
    problems = []
    unreadable = set()
    for shard in checkpoint.shards():
        try:
            header = checkpoint.header(shard)
        except WeightsError as error:
            problems.append(str(error))
            unreadable.add(shard)
            continue
        for name, entry in header.items():
            homes.setdefault(name, []).append(shard)
            if name in checkpoint and checkpoint.shard_of(name) == shard:
                entries[name] = entry
    problems += _twice(homes)
    problems += _unnamed(checkpoint, homes)
    problems += _elsewhere(checkpoint, homes, unreadable)
    return entries, problems


def _twice(homes: dict[str, list[str]]) -> Iterator[str]:
    """Tensors in two shards, a line for each pair of shards."""
    by_pair: dict[tuple[str, str], list[str]] = {}
    for name, shards in homes.items():
        if len(shards) > 1:
            by_pair.setdefault((shards[0], shards[1]), []).append(name)
    for (one, other), names in by_pair.items():
        verb = "is" if len(names) == 1 else "are"
        yield f"{_first(names)} {verb} in two shards, {one} and {other}; keep one"


def _unnamed(checkpoint: Checkpoint, homes: dict[str, list[str]]) -> Iterator[str]:
    """Tensors of a shard that no index names, a line a shard."""
    by_shard: dict[str, list[str]] = {}
    for name, shards in homes.items():
        if name not in checkpoint and len(shards) == 1:
            by_shard.setdefault(shards[0], []).append(name)
    for shard, names in by_shard.items():
        yield f"{shard} holds {_first(names)}, which the index does not name; fetch the index again"


def _elsewhere(
    checkpoint: Checkpoint, homes: dict[str, list[str]], unreadable: set[str]
) -> Iterator[str]:
    """Tensors that the index puts into a shard that does not hold them, a line for each shard that does, or for none."""
    by_place: dict[tuple[str, str | None], list[str]] = {}
    for name in checkpoint.names():
        shard = checkpoint.shard_of(name)
        found = homes.get(name, [])
        if shard not in unreadable and shard not in found:
            by_place.setdefault((shard, found[0] if found else None), []).append(name)
    for (shard, other), names in by_place.items():
        told = f"the index puts {_first(names)} into {shard}, which does not hold "
        told += "it" if len(names) == 1 else "them"
        if other is None:
            yield f"{told}; fetch index and shard again"
        else:
            yield f"{told}: {other} does; the shards were exchanged or renamed, or the index is of another copy: fetch them again"


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _names(checkpoint: Checkpoint, config: GlmConfig) -> Iterator[str]:
    rows = rows_by_name(config)
    held = [name for name in checkpoint.names() if not name.endswith(SCALE_SUFFIX)]
    missing = [name for name in rows if name not in checkpoint]
    yield from _grouped("is missing", "the checkpoint is incomplete or of another model", missing)
    extra = [name for name in held if name not in rows]
    layers = tuple(
        f"model.layers.{layer}.self_attn.indexer." for layer in config.shared_indexer_layers
    )
    stray = [name for name in extra if layers and name.startswith(layers)]
    yield from _grouped(
        "lies on a layer that shares another layer's indexer",
        "remove it or correct indexer_types",
        stray,
    )
    strays = set(stray)
    unknown = [name for name in extra if name not in strays]
    close = nearest(unknown[0], missing, n=1) if unknown else []
    advice = f"did you mean {close[0]}?" if close else "config and weights are of two models"
    yield from _grouped("is no tensor of this config", advice, unknown)


def _grouped(what: str, advice: str, names: list[str]) -> Iterator[str]:
    """One line a name up to a few, else one line with the count: a lost shard takes hundreds of tensors with it."""
    if len(names) <= 4:
        yield from (f"{name} {what}: {advice}" for name in names)
    else:
        yield f"{names[0]} and {len(names) - 1} more: each {what}: {advice}"


def _one_sided(quantized: bool) -> str:
    if quantized:
        return "the weights are FP8, but config.json has no quantization_config; restore it with its weight_block_size"
    return "config.json has a quantization_config, but no weight is FP8; remove it from the config of an unquantised checkpoint"


def _tensor(row: TensorRow, entry: Entry, has_scale: bool) -> Iterator[str]:
    if entry.shape != row.shape:
        yield f"{row.hf} has shape {list(entry.shape)}, the config gives {list(row.shape)}; config and weights are of two models"
    expected = _FILE_DTYPES[row.dtype]
    if entry.dtype == "F8_E4M3" and not has_scale:
        yield f"{row.hf} is FP8 without {row.hf + SCALE_SUFFIX}; its values are unknown, fetch the shard with the scale"
    elif row.hf.endswith("e_score_correction_bias") and entry.dtype == "BF16":
        log.warning(
            "%s is bf16: its fp32 values are lost in this file and expert choice differs; use the original",
            row.hf,
        )
    elif entry.dtype != expected and {entry.dtype, expected} != {"F32", "BF16"}:
        # The loader goes by the file, whatever the config's dtype says: fp32 masters, or bf16 under a config of fp32.
        yield f"{row.hf} is {entry.dtype}, expected {expected}; convert the checkpoint with its own tool or fetch the original"


def _scale(
    checkpoint: Checkpoint,
    name: str,
    entry: Entry,
    entries: dict[str, Entry],
    rows: dict[str, TensorRow],
) -> Iterator[str]:
    weight = name.removesuffix(SCALE_SUFFIX)
    if weight not in entries:
        if weight not in checkpoint:  # else its shard has been reported already
            yield f"{name} is a scale without its weight {weight}; fetch the shard that holds it"
        return
    if entries[weight].dtype != "F8_E4M3":
        yield f"{name} is a scale, but {weight} is {entries[weight].dtype}; remove the scale or restore the FP8 weight"
        return
    row = rows.get(weight)
    if row is None or row.scale_shape is None:
        yield (
            f"{name} scales {weight}, which config.json leaves out (modules_to_not_convert) or gives in bf16; "
            "config and weights are of two models"
        )
        return
    if entry.dtype != "F32":
        yield f"{name} is {entry.dtype}, expected F32; narrower scales have lost the values"
    elif entry.shape != row.scale_shape:
        yield (
            f"{name} has grid {list(entry.shape)}, expected {list(row.scale_shape)} for {weight} {list(row.shape)}: "
            "weight_block_size does not fit the file"
        )
    else:
        bad = _bad_scales(checkpoint.raw(name))
        if bad:
            yield (
                f"{name}: {bad} of {math.prod(entry.shape)} scales are not finite and positive; "
                "the shard is damaged, fetch it again"
            )


def _bad_scales(values: bytes) -> int:
    """Count the fp32 values that are not finite and positive, by their bits: those are 1 up to the bits of infinity."""
    bits = array("I", values)
    if not bits or (min(bits) > 0 and max(bits) < _INFINITY):
        return 0
    return sum(not 0 < value < _INFINITY for value in bits)


def _warn_of_unmatched(config: GlmConfig) -> None:
    """Warn of ``modules_to_not_convert`` entries that name no module: they protect nothing."""
    if entries := unmatched_entries(config):
        log.warning(
            "quantization_config.modules_to_not_convert: %d entries name no module of the checkpoint (first: %s); what is "
            "quantised is decided by the scales in the file",
            len(entries),
            entries[0],
        )
