"""``megatron-xorl import``: a Hugging Face directory becomes a Megatron distributed checkpoint, shard by shard.

The one idea: Hugging Face shard k becomes ``__0_k.distcp``, tensor by tensor, through the key table, so that the checkpoint loads
at any layout and export writes the same shards again. What is no weight (config.json, tokenizer, chat template, generation
settings) is copied into the same folder; ``hf/`` keeps how the shards were laid out.

Refused: everything ``weights.reader`` and ``weights.check`` refuse, pickled weights beside the safetensors, shards that the
index does not name.

    megatron-xorl import HF_DIR OUT [--dtype keep|bf16|fp32] [--quantize]
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.convert.directions import Task, asked, carry_out, refuse_nested
from megatron_xorl.convert.files import PARTIAL
from megatron_xorl.convert.layout import RAW_INDEX_NAME, VERSION, string_map
from megatron_xorl.convert.origin import look
from megatron_xorl.convert.plan import (
    Options,
    Shard,
    header_bytes,
    index_bytes,
    output_config,
    output_config_of,
    plan_tensors,
)
from megatron_xorl.convert.stream import Job
from megatron_xorl.convert.values import OutputTensor
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.archive import plain_archive
from megatron_xorl.weights.completeness import (
    COMMON_NAME,
    LAYOUT_NAME,
    PROGRESS_NAME,
    is_megatron,
    read_files,
)
from megatron_xorl.weights.container import ALIGNMENT, container
from megatron_xorl.weights.dcp_metadata import Item, metadata_bytes
from megatron_xorl.weights.keys import METADATA_NAME, key_table
from megatron_xorl.weights.manifest import MANIFEST, parse_json
from megatron_xorl.weights.reader import HfCheckpoint
from megatron_xorl.weights.writer import INDEX_NAME

__all__ = ["CONFIG_NAME", "import_checkpoint"]

CONFIG_NAME = "metadata.json"

_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_OURS = {MANIFEST, PROGRESS_NAME, METADATA_NAME, CONFIG_NAME, INDEX_NAME}

log = logging.getLogger(__name__)


def import_checkpoint(
    source: Path | str,
    out: Path | str,
    options: Options = Options(),  # noqa: B008 - an immutable tuple
    *,
    workers: int = 1,
    hashed: bool = True,
) -> dict[str, Any]:
    """Convert a Hugging Face directory, or continue an interrupted conversion.

    Args:
        source: with config.json and safetensors, FP8 or BF16.
        out: new directory, or that of the interrupted run.
        options: what is done to values; nothing by default.
        workers: files converted at the same time.
        hashed: write SHA-256 hashes into the manifest, and check those of the source's manifest if it has one.

    Returns:
        ``path``, ``tensors``, ``bytes``, ``files``, ``resumed``, ``seconds``, ``bytes_per_s``.

    Raises:
        WeightsError, ConfigError: see the module's list of refusals.
    """
    start = time.perf_counter()
    source, out = refuse_nested(source, out)
    if is_megatron(source):
        read_files(source, small=False)  # an unfinished one says so
        raise WeightsError(
            f"{source} is a Megatron checkpoint already; use `megatron-xorl export` for the other direction"
        )
    checkpoint = HfCheckpoint(source, small=hashed)
    copied = _carried(checkpoint)
    wanted = asked("import", options, hashed)
    origin = look(source, wanted, checkpoint.shards(), [*copied, *_index_of(source)])
    config = load_glm_config(source)
    options.check(config)
    checkpoint.validate(config)
    shards = [_shard(checkpoint, file) for file in checkpoint.shards()]
    shards, planned = plan_tensors(shards, checkpoint, config, options)
    jobs, items = _jobs(planned, output_config_of(config, options))
    keep = options == Options()
    layout = [
        shard._replace(
            names=tuple(tensor.name for tensor in tensors), header=shard.header if keep else None
        )
        for shard, tensors in zip(shards, planned, strict=True)
    ]
    small = _small_files(source, copied, config, options, layout, planned, items)
    task = Task(checkpoint, origin, config, options, workers, hashed)
    return carry_out(task, out, planned, jobs, small, start)


def _carried(checkpoint: HfCheckpoint) -> list[str]:
    """Return the names of the files beside the weights that are copied; what is left behind is named in one warning.

    Raises:
        WeightsError: a pickle anywhere, a shard that the index does not name, or a name that the output needs itself.
    """
    folder, shards = checkpoint.directory, set(checkpoint.shards())
    pickled = sorted(
        str((Path(inside) / name).relative_to(folder))
        for inside, _, names in os.walk(folder)
        for name in names
        if Path(name).suffix.lower() in _PICKLED
    )
    if pickled:
        raise WeightsError(
            f"{folder} holds pickled files: {_some(pickled)}; loading them would run code, so they are never read or copied: "
            "take them out of the directory"
        )
    carried, left, strays = [], [], []
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.lower() == "hf" or name.endswith(PARTIAL) or path.suffix == ".distcp":
            raise WeightsError(f"{path}: the output has a {name} of its own; rename or move it")
        if path.suffix == ".safetensors" and name not in shards:
            strays.append(name)
        elif name.startswith(".") or not path.is_file():
            left.append(name)
        elif name not in shards and name not in _OURS:
            carried.append(name)
    if strays:
        raise WeightsError(
            f"{folder} has shards that its index does not name: {_some(strays)}; "
            "fetch the index again or take them out of the directory"
        )
    if left:
        log.warning(
            "left out of the output, as all but plain visible files are: %s",
            ", ".join(left),
        )
    if unplain := sorted(name for name in shards if Path(name).name != name):
        raise WeightsError(
            f"the index puts tensors into {unplain[0]}, in a folder of its own; move the shards beside config.json"
        )
    return carried


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shard(checkpoint: HfCheckpoint, file: str) -> Shard:
    entries = checkpoint.header(file)
    names = sorted(entries, key=lambda name: (entries[name].start, entries[name].stop))
    with open(checkpoint.directory / file, "rb") as stream:
        raw = stream.read(8)
        raw += stream.read(int.from_bytes(raw, "little"))
    metadata = json.loads(raw[8:]).get("__metadata__")
    copied = [OutputTensor(n, entries[n].dtype, entries[n].shape, "copy", n) for n in names]
    try:
        usual = header_bytes(copied, string_map(metadata)) == raw
    except ValueError as error:
        raise WeightsError(f"{file}: __metadata__ {error}; fetch the file again") from None
    return Shard(file, metadata, tuple(names), None if usual else raw[8:].decode())


def _jobs(planned: list[list[OutputTensor]], config: GlmConfig) -> tuple[list[Job], list[Item]]:
    """Return the ``.distcp`` files and the places of all tensors in them."""
    table = key_table(config)
    jobs, items = [], []
    for number, tensors in enumerate(planned):
        job, at = Job(f"__0_{number}.distcp", []), 0
        for tensor in tensors:
            chunk = table[tensor.name]
            around = container(tensor.dtype, chunk.size)
            length = len(around.prefix) + tensor.nbytes + len(around.suffix)
            place = (chunk.shape, chunk.offset, chunk.size, job.file, at, length)
            items.append(Item(chunk.key, tensor.dtype, *place))
            padding = bytes(-length % ALIGNMENT)
            job.segments.extend((around.prefix, tensor, around.suffix + padding))
            at += length + len(padding)
        jobs.append(job)
    return jobs, items


def _small_files(
    folder: Path,
    carried: list[str],
    config: GlmConfig,
    options: Options,
    shards: list[Shard],
    planned: list[list[OutputTensor]],
    items: list[Item],
) -> dict[str, bytes | Path]:
    """Return what follows the weights, in this order: copies, layout, and last what makes the folder a checkpoint."""
    copied: dict[str, bytes | Path] = {name: folder / name for name in carried}
    if options != Options():
        raw = output_config(parse_json((folder / "config.json").read_bytes()), config, options)
        copied["config.json"] = (json.dumps(raw, indent=2) + "\n").encode()
    small = {name: content for name, content in copied.items() if name != "config.json"}
    metadata = None
    for name in _index_of(folder):
        raw_index = (folder / name).read_bytes()
        metadata = parse_json(raw_index).get("metadata") or {}
        if not isinstance(metadata, dict):
            raise WeightsError(
                f"{folder / name}: metadata is {type(metadata).__name__}, expected an object; fetch the index again"
            )
        if options != Options() or not _total_is_right(metadata, planned):
            raw_index = index_bytes(shards, planned, metadata)
        small[RAW_INDEX_NAME] = raw_index
    layout = {
        "format_version": VERSION,
        "copied": sorted(copied),
        "index_metadata": metadata,
        "shards": [shard._asdict() for shard in shards],
    }
    return small | {
        LAYOUT_NAME: json.dumps(layout).encode(),
        COMMON_NAME: plain_archive({"iteration": 0, "checkpoint_version": 3.0}),
        METADATA_NAME: metadata_bytes(items),
        "config.json": copied["config.json"],
        CONFIG_NAME: b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}',
    }


def _index_of(folder: Path) -> list[str]:
    return [INDEX_NAME] if (folder / INDEX_NAME).is_file() else []


def _total_is_right(metadata: dict[str, Any], planned: list[list[OutputTensor]]) -> bool:
    found = metadata.get("total_size")
    true = sum(tensor.nbytes for tensors in planned for tensor in tensors)
    if found != true:
        log.warning(
            "the index says total_size %s, the tensors have %d bytes; the true value is written",
            "nowhere" if found is None else found,
            true,
        )
    return bool(found == true)
