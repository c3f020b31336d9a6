"""Several adapters on one frozen base: each with its own configuration, inventory and factors, one of them active.

    mx.add_adapter(model, "poems", mx.AdapterConfig(rank=8, alpha=16))
    mx.add_adapter(model, "passwords", "exported/passwords")
    mx.set_adapter(model, "passwords")

One idea: adding changes nothing that the model computes or trains. The new adapter waits outside the module tree until
``set_adapter`` (``layers.switch``), built by the same code and drawn from the same names as one that is alone.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from megatron_xorl.adapters.inventory import Inventory, build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError
from megatron_xorl.layers.attach import attach_inventory
from megatron_xorl.layers.switch import (
    adapter_names,
    hosts_of,
    idle_adapters,
    refuse_aside,
    remove_adapter,
)
from megatron_xorl.training.adapter_io import load_adapter
from megatron_xorl.training.model import DTYPE_NAMES
from megatron_xorl.weights.adapter_files import AdapterFile

__all__ = ["add_adapter"]


def add_adapter(
    model: nn.Module, name: str, adapter: AdapterConfig | str | Path, *, seed: int = 1234
) -> Inventory:
    """Add an adapter to a loaded model, idle, and return its inventory.

    Args:
        model: from :func:`~megatron_xorl.training.model.load_model`.
        name: to call it by; not a name in use.
        adapter: its configuration (A drawn from ``seed``, B zero), or the directory of an exported one, which is loaded.
        seed: of A.

    Raises:
        AdapterError: the name is taken or empty; the directory is damaged or of another base; adapters are merged or disabled.
        TargetError: an entry of the adapter's targets is wrong.
    """
    if not name or name in adapter_names(model):
        raise AdapterError(
            f"adapter name {name!r} is {'taken' if name else 'empty'}; the model has {', '.join(adapter_names(model)) or 'none'}"
        )
    for host in hosts_of(model):
        refuse_aside(host)
    config = adapter if isinstance(adapter, AdapterConfig) else AdapterFile(adapter).adapter
    glm = model.glm_config
    inventory = build_inventory(glm, config, dtype=DTYPE_NAMES[model.config.params_dtype])
    attach_inventory(model, glm, config, inventory, seed=seed, idle=name)
    idle_adapters(model)[name] = (config, inventory)
    if not isinstance(adapter, AdapterConfig):
        try:
            load_adapter(model, adapter, name=name)
        except Exception:
            remove_adapter(model, name)
            raise
    return inventory
