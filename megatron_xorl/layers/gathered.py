"""Adapters are gathered before they are read, when Megatron overlaps the gathering of parameters with the forward.

The one idea: with ``overlap_param_gather`` Megatron waits for a parameter in a forward pre-hook of the module that owns it, and a
:class:`~megatron_xorl.layers.lora.LoraPair` is read by others and called by nobody (``kv_b_proj`` is not even a product of its
own). So whoever runs just before pairs are read calls them: each transformer layer for its own, the final norm for the head's.
The call computes nothing; Megatron's hook on it waits, and sends for the next bucket, which arrives while this layer computes.

Without the overlap there is no hook, and the calls cost microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_xorl.layers.host import AdapterHost

__all__ = ["gather_before_use", "gather_now"]


def gather_before_use(model: nn.Module) -> None:
    """Let every layer and the head of a model chunk call their pairs before they run."""
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            _call_before(module, _hosts(module))
    head = getattr(model, "output_layer", None)
    norm = getattr(model.decoder, "final_layernorm", None)
    if isinstance(head, AdapterHost) and norm is not None:
        _call_before(norm, [head])


def gather_now(models: nn.Module | Iterable[nn.Module]) -> None:
    """Wait for the parameters of all pairs; for who reads them outside a forward. Collective where the overlap is on."""
    for model in [models] if isinstance(models, nn.Module) else models:
        _call(_hosts(model))


def _hosts(module: nn.Module) -> list[AdapterHost]:
    return [part for part in module.modules() if isinstance(part, AdapterHost)]


def _call_before(module: nn.Module, hosts: list[AdapterHost]) -> None:
    def call(_module: nn.Module, _inputs: object) -> None:
        _call(hosts)

    module.register_forward_pre_hook(call)


def _call(hosts: list[AdapterHost]) -> None:
    for host in hosts:
        for pair in host.adapters.values():
            pair()
