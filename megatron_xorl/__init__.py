"""LoRA fine-tuning of GLM-5.2 on Megatron-core, on the checkpoint's own block-FP8 bytes.

Names are loaded on first use (PEP 562), so that ``import megatron_xorl`` costs nothing and needs
neither torch nor Megatron: the tools that only read configurations run on any machine. ``_EXPORTS``
is the whole public surface, name by name, with the module each comes from.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {
    "AdapterConfig": "config.adapter",
    "GlmConfig": "config.model",
    "Inventory": "adapters.inventory",
    "MegatronXorlError": "errors",
    "ParallelLayout": "config.layout",
    "RunConfig": "config.run",
    "adapter_bytes": "plan.adapter_bytes",
    "adapter_names": "layers.switch",
    "add_adapter": "training.several",
    "attach_adapters": "training.model",
    "build_inventory": "adapters.inventory",
    "check_layout": "config.layout",
    "check_replicas": "training.replicas",
    "compare_states": "training.compare",
    "convert_checkpoint": "training.checkpoint_convert",
    "disable_adapters": "layers.switch",
    "dropout_keys": "layers.token_keys",
    "export_adapter": "training.adapter_io",
    "export_checkpoint": "training.checkpoint_export",
    "forward_logits": "training.model",
    "generate": "training.generation",
    "import_adapter": "weights.adapter_import",
    "initialize": "parallel.groups",
    "iter_adapter": "training.adapter_io",
    "load_adapter": "training.adapter_io",
    "load_adapter_config": "config.adapter",
    "load_chunks": "training.model",
    "load_glm_config": "config.model",
    "load_model": "training.model",
    "load_run_config": "config.run",
    "load_torch_state": "training.torch_state",
    "make_tiny": "convert.tiny",
    "materialize_adam_state": "training.adam_state",
    "merge_adapters": "layers.merge",
    "projections": "adapters.projections",
    "remove_adapter": "layers.switch",
    "save_torch_state": "training.torch_state",
    "select_targets": "adapters.targets",
    "set_adapter": "layers.switch",
    "shutdown": "parallel.groups",
    "start_from_adapter": "training.adapter_start",
    "trainable_factors": "training.model",
    "unfuse": "layers.unfuse",
    "unmerge_adapters": "layers.merge",
    "use_cpu": "parallel.cpu",
    "use_fp8": "fp8.engine",
    "verify_adapter": "training.adapter_verify",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
