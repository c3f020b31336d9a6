"""What is installed here, what will be used, and what is missing.

The one idea: look without touching. Packages are found by their metadata and files, not by
importing them, because importing the wrong ``apex`` (an unrelated package of that name is on the
package index) changes what Megatron-core chooses. Only torch is imported, to see the devices.

    megatron-xorl doctor
"""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["examine"]

_REQUIRED = {
    "torch": "pip install 'torch==2.14.*'",
    "megatron-core": "pip install 'megatron-core>=0.19.2,<0.20'",
    "safetensors": "pip install safetensors",
    "tokenizers": "pip install tokenizers",
    "pydantic": "pip install pydantic",
    "PyYAML": "pip install pyyaml",
    "numpy": "pip install numpy",
}
_OPTIONAL = {
    "triton": ("Triton kernels on a GPU", "it comes with torch's CUDA build"),
    "transformer-engine": ("TE linears and FusedAdam on a GPU", "pip install 'megatron-xorl[te]'"),
    "transformers": ("comparison with the reference model", "pip install 'megatron-xorl[test]'"),
    "peft": ("comparison with PEFT", "pip install 'megatron-xorl[test]'"),
    "matplotlib": ("plots", "pip install 'megatron-xorl[plot]'"),
}
_APEX_SOURCE = "build it from https://github.com/NVIDIA/apex (it is not on the package index)"


def examine() -> dict[str, Any]:
    """Return ``versions`` (name to version or None), ``backends`` (what will be used) and ``missing``.

    ``missing`` is a list of ``{name, required, needed_for, how}``, required ones first.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    apex = _apex()
    versions["apex"] = "NVIDIA" if apex == "nvidia" else None
    missing = [
        _missing(name, True, "everything", how)
        for name, how in _REQUIRED.items()
        if versions[name] is None
    ]
    missing += [
        _missing(name, False, *why) for name, why in _OPTIONAL.items() if versions[name] is None
    ]
    missing += _apex_note(apex)
    return {"versions": versions, "backends": _backends(versions), "missing": missing}


def _missing(name: str, required: bool, needed_for: str, how: str) -> dict[str, Any]:
    return {"name": name, "required": required, "needed_for": needed_for, "how": how}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _apex() -> str:
    """Return ``nvidia``, ``unrelated`` or ``none``, by the files of the package called apex."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "none"
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    return (
        "nvidia"
        if any((folder / "multi_tensor_apply").is_dir() for folder in folders)
        else "unrelated"
    )


def _apex_note(apex: str) -> list[dict[str, Any]]:
    needed_for = "FusedAdam on a GPU where Transformer Engine is absent"
    if apex == "nvidia":
        return []
    if apex == "none":
        return [_missing("apex", False, needed_for, _APEX_SOURCE)]
    how = "the installed package called apex is not NVIDIA's and misleads Megatron-core: pip uninstall apex; then, if wanted, "
    return [_missing("apex", False, needed_for, how + _APEX_SOURCE)]


def _backends(versions: dict[str, str | None]) -> dict[str, Any]:
    gpus = _gpus() if versions["torch"] else []
    if not gpus:
        return {
            "device": "cpu",
            "gpus": [],
            "communication": "gloo",
            "optimizer": "cpu adam",
        } | _fp8()
    fused = (
        "transformer_engine"
        if versions["transformer-engine"]
        else "apex"
        if versions["apex"]
        else "torch"
    )
    return {
        "device": "cuda",
        "gpus": gpus,
        "communication": "nccl",
        "optimizer": f"{fused} adam",
    } | _fp8()


def _fp8() -> dict[str, str]:
    """The FP8 engine's backend, mode and why, as a run would choose them; the C++ part is built if it was not yet."""
    if _version("torch") is None:
        return {"fp8": "none", "fp8_mode": "none", "fp8_why": "torch is missing"}
    from megatron_xorl.errors import PlatformError
    from megatron_xorl.fp8.engine import chosen

    try:
        found = chosen()
    except PlatformError as error:
        return {"fp8": "none", "fp8_mode": "none", "fp8_why": str(error)}
    kernels = found.backend.name == "triton"
    return {
        "fp8": found.backend.name,
        "fp8_mode": found.mode,
        "fp8_why": found.why,
        "sparse_attention": "triton (bf16, widths of powers of two), else torch"
        if kernels
        else "torch",
    }


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
