"""Megatron's recompute arguments, checked before a rank is started.

The one idea: Megatron checks them in every rank, when its config is built, and takes some without a word that do nothing; here
each is answered in one line. What the modules mean is in ``layers.recompute``.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

__all__ = ["RECOMPUTE_MODULES", "recompute_faults"]

RECOMPUTE_MODULES = (
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
)
"""The modules of Megatron's list that this model has."""


def recompute_faults(args: Namespace, layers: int) -> list[str]:
    """Return what is wrong with the recompute arguments of a model of ``layers`` layers, each in one line."""
    granularity: str | None = getattr(args, "recompute_granularity", None)
    if getattr(args, "recompute_activations", False):
        granularity = "selective"
    method: str | None = getattr(args, "recompute_method", None)
    count: int | None = getattr(args, "recompute_num_layers", None)
    modules: list[str] | None = getattr(args, "recompute_modules", None)
    if granularity == "full":
        return _full(method, count, modules, layers)
    of_full = {"recompute_method": method, "recompute_num_layers": count}
    faults = [
        f"{name} is {value!r} without recompute_granularity full, where alone it means something; leave it out"
        for name, value in of_full.items()
        if value is not None
    ]
    if granularity == "selective":
        return faults + _selective(modules, bool(getattr(args, "moe_grouped_gemm", False)))
    # Megatron's config fills in core_attn where nothing was asked for.
    if modules is not None and modules != ["core_attn"]:
        faults.append(
            f"recompute_modules is {modules} without recompute_granularity selective; add it or leave both out"
        )
    return faults


def _full(method: str | None, count: int | None, modules: Any, layers: int) -> list[str]:
    faults = []
    if method not in ("uniform", "block"):
        faults.append(
            f"recompute_method is {method!r} with recompute_granularity full; pass uniform or block"
        )
    if count is None or not 1 <= count <= layers:
        faults.append(
            f"recompute_num_layers is {count} with recompute_granularity full; pass 1 to {layers}"
        )
    if modules is not None and modules != ["core_attn"]:
        faults.append(
            f"recompute_modules is {modules} with recompute_granularity full, which takes whole layers; leave it out"
        )
    return faults


def _selective(modules: list[str] | None, grouped: bool) -> list[str]:
    if modules is None:
        return []  # Megatron's default, core_attn
    faults = []
    foreign = [name for name in modules if name not in RECOMPUTE_MODULES]
    if foreign or not modules:
        faults.append(
            f"recompute_modules is {modules}; pass some of {', '.join(RECOMPUTE_MODULES)}"
        )
    if "moe_act" in modules and not torch.cuda.is_available():
        faults.append(
            "recompute_modules has moe_act, for which Megatron asks for moe_grouped_gemm, and for that for a GPU; "
            "on CPU use moe, or build the model in Python"
        )
    elif "moe_act" in modules and not grouped:
        faults.append(
            "recompute_modules has moe_act, for which Megatron asks for moe_grouped_gemm; add it"
        )
    return faults
