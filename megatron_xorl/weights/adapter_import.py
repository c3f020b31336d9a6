"""An adapter directory of any readable form into another: ours, PEFT's or XoRL's.

The one idea: reading gives logical factors and writing takes them, so that a conversion is one pass, a factor at a time, and
moves bytes without arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_xorl.adapters.formats import file_size
from megatron_xorl.adapters.servers import server_notes
from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import AdapterError
from megatron_xorl.weights.adapter_base import check_fits
from megatron_xorl.weights.adapter_files import AdapterFile
from megatron_xorl.weights.adapter_writer import write_adapter

__all__ = ["import_adapter"]


def import_adapter(
    source: str | Path,
    out: str | Path,
    format: str = "sglang_shared_outer",
    *,
    base: tuple[GlmConfig, str, str] | None = None,
    allow_expanded: bool = False,
) -> dict[str, Any]:
    """Write the adapter directory ``source`` again, in another format.

    Args:
        source: an adapter directory of this package, of PEFT or of XoRL.
        out: directory to make.
        format: ``sglang_shared_outer``, ``hf_peft`` or ``hf_peft_fused``.
        base: config, fingerprint and directory of the base, to check shapes and to record; without it both stay as ``source`` has
            them.
        allow_expanded: write an expanded form that is far larger than the shared one.

    Returns:
        ``{"source_format", "format", "factors", "bytes", "shared_bytes", "servers"}``.

    Raises:
        AdapterError: ``source`` cannot be read, is of another base, or ``format`` cannot hold it; ``out`` exists.
    """
    file = AdapterFile(source)
    base_model, fingerprint = file.base_model, file.base_fingerprint
    if base is not None:
        config, fingerprint, base_model = base
        if file.base_fingerprint not in (None, fingerprint):
            raise AdapterError(
                f"{source} was trained on a base with fingerprint {str(file.base_fingerprint)[:12]}, "
                f"{base_model} is {fingerprint[:12]}; use the base it was trained on"
            )
        check_fits(file, config)

    def factors() -> Iterator[tuple[str, Tensor]]:
        for factor in file.factors:
            yield factor.name, file.read(factor)

    write_adapter(
        Path(out),
        file.factors,
        factors(),
        file.adapter,
        base_model=base_model,
        base_fingerprint=fingerprint,
        format=format,
        forward=file.forward or {},
        allow_expanded=allow_expanded,
    )
    return {
        "source_format": file.format,
        "format": format,
        "factors": len(file.factors),
        "bytes": file_size(file.factors, format),
        "shared_bytes": file_size(file.factors, "sglang_shared_outer"),
        "servers": server_notes(file.factors, format, rslora=file.adapter.rslora),
    }
