"""``megatron-xorl export``: a Megatron distributed checkpoint becomes Hugging Face shards again.

The one idea: the checkpoint remembers in ``hf/shards.json`` which tensor stood in which shard and in which order, so an import
followed by an export gives back every file byte for byte. With another dtype the shards keep their names and their tensors, and
index, headers and config.json say what is in them now.

Refused: a checkpoint without manifest or with files of another size or content, a ``.metadata`` that would run code, tensors
that are missing or that its own config does not have.

    megatron-xorl export CKPT OUT [--dtype keep|bf16|fp32] [--quantize]
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.convert.directions import Task, asked, carry_out, refuse_nested
from megatron_xorl.convert.layout import RAW_INDEX_NAME, Layout, read_layout
from megatron_xorl.convert.origin import look
from megatron_xorl.convert.plan import (
    Options,
    Shard,
    header_bytes,
    index_bytes,
    output_config,
    plan_tensors,
)
from megatron_xorl.convert.stream import Job
from megatron_xorl.convert.values import OutputTensor
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.completeness import is_megatron, read_files, weight_files
from megatron_xorl.weights.manifest import MANIFEST, parse_json
from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint
from megatron_xorl.weights.writer import INDEX_NAME

__all__ = ["export_checkpoint"]


def export_checkpoint(
    source: Path | str,
    out: Path | str,
    options: Options = Options(),  # noqa: B008 - an immutable tuple
    *,
    workers: int = 1,
    hashed: bool = True,
) -> dict[str, Any]:
    """Convert a Megatron distributed checkpoint, or continue an interrupted conversion.

    Args:
        source: written by :func:`~megatron_xorl.convert.importer.import_checkpoint`.
        out: new directory, or that of the interrupted run.
        options: what is done to values; nothing by default.
        workers: files converted at the same time.
        hashed: check the hashes of the source, and write those of the output into its manifest.

    Returns:
        ``path``, ``tensors``, ``bytes``, ``files``, ``resumed``, ``seconds``, ``bytes_per_s``.

    Raises:
        WeightsError, ConfigError: see the module's list of refusals.
    """
    start = time.perf_counter()
    source, out = refuse_nested(source, out)
    if not is_megatron(source):
        read_files(source, small=False)  # an unfinished export says so
        raise WeightsError(
            f"{source} is no Megatron checkpoint; `megatron-xorl import` makes one of a Hugging Face directory"
        )
    checkpoint = MegatronCheckpoint(source, small=hashed)
    small = [MANIFEST, *(checkpoint.listed.keys() - weight_files(checkpoint.listed).keys())]
    wanted = asked("export", options, hashed)
    origin = look(source, wanted, weight_files(checkpoint.listed), small)
    config = load_glm_config(source)
    options.check(config)
    layout = read_layout(checkpoint)
    checkpoint.validate(config)
    shards, planned = plan_tensors(layout.shards, checkpoint, config, options)
    layout = layout._replace(shards=shards)
    keep = options == Options()
    jobs = [
        Job(shard.file, [_header(shard, tensors, keep), *tensors])
        for shard, tensors in zip(shards, planned, strict=True)
    ]
    following = _small_files(checkpoint, config, options, layout, planned)
    task = Task(checkpoint, origin, config, options, workers, hashed)
    return carry_out(task, out, planned, jobs, following, start)


def _header(shard: Shard, tensors: list[OutputTensor], keep: bool) -> bytes:
    if keep and shard.header is not None:
        text = shard.header.encode()
        return len(text).to_bytes(8, "little") + text
    return header_bytes(tensors, shard.metadata)


def _small_files(
    checkpoint: MegatronCheckpoint,
    config: GlmConfig,
    options: Options,
    layout: Layout,
    planned: list[list[OutputTensor]],
) -> dict[str, bytes | Path]:
    folder = checkpoint.directory
    small: dict[str, bytes | Path] = {name: folder / name for name in layout.copied}
    own_config = small.pop("config.json")
    if options != Options():
        raw = output_config(parse_json((folder / "config.json").read_bytes()), config, options)
        own_config = (json.dumps(raw, indent=2) + "\n").encode()
    if layout.index_metadata is not None:
        small[INDEX_NAME] = (
            folder / RAW_INDEX_NAME
            if options == Options()
            else index_bytes(layout.shards, planned, layout.index_metadata)
        )
    return small | {"config.json": own_config}
