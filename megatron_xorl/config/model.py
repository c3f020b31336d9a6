"""The GLM-5.2 model configuration, read from a checkpoint's own ``config.json``.

The one idea: one frozen object with Hugging Face's field names, parsed by us. A transformers config
class is never used, because it rewrites fields (``head_dim`` over the rope width, a silent
``rope_theta`` of 10000). ``parse.py`` beside this file says how each key is read and what is
refused.

    megatron-xorl inspect glm-5.2
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_xorl.config.indexer import shown
from megatron_xorl.errors import ConfigError, nearest

__all__ = ["PRESETS", "GlmConfig", "load_glm_config", "preset_dict"]


PRESETS: tuple[str, ...] = ("glm-5.2", "glm-5.1", "glm-5", "tiny")


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmConfig:
    """What the model is: sizes, schedule, constants. Field names are those of Hugging Face's ``config.json``.

    ``weight_block_size`` is (rows, columns) of a block of the FP8 weights, or None for an
    unquantised checkpoint; ``modules_to_not_convert`` are the entries that leave modules of an FP8
    checkpoint out of it (``weights.names`` has the rule). ``latent_norm_eps`` and
    ``indexer_norm_eps`` are not in the files; 1e-6 is what transformers' module defaults give.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    latent_norm_eps: float
    indexer_norm_eps: float
    rope_theta: float
    rope_interleave: bool
    indexer_rope_interleave: bool
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    num_nextn_predict_layers: int
    weight_block_size: tuple[int, int] | None
    modules_to_not_convert: tuple[str, ...]
    tie_word_embeddings: bool
    initializer_range: float
    dtype: str

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config") -> GlmConfig:
        """Parse the content of a ``config.json``; keys that mean nothing here are tolerated.

        Raises:
            ConfigError: a key is missing, contradicts another, or asks for what this package does not implement.
        """
        from megatron_xorl.config.parse import parse_fields

        return cls(**parse_fields(raw, source))

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: the part without position and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def quantized(self) -> bool:
        """Whether the checkpoint holds block-FP8 weights."""
        return self.weight_block_size is not None

    @property
    def full_indexer_layers(self) -> tuple[int, ...]:
        """Layers that own an indexer."""
        return tuple(layer for layer, kind in enumerate(self.indexer_types) if kind == "full")

    @property
    def shared_indexer_layers(self) -> tuple[int, ...]:
        """Layers without an indexer, which use the indices of :meth:`indexer_source`."""
        return tuple(layer for layer, kind in enumerate(self.indexer_types) if kind == "shared")

    def is_dense(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` has a plain MLP instead of experts."""
        return layer < self.first_k_dense_replace

    def indexer_source(self, layer: int) -> int:
        """Return the layer whose indexer computes the indices that ``layer`` attends to (itself if it owns one)."""
        if not 0 <= layer < self.num_hidden_layers:
            raise ConfigError(
                f"layer {layer} does not exist; expected 0 to {self.num_hidden_layers - 1}"
            )
        return max(full for full in self.full_indexer_layers if full <= layer)


def preset_dict(name: str) -> dict[str, Any]:
    """Return the ``config.json`` content shipped for preset ``name``; the caller owns the returned mapping.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        close = nearest(name, PRESETS)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"no preset {name!r}{hint} (presets: {', '.join(PRESETS)})")
    result: dict[str, Any] = json.loads(_preset_text(name))
    return result


@cache
def _preset_text(name: str) -> str:
    return (
        resources.files("megatron_xorl.config")
        .joinpath("presets", f"{name}.json")
        .read_text(encoding="utf-8")
    )


def load_glm_config(where: str | Path) -> GlmConfig:
    """Read a model configuration from a preset name, a ``config.json`` or a directory that holds one.

    A preset name wins over a file of the same name; write ``./glm-5.2`` for the latter.

    Raises:
        ConfigError: nothing is there, it is not JSON, it writes a key twice, or :meth:`GlmConfig.from_dict` refuses it.
    """
    if isinstance(where, str) and where in PRESETS:
        return GlmConfig.from_dict(preset_dict(where), f"preset {where}")
    path = Path(where).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        close = nearest(str(where), PRESETS, n=1)
        hint = f"; did you mean the preset {close[0]!r}?" if close else ""
        raise ConfigError(
            f"{where}: found no file there, expected a config.json, a directory that holds one, or a preset "
            f"({', '.join(PRESETS)}){hint}"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not readable as JSON ({error}); expected the config.json of a GLM checkpoint"
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: found a JSON {type(raw).__name__}, expected an object with the keys of a GLM config"
        )
    return GlmConfig.from_dict(raw, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One object of the file; JSON's own reader keeps the last of two values and says nothing."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(
                f"key {shown(key)} is written twice, with {shown(result[key])} and {shown(value)}; keep one"
            )
        result[key] = value
    return result
