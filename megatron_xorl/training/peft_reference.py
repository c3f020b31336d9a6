"""The logits that transformers and PEFT compute from an adapter directory: a reference that nobody here wrote.

Both are optional and are looked for when asked. transformers' model is built from ``config.json`` with the base dequantised to
fp32, and PEFT loads the directory by its own rules, so that whatever it drops shows as a difference.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.names import SCALE_SUFFIX, hf_tensors
from megatron_xorl.weights.opening import Checkpoint

__all__ = ["dequantised", "peft_logits"]


def peft_logits(
    directory: Path, base: Path, checkpoint: Checkpoint, glm: GlmConfig, ids: Tensor
) -> Tensor | None:
    """Return fp32 logits ``[b, s, vocab]`` of ``ids`` ``[b, s]``; None where transformers or PEFT is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "peft")):
        return None
    transformers, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    raw = json.loads((base / "config.json").read_text(encoding="utf-8"))
    raw.pop("quantization_config", None)
    config = transformers.GlmMoeDsaConfig(**(raw | {"dtype": "float32"}))
    config._attn_implementation = "eager"
    model = transformers.GlmMoeDsaForCausalLM(config).float().eval()
    model.load_state_dict(_state(checkpoint, glm), strict=True)
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted: Any = peft.PeftModel.from_pretrained(model, str(directory))
    finally:
        logger.setLevel(level)
    with torch.no_grad():
        logits: Tensor = adapted.eval()(ids).logits.float()
    return logits


def _state(checkpoint: Checkpoint, glm: GlmConfig) -> dict[str, Tensor]:
    """The base in fp32 under transformers' names; it holds a bank as gate_up_proj ``[E, 2I, H]`` and down_proj ``[E, H, I]``."""
    state: dict[str, Tensor] = {}
    banks: dict[str, list[Tensor]] = {}
    for row in hf_tensors(glm):
        if row.region == "mtp":
            continue
        value = dequantised(checkpoint, row.hf, glm)
        if row.expert is None:
            state[row.hf] = value
        else:
            bank, leaf = row.hf.split(f".experts.{row.expert}.")
            banks.setdefault(f"{bank}.experts.{leaf.removesuffix('.weight')}", []).append(value)
    for name, experts in banks.items():
        bank, _, leaf = name.rpartition(".")
        if leaf == "down_proj":
            state[name] = torch.stack(experts)
        elif leaf == "gate_proj":
            pairs = zip(experts, banks[f"{bank}.up_proj"], strict=True)
            state[f"{bank}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    return state


def dequantised(checkpoint: Checkpoint, name: str, glm: GlmConfig) -> Tensor:
    """Return a weight in fp32: its codes, each times the scale of its block, where the file holds scales.

    Raises:
        WeightsError: it has scales and config.json has no block size.
    """
    value = checkpoint.read(name).float()
    if name + SCALE_SUFFIX not in checkpoint:
        return value
    if glm.weight_block_size is None:
        raise WeightsError(
            f"{name} has block scales, but config.json names no block size; fetch config.json again"
        )
    rows, columns = glm.weight_block_size
    scales = checkpoint.read(name + SCALE_SUFFIX)
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return value * wide[: value.shape[0], : value.shape[1]]
