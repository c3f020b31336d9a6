"""The fingerprint of a base checkpoint: which base an adapter was trained on, in seconds for 704 GB.

SHA-256 over the semantic config and, per tensor in sorted order, the SHA-256 of its name, dtype,
shape, first and last 4 KiB and eight samples at fixed places. Independent of where the checkpoint lies and how it is
sharded; not a proof that every byte is right (``verify`` hashes everything), but two bases that
differ in config, training or quantisation differ here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from typing import TYPE_CHECKING

from megatron_xorl.weights.shards import Entry

if TYPE_CHECKING:
    from megatron_xorl.config.model import GlmConfig
    from megatron_xorl.weights.opening import Checkpoint

__all__ = ["fingerprint", "sample_ranges"]

EDGE_BYTES = 4096
SAMPLES = 8
SAMPLE_BYTES = 64

NOT_SEMANTIC = (
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "eos_token_id",
    "dtype",
    "modules_to_not_convert",
)
"""Config fields that change no value the model computes from given weights and tokens (what is quantised, the tensors say)."""


def fingerprint(config: GlmConfig, checkpoint: Checkpoint) -> str:
    """Return the fingerprint, 64 hexadecimal digits.

    Raises:
        WeightsError: a shard is missing, truncated or damaged.
    """
    digest = hashlib.sha256()
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_SEMANTIC}
    digest.update(json.dumps(fields, sort_keys=True).encode())
    tensors = _tensor_digests(checkpoint)
    for name in checkpoint.names():
        digest.update(tensors[name])
    return digest.hexdigest()


def sample_ranges(size: int) -> list[tuple[int, int]]:
    """Return the ``(start, stop)`` byte ranges of a tensor of ``size`` bytes that enter the fingerprint."""
    if size <= 2 * EDGE_BYTES:
        return [(0, size)]
    inner = size - 2 * EDGE_BYTES
    starts = [EDGE_BYTES + inner * (2 * i + 1) // (2 * SAMPLES) for i in range(SAMPLES)]
    middle = [(start, min(start + SAMPLE_BYTES, size)) for start in starts]
    return [(0, EDGE_BYTES), *middle, (size - EDGE_BYTES, size)]


def _tensor_digests(checkpoint: Checkpoint) -> dict[str, bytes]:
    """SHA-256 of each tensor's name, dtype, shape and samples, read shard by shard in file order, as a disk likes it."""
    by_shard: dict[str, list[tuple[str, Entry]]] = defaultdict(list)
    for name in checkpoint.names():
        by_shard[checkpoint.shard_of(name)].append((name, checkpoint.entry(name)))
    digests = {}
    for shard, members in by_shard.items():
        with (checkpoint.directory / shard).open("rb", buffering=0) as file:
            for name, entry in sorted(members, key=lambda member: member[1].start):
                digest = hashlib.sha256(json.dumps([name, entry.dtype, list(entry.shape)]).encode())
                for start, stop in sample_ranges(entry.stop - entry.start):
                    file.seek(entry.start + start)
                    digest.update(file.read(stop - start))
                digests[name] = digest.digest()
    return digests
