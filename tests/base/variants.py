"""Checkpoints of many configs: what the shipped miniature has only one of.

The one idea: a variant is a set of raw ``config.json`` keys laid over a small base, and its tensors are drawn by
the same function that writes the tiny checkpoint, so that a new config is one more row here. ``...`` takes a key
out of the file. Every variant has an indexer with at least 16 heads (fewer give exact ties), an ``index_topk``
below the longest batch, and head sizes that are no multiples of the FP8 block.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.convert.tiny import tiny_config, tiny_tensors
from megatron_xorl.weights.names import SCALE_SUFFIX
from megatron_xorl.weights.writer import write_checkpoint

TOPK = 16
"""``index_topk`` of every variant."""

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "q_lora_rank": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "index_topk": TOPK,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    # Each variant says its own schedule; transformers derives these two from the sizes.
    "indexer_types": ...,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 2,
    "layer_types": ...,
    "mlp_layer_types": ...,
}


@dataclass(frozen=True)
class Variant:
    """A config: raw keys over the base, and the FP8 block (None: a bf16 checkpoint)."""

    keys: dict[str, Any] = field(default_factory=dict)
    block: tuple[int, int] | None = (16, 16)

    def raw(self) -> dict[str, Any]:
        """Content of its ``config.json``."""
        raw = tiny_config(None if self.block is None else 16) | _SMALL | self.keys
        if self.block is None:
            raw |= {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "kv_lora_rank": 64}
            raw |= {"qk_head_dim": 32, "v_head_dim": 32, "index_head_dim": 16}
        else:
            raw["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
            }
        return {key: value for key, value in raw.items() if value is not ...}

    def config(self) -> GlmConfig:
        """The same as the package reads it."""
        return GlmConfig.from_dict(self.raw(), "variant")


_SPREAD = {"n_routed_experts": 16, "num_experts_per_tok": 4}
VARIANTS: dict[str, Variant] = {
    "5.1-like": Variant(
        {
            "num_hidden_layers": 5,
            "index_topk_freq": ...,
            "index_skip_topk_offset": ...,
            "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
        }
    ),
    "5.2-like": Variant(
        {
            "num_hidden_layers": 7,
            "first_k_dense_replace": 3,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
        }
    ),
    "F S F F S written out": Variant(
        {
            "num_hidden_layers": 5,
            "indexer_types": ["full", "shared", "full", "full", "shared"],
            "index_topk_freq": ...,
        }
    ),
    "pattern FFSFSS": Variant({"num_hidden_layers": 6, "index_topk_pattern": "FFSFSS"}),
    "12 heads": Variant(
        {"num_attention_heads": 12, "num_key_value_heads": 12, "index_n_heads": 24}
    ),
    "2 of 4 groups": Variant({**_SPREAD, "n_group": 4, "topk_group": 2}),
    "1 of 2 groups, not normalised": Variant(
        {**_SPREAD, "n_group": 2, "topk_group": 1, "norm_topk_prob": False}
    ),
    "not normalised": Variant({"norm_topk_prob": False}),
    "one expert a token": Variant({"num_experts_per_tok": 1}),
    "no dense layer": Variant({"first_k_dense_replace": 0}),
    "dense layers alone": Variant({"first_k_dense_replace": 4}),
    "two shared experts": Variant({"n_shared_experts": 2}),
    "vocabulary 251, MTP null": Variant(
        {
            "vocab_size": 251,
            "eos_token_id": 250,
            "pad_token_id": 0,
            "num_nextn_predict_layers": None,
        }
    ),
    "vocabulary 309, no MTP": Variant({"vocab_size": 309, "num_nextn_predict_layers": ...}),
    "two MTP layers": Variant({"num_nextn_predict_layers": 2}),
    "whole index head rotated": Variant({"qk_rope_head_dim": 16, "qk_head_dim": 40}),
    "flat theta": Variant({"rope_parameters": ..., "rope_theta": 8e6}),
    "bf16 source": Variant(block=None),
    "ragged 16 x 32 blocks": Variant(
        {
            "hidden_size": 88,
            "q_lora_rank": 56,
            "kv_lora_rank": 72,
            "qk_nope_head_dim": 20,
            "qk_head_dim": 28,
            "v_head_dim": 28,
            "index_head_dim": 20,
            # Gate and up are fused, and each ends in half a block of its own.
            "intermediate_size": 72,
            "moe_intermediate_size": 40,
        },
        block=(16, 32),
    ),
}


@dataclass(frozen=True)
class Weights:
    """How large the weights are: exactly the bytes that make-tiny draws, or those rescaled."""

    init: float | None = None
    """Standard deviation of every matrix, the embedding included; None: N(0, 1/fan_in), the embedding N(0, 1)."""
    times: int = 1
    """Every projection this many times as large; the embedding, norms and router bias are not."""


WEIGHTS: dict[str, Weights] = {
    "default init": Weights(init=0.02),
    "default init x4": Weights(init=0.02, times=4),
    "unit gain": Weights(),
    "unit gain x4": Weights(times=4),
}
"""``default init`` is transformers' ``initializer_range``; ``unit gain`` what a trained model's layers are like: logits of
size one and sharp attention, where rounding errors grow from layer to layer."""


def write_variant(out: Path, variant: Variant, weights: Weights, *, seed: int = 0) -> Path:
    """Write a variant's checkpoint into the new directory ``out``."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(variant.raw(), indent=2) + "\n", encoding="utf-8")
    glm = variant.config()
    tensors = tiny_tensors(glm, seed)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    scaled = {
        name: (value * factor).to(value.dtype)
        if (factor := _factor(name, shapes, glm, weights)) != 1
        else value
        for name, value in tensors.items()
    }
    size = sum(t.numel() * t.element_size() for t in scaled.values())
    write_checkpoint(out, scaled, max_bytes=math.ceil(size / 2.5))
    return out


def _factor(
    name: str, shapes: dict[str, tuple[int, ...]], glm: GlmConfig, weights: Weights
) -> float:
    """What a tensor is multiplied with; of an FP8 pair only the scales are."""
    if name + SCALE_SUFFIX in shapes:
        return 1.0
    if name.endswith("e_score_correction_bias"):
        # As the scores it competes with, or every token would go to the same experts.
        return 1.0 if weights.init is None else weights.init * math.sqrt(glm.hidden_size)
    if len(shapes[name]) != 2:
        return 1.0
    if "embed_tokens" in name:
        return weights.init or 1.0
    fan_in = shapes[name.removesuffix(SCALE_SUFFIX)][1]
    return weights.times * (1.0 if weights.init is None else weights.init * math.sqrt(fan_in))
