"""What the compiler makes of the Triton kernels, for ``megatron-xorl doctor --kernels``; no GPU is needed."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from typing import Any

from megatron_xorl.errors import PlatformError

__all__ = ["examine_kernels"]


def examine_kernels() -> list[dict[str, Any]]:
    """What the compiler makes of every Triton kernel on each target, no GPU needed; ``faults`` are the gates it fails.

    Raises:
        PlatformError: Triton is not installed, or this process interprets kernels.
    """
    if importlib.util.find_spec("triton") is None:
        raise PlatformError("Triton is not installed; it comes with torch's CUDA build")
    from megatron_xorl.kernels.aot import compile_all, faults

    try:
        return [asdict(one) | {"faults": faults(one)} for one in compile_all()]
    except RuntimeError as error:
        raise PlatformError(f"kernels cannot be compiled here: {error}") from error
