"""What an adapter directory holds, told from its own files: no base, no model.

The one idea: counts come from the tensors in the file, so the report cannot repeat a wrong claim of
``adapter_config.json``; only scope and base are taken from there.
"""

from __future__ import annotations

from typing import Any

from megatron_xorl.adapters.carried import carried_targets
from megatron_xorl.adapters.formats import FORMATS, file_size
from megatron_xorl.adapters.scopes import REGIONS
from megatron_xorl.adapters.servers import server_notes
from megatron_xorl.errors import AdapterError
from megatron_xorl.weights.adapter_files import AdapterFile
from megatron_xorl.weights.adapter_writer import SPELLED

__all__ = ["adapter_report"]


def adapter_report(file: AdapterFile) -> dict[str, Any]:
    """Describe an adapter directory.

    Returns:
        ``format``, ``scope``, ``frozen`` (targets outside the scope that contribute all the same), ``rank`` (as configured: a
        number, or numbers by region), ``alpha``, ``rslora``, ``dtype``, ``factors``, ``parameters`` and ``bytes`` (logical, each
        ``total`` and ``by_region``),
        ``sizes`` (bytes the same factors take in each format that can hold them), ``base_model``, ``base_fingerprint``,
        ``written_by`` (``megatron-xorl`` or ``others``), ``servers``.
    """
    totals = {name: dict.fromkeys(REGIONS, 0) for name in ("factors", "parameters", "bytes")}
    for factor in file.factors:
        totals["factors"][factor.region] += 1
        totals["parameters"][factor.region] += factor.numel
        totals["bytes"][factor.region] += factor.nbytes
    return {
        "format": file.format,
        "scope": file.adapter.glm52_lora_scope,
        "frozen": list(carried_targets(file.factors)),
        "rank": file.adapter.rank,
        "alpha": file.adapter.alpha,
        "rslora": file.adapter.rslora,
        "dtype": sorted({SPELLED[factor.dtype] for factor in file.factors}),
        **{
            name: {"total": sum(by_region.values()), "by_region": by_region}
            for name, by_region in totals.items()
        },
        "sizes": _sizes(file),
        "base_model": file.base_model,
        "base_fingerprint": file.base_fingerprint,
        "written_by": "megatron-xorl" if file.own else "others",
        "servers": server_notes(file.factors, file.format, rslora=file.adapter.rslora),
    }


def _sizes(file: AdapterFile) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {}
    for format in FORMATS:
        try:
            sizes[format] = file_size(file.factors, format)
        except AdapterError:
            sizes[format] = None
    return sizes
