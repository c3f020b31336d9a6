"""What an adapter directory holds, told from its own files: no base, no model.

The one idea: counts come from the tensors in the file, so the report cannot repeat a wrong claim of
``adapter_config.json``; only format, scope and base are taken from there.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_xorl.adapters.scopes import REGIONS
from megatron_xorl.weights.adapter_files import ITEM_BYTES, AdapterFile

__all__ = ["adapter_report"]

_REGION_OF = (
    (".self_attn.", "attention"),
    (".mlp.experts.", "routed_experts"),
    (".mlp.shared_experts.", "shared_experts"),
    (".mlp.", "dense_mlp"),
    (".lm_head.", "lm_head"),
)


def adapter_report(file: AdapterFile) -> dict[str, Any]:
    """Describe an adapter directory.

    Returns:
        ``format``, ``scope``, ``rank`` (as configured: a number, or numbers by region), ``alpha``, ``dtype``, ``factors``,
        ``parameters`` and ``bytes`` (each ``total`` and ``by_region``), ``base_model``, ``base_fingerprint``.
    """
    tensors = file.tensors()
    totals = {name: dict.fromkeys(REGIONS, 0) for name in ("factors", "parameters", "bytes")}
    for key, (shape, dtype) in tensors.items():
        region = next(name for part, name in _REGION_OF if part in key)
        size = math.prod(shape)
        totals["factors"][region] += 1
        totals["parameters"][region] += size
        totals["bytes"][region] += size * ITEM_BYTES[dtype]
    own = file.document["megatron_xorl"]
    return {
        "format": own["format"],
        "scope": file.adapter.glm52_lora_scope,
        "rank": file.adapter.rank,
        "alpha": file.adapter.alpha,
        "dtype": sorted({dtype for _, dtype in tensors.values()}),
        **{
            name: {"total": sum(by_region.values()), "by_region": by_region}
            for name, by_region in totals.items()
        },
        "base_model": file.base_model,
        "base_fingerprint": file.base_fingerprint,
    }
