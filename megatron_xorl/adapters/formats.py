"""Adapter file formats: how a factor is spelled in a file that a server reads.

``sglang_shared_outer`` (default): ordinary targets as PEFT writes them, banks as 3-D tensors under
``experts.w1|w2|w3`` (w1 gate, w2 down, w3 up) whose leading axis is 1 where the factor is shared by
all experts. This is the interchange form that SGLang, vLLM (``--enable-moe-shared-loras``) and XoRL
read; the shapes are the logical ones of the inventory, unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError

__all__ = ["PREFIX", "adapter_document", "file_key", "inventory_hash"]

PREFIX = "base_model.model."
_EXPERT_KEYS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def file_key(factor: Factor) -> str:
    """Key of a factor in a ``sglang_shared_outer`` file."""
    target = factor.target
    parent, _, leaf = target.rpartition(".")
    if parent.endswith(".experts"):
        target = f"{parent}.{_EXPERT_KEYS[leaf]}"
    return f"{PREFIX}{target}.lora_{factor.side}.weight"


def inventory_hash(factors: Iterable[Factor]) -> str:
    """SHA-256 over the names and shapes of the factors in a file, in order."""
    digest = hashlib.sha256()
    for factor in factors:
        digest.update(f"{factor.name} {factor.shape}\n".encode())
    return digest.hexdigest()


def adapter_document(
    adapter: AdapterConfig,
    factors: tuple[Factor, ...],
    *,
    base_model: str,
    base_fingerprint: str,
    forward: Mapping[str, str],
) -> dict[str, Any]:
    """``adapter_config.json``, from resolved values.

    Args:
        adapter: the configuration that trained the factors.
        factors: what the file holds.
        base_model: path or name of the base.
        base_fingerprint: of the base that was trained on.
        forward: mode and backend of the base's products while it trained.

    Raises:
        AdapterError: nothing trained, so there is nothing to write.
    """
    if not factors:
        raise AdapterError(
            "no factor trained, so there is no adapter to write; check glm52_lora_scope and the targets"
        )
    ranks = {factor.target: factor.rank for factor in factors}
    rank = max(ranks.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": adapter.alpha,
        "rank_pattern": {target: r for target, r in ranks.items() if r != rank},
        "alpha_pattern": {},
        "target_modules": sorted({target.rpartition(".")[2] for target in ranks}),
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "_sglang_lora_format": "shared_outer",
        "moe_hybrid_shared_lora": True,
        "megatron_xorl": {
            "format": "sglang_shared_outer",
            "format_version": 1,
            "adapter": adapter.to_dict(),
            "base_fingerprint": base_fingerprint,
            "forward": dict(forward),
            "inventory_hash": inventory_hash(factors),
        },
    }
