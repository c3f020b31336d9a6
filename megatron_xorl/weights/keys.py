"""Where each Hugging Face tensor stands in a Megatron distributed checkpoint: one key table on top of the name table.

A distributed checkpoint holds global tensors by key, each cut into chunks. The one idea: one Hugging Face tensor is one chunk,
so both directions are copies of bytes and no layout shows in the file.

* The key is the global name of the Megatron parameter: ``decoder.layers.7.self_attention.linear_proj.weight``.
* Gate and up, which Megatron fuses by rows, are two keys, ``….linear_fc1.weight.gate`` and ``….linear_fc1.weight.up``: a
  tensor-parallel rank owns a range of each, which is no range of the fused rows.
* A bank of experts is one key with the expert axis first and one chunk an expert.
* Block scales stand beside their weight under ``<key>_scale_inv``, cut in the same way.
* What has no Megatron name (the MTP layer) keeps its Hugging Face name under ``hf.``.

On reading, the spellings that Transformer Engine gives norms fused into the linear behind them are aliases. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megatron_xorl.weights.names import SCALE_SUFFIX, TensorRow, hf_tensors

if TYPE_CHECKING:
    from megatron_xorl.config.model import GlmConfig

__all__ = [
    "CARRIED_PREFIX",
    "METADATA_NAME",
    "Chunk",
    "canonical_key",
    "hf_names_by_chunk",
    "key_table",
]

METADATA_NAME = ".metadata"
"""File of a distributed checkpoint that says where each chunk lies."""

CARRIED_PREFIX = "hf."
"""Before the Hugging Face name of a tensor that no Megatron parameter takes."""

_PARTS = (".gate", ".up")

_FUSED_NORMS = {
    ".self_attention.linear_q_up_proj.layer_norm_weight": ".self_attention.q_layernorm.weight",
    ".self_attention.linear_kv_up_proj.layer_norm_weight": ".self_attention.kv_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}
"""Transformer Engine's key of a norm that it fused into the linear behind it, and the key of the norm by itself."""


class Chunk(NamedTuple):
    """The place of one Hugging Face tensor: ``shape`` is the key's, the chunk covers ``offset`` to ``offset + size``."""

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]


def key_table(config: GlmConfig) -> dict[str, Chunk]:
    """Return the chunk of every Hugging Face tensor of ``config``, scales included, by Hugging Face name, in model order."""
    return _key_table(config)


def hf_names_by_chunk(config: GlmConfig) -> dict[tuple[str, tuple[int, ...]], str]:
    """Return the Hugging Face name by key and offset of the chunk: :func:`key_table` read backwards."""
    return _hf_names(config)


def canonical_key(key: str) -> str:
    """Return the key of the table for a key as found: fused norms are renamed, anything else is returned as it is."""
    for fused, alone in _FUSED_NORMS.items():
        if key.startswith("decoder.layers.") and key.endswith(fused):
            return key.removesuffix(fused) + alone
    return key


@lru_cache(maxsize=8)
def _key_table(config: GlmConfig) -> dict[str, Chunk]:
    return dict(_chunks(config))


@lru_cache(maxsize=8)
def _hf_names(config: GlmConfig) -> dict[tuple[str, tuple[int, ...]], str]:
    return {(chunk.key, chunk.offset): name for name, chunk in key_table(config).items()}


def _chunks(config: GlmConfig) -> Iterator[tuple[str, Chunk]]:
    for row in hf_tensors(config):
        key = _key(row)
        yield row.hf, _chunk(key, row.shape, row.expert, config.n_routed_experts)
        if row.scale_shape is not None:
            scales = _chunk(
                key + SCALE_SUFFIX, row.scale_shape, row.expert, config.n_routed_experts
            )
            yield row.hf + SCALE_SUFFIX, scales


def _key(row: TensorRow) -> str:
    if row.megatron is None:
        return CARRIED_PREFIX + row.hf
    return row.megatron if row.part is None else row.megatron + _PARTS[row.part]


def _chunk(key: str, shape: tuple[int, ...], expert: int | None, experts: int) -> Chunk:
    start = (0,) * len(shape)
    if expert is None:
        return Chunk(key, start, shape, shape)
    return Chunk(key, (expert, *start), (1, *shape), (experts, *shape))
