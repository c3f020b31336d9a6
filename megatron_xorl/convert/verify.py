"""``megatron-xorl verify A B``: are two checkpoints the same, tensor by tensor, whatever form each has?

The one idea: both are read by Hugging Face name in pieces, so a shard here and a ``.distcp`` file there make no difference.
Bitwise, every byte, dtype and shape must agree. In value (``values=True``) FP8 weights are their code times scale in fp32, and a
pair of different dtypes is compared in the narrower one, rounded once: a bf16 export of an FP8 checkpoint is equal to it so.

Everything that differs is reported together: tensors that one side lacks, differences with place and both values, the fields in
which the configurations differ, and what is wrong with the files of a side: shards that are missing, damaged or in no index, and
tensors that index and shard disagree about. Refused: a side that is no checkpoint, unfinished, or not what its manifest says.

    megatron-xorl verify A B [--values] [--json]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.convert.comparison import Comparison, shown_number
from megatron_xorl.convert.progress import Reporter
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.check import read_headers
from megatron_xorl.weights.fingerprint import NOT_SEMANTIC
from megatron_xorl.weights.names import SCALE_SUFFIX
from megatron_xorl.weights.opening import (
    Checkpoint,
    open_checkpoint,
    refuse_all,
    refuse_unreadable,
)

__all__ = ["SHOWN", "verify"]

SHOWN = 20
"""Differences, problems and names that a report lists; all are counted."""


def verify(
    a: Path | str, b: Path | str, *, values: bool = False, hashed: bool = True
) -> dict[str, Any]:
    """Compare two checkpoints.

    Args:
        a, b: directories of either form.
        values: compare values across dtypes instead of bytes.
        hashed: also compare the files of each with the hashes of its manifest, where it has one.

    Returns:
        ``equal``; ``metrics`` (``tensors_a``, ``tensors_b``, ``compared``, ``different``, ``missing``, ``extra``, ``problems``,
        ``bytes``, and with ``values`` ``max_abs``); ``missing`` (in A alone) and ``extra`` (in B alone); ``differences``, a list
        of ``tensor``, ``what``, and for values ``index``, ``a``, ``b``, ``count``; ``problems``, a line for each fault of the
        files of one side; ``config``, the fields that differ. Numbers that JSON does not have are ``"inf"`` and ``"nan"``.

    Raises:
        WeightsError: a side is no checkpoint, unfinished, not what its manifest says, or cut while it is read.
    """
    sides = _opened(a, b, hashed)
    configs = [load_glm_config(side.directory) for side in sides]
    contents = [_contents(side) for side in sides]
    names = [_compared(held, values) for held, _ in contents]
    problems = [
        f"{side}: {line}"
        for side, (_, lines) in zip(("A", "B"), contents, strict=True)
        for line in lines
    ]
    # In the order of A's files, so that each is read once and can be let go.
    common = sorted(names[0] & names[1], key=lambda name: (sides[0].shard_of(name), name))
    comparison = Comparison(sides[0], sides[1], configs[0], configs[1], values)
    total = sum(comparison.size(name) for name in common)
    with Reporter(f"verify {Path(a).name} and {Path(b).name}", total) as reporter, comparison:
        differences = []
        for name in common:
            differences += comparison.compare(name)
            comparison.release(sides[0].shard_of(name))
            reporter.advance(comparison.size(name))
    missing, extra = sorted(names[0] - names[1]), sorted(names[1] - names[0])
    fields = _config_differences(configs[0], configs[1], values)
    metrics: dict[str, Any] = {
        "tensors_a": len(names[0]),
        "tensors_b": len(names[1]),
        "compared": len(common),
        "different": len(differences),
        "missing": len(missing),
        "extra": len(extra),
        "problems": len(problems),
        "bytes": total,
    }
    if values:
        metrics["max_abs"] = shown_number(comparison.max_abs)
    return {
        "equal": not (differences or missing or extra or problems or fields),
        "compared_as": "values" if values else "bytes",
        "metrics": metrics,
        "missing": missing[:SHOWN],
        "extra": extra[:SHOWN],
        "differences": differences[:SHOWN],
        "problems": problems[:SHOWN],
        "config": fields,
    }


def _opened(a: Path | str, b: Path | str, hashed: bool) -> list[Checkpoint]:
    """Open both sides, or raise one error with what is wrong with each; nothing is hashed before both are there."""
    refuse_unreadable(a, b)
    sides, errors = [], []
    for path in (a, b):
        try:
            sides.append(open_checkpoint(path, hashes=hashed))
        except WeightsError as error:
            errors.append(error)
    refuse_all(errors)
    return sides


def _contents(side: Checkpoint) -> tuple[set[str], list[str]]:
    """Return the names that the index gives and its shards hold, and a line for each thing that is not so."""
    entries, lines = read_headers(side)
    return set(entries), lines + list(_strays(side))


def _strays(side: Checkpoint) -> Iterator[str]:
    """Say which files look like shards of this form and are in no index."""
    named = set(side.shards())
    ends = {Path(shard).suffix for shard in named}
    for path in sorted(side.directory.iterdir()):
        if path.suffix in ends and path.name not in named:
            yield f"{path.name} is a shard that the index does not name"


def _compared(held: set[str], values: bool) -> set[str]:
    """Names to compare; scales are part of their weight's value."""
    return {name for name in held if not (values and name.endswith(SCALE_SUFFIX))}


def _config_differences(a: GlmConfig, b: GlmConfig, values: bool) -> dict[str, list[Any]]:
    """Return the fields that matter and differ, with both values; in value the block of the FP8 weights does not matter."""
    left, right = dataclasses.asdict(a), dataclasses.asdict(b)
    ignored = {*NOT_SEMANTIC, *(("weight_block_size",) if values else ())}
    return {
        field: [left[field], right[field]]
        for field in left
        if field not in ignored and left[field] != right[field]
    }
