"""``adapter_config.json``: what stands beside the tensors, from resolved values.

The one idea: every number is what the tensors say (rank and alpha of each target), never what a configuration asked for, and
the PEFT formats carry the one configuration that PEFT applies exactly to this model family.

PEFT turns any target that ends in ``gate_proj``, ``up_proj`` or ``down_proj`` into the routed experts' parameters
(huggingface/peft#3711), so that shared experts and dense layers named as modules lose their adapter silently. Named as
``target_parameters`` (``….shared_experts.gate_proj.weight``) they keep it. transformers holds gate and up of a bank as one
parameter, which therefore has twice the rank and, to keep the scale, twice alpha (with rsLoRA the square root of two times it).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_xorl.adapters.carried import carried_targets
from megatron_xorl.adapters.formats import check_format, inventory_hash, is_bank
from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError

__all__ = ["FORMAT_VERSION", "PEFT_MINIMUM", "adapter_document"]

FORMAT_VERSION = 1
"""Of the ``megatron_xorl`` section."""

PEFT_MINIMUM = "0.19.1"
"""PEFT below this reads the fused layout of banks with A and B in each other's place."""

_RENAMED = ("gate_proj", "up_proj", "down_proj")
"""Leaves that PEFT moves to the routed experts when they are named as modules."""


def adapter_document(
    adapter: AdapterConfig,
    factors: Sequence[Factor],
    *,
    base_model: str,
    base_fingerprint: str | None,
    forward: Mapping[str, str],
    format: str = "sglang_shared_outer",
) -> dict[str, Any]:
    """Return ``adapter_config.json``.

    Args:
        adapter: the configuration that trained the factors.
        factors: what the file holds; targets whose factors do not train are listed under ``frozen``.
        base_model: path or name of the base.
        base_fingerprint: of the base that was trained on, None where nobody knows it.
        forward: mode and backend of the base's products while it trained.
        format: of the file.

    Raises:
        AdapterError: nothing trained, so there is nothing to write, or there is no such format.
    """
    check_format(format)
    if not factors:
        raise AdapterError(
            "no factor trained, so there is no adapter to write; check glm52_lora_scope and the targets"
        )
    ranks = {factor.target: factor.rank for factor in factors}
    rank = max(ranks.values())
    shared = format == "sglang_shared_outer"
    targets = _leaves(adapter, ranks, rank) if shared else _peft_targets(adapter, ranks, rank)
    own = {
        "format": format,
        "format_version": FORMAT_VERSION,
        "adapter": adapter.to_dict(),
        "base_fingerprint": base_fingerprint,
        "forward": dict(forward),
        "inventory_hash": inventory_hash(factors),
    }
    if carried := carried_targets(factors):
        own["frozen"] = list(carried)
    if format == "hf_peft_fused":
        own["peft_min_version"] = PEFT_MINIMUM
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": adapter.alpha,
        **({"use_rslora": True} if adapter.rslora else {}),
        **targets,
        # PEFT refuses dropout on parameters, and an adapter in use has none.
        "lora_dropout": adapter.dropout if shared else 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **({"_sglang_lora_format": "shared_outer", "moe_hybrid_shared_lora": True} if shared else {}),
        "megatron_xorl": own,
    }  # fmt: skip


def _leaves(adapter: AdapterConfig, ranks: Mapping[str, int], rank: int) -> dict[str, Any]:
    """Servers match leaf names."""
    return {
        "rank_pattern": {target: r for target, r in ranks.items() if r != rank},
        "alpha_pattern": {},
        "target_modules": sorted({target.rpartition(".")[2] for target in ranks}),
    }


def _peft_targets(adapter: AdapterConfig, ranks: Mapping[str, int], rank: int) -> dict[str, Any]:
    """Full names: of modules where PEFT leaves them alone, of parameters where it does not; patterns are regular expressions."""
    modules, parameters = [], []
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    # The one parameter of both has rank 2r: the scale stays with 2 alpha / 2r, or sqrt(2) alpha / sqrt(2r).
    doubled = adapter.alpha * (math.sqrt(2) if adapter.rslora else 2)
    for target, own in ranks.items():
        parent, _, leaf = target.rpartition(".")
        name, own_rank = target, own
        if is_bank(target):
            fused = leaf != "down_proj"
            name = f"{parent}.gate_up_proj" if fused else target
            own_rank = 2 * own if fused else own
            if fused:
                alpha_pattern[re.escape(name)] = doubled
            parameters.append(name)
        elif leaf in _RENAMED:
            name = f"{target}.weight"
            parameters.append(name)
        else:
            modules.append(name)
        if own_rank != rank:
            rank_pattern[re.escape(name)] = own_rank
    return {
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": modules,
        "target_parameters": list(dict.fromkeys(parameters)),
    }
