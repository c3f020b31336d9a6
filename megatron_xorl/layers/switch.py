"""Which adapter takes part in the forward: one of several, or none for a while.

One idea: what takes part is exactly what stands in ``AdapterHost.adapters``; an adapter is switched by moving its pairs there,
or away. Layers know nothing of it, and a model with nothing active runs the very steps of one without adapters. What waits is
outside the module tree: no optimizer, DDP, state dict or count of parameters sees it, and it costs memory but no time.

Refused: anything that would read or train the factors while they are set aside (:func:`refuse_aside`), and a switch in training
mode once Megatron's DDP has given the factors gradient buffers: those of another adapter would have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from megatron_xorl.adapters.inventory import Inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError, nearest
from megatron_xorl.layers.host import AdapterHost
from megatron_xorl.layers.lora import LoraPair

__all__ = [
    "DEFAULT",
    "HeldAdapter",
    "active_adapter",
    "adapter_names",
    "disable_adapters",
    "held_adapter",
    "hosts_of",
    "idle_adapters",
    "refuse_aside",
    "remove_adapter",
    "set_adapter",
]

DEFAULT = "default"
"""Name of the adapter that ``attach_adapters`` and ``load_model(…, adapters=…)`` make."""


def hosts_of(models: nn.Module | Iterable[nn.Module]) -> Iterator[AdapterHost]:
    """Every frozen weight of a model, or of the chunks of a pipeline stage, that can carry adapters, in model order."""
    for model in [models] if isinstance(models, nn.Module) else models:
        yield from (module for module in model.modules() if isinstance(module, AdapterHost))


def refuse_aside(host: AdapterHost) -> None:
    """Return if the pairs of ``host`` are where they belong.

    Raises:
        AdapterError: they are merged into the base, or disabled.
    """
    if host.merged:
        raise AdapterError(
            "the adapters are merged into the base; call mx.unmerge_adapters(model) before they are trained, saved, exported, "
            "disabled or switched"
        )
    if host.aside:
        raise AdapterError(
            "the adapters are disabled; leave the disable_adapters block before they are trained, saved, exported, merged or "
            "switched"
        )


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Run the bare base inside the block: bit for bit what a model without adapters computes.

    Blocks nest; whatever ends a block, its adapters are back. Gradients of what was computed inside are to be taken inside, where
    activations are recomputed.

    Raises:
        AdapterError: the adapters are merged into the base.
    """
    hosts = list(hosts_of(model))
    for host in hosts:
        if host.merged:
            refuse_aside(host)
    for host in hosts:
        host.set_aside()
    try:
        yield
    finally:
        for host in hosts:
            host.take_back()


def active_adapter(model: nn.Module) -> str | None:
    """Name of the adapter that takes part in the forward; None where there is none."""
    if not hasattr(model, "inventory"):
        return None
    name: str = getattr(model, "adapter_name", DEFAULT)
    return name


def idle_adapters(model: nn.Module) -> dict[str, tuple[AdapterConfig, Inventory]]:
    """Configuration and inventory of the adapters that wait, by name; to be changed in place."""
    if not hasattr(model, "idle_adapters"):
        model.idle_adapters = {}
    idle: dict[str, tuple[AdapterConfig, Inventory]] = model.idle_adapters
    return idle


def adapter_names(model: nn.Module) -> tuple[str, ...]:
    """Names of all adapters of a model, the active one first."""
    active = active_adapter(model)
    return (*([] if active is None else [active]), *idle_adapters(model))


@dataclass(frozen=True)
class HeldAdapter:
    """One adapter of a model; ``idle`` is its name unless it is the active one."""

    config: AdapterConfig
    inventory: Inventory
    idle: str | None


def held_adapter(model: nn.Module, name: str | None = None) -> HeldAdapter:
    """Return an adapter of ``model``, active or not; None: the active one.

    Raises:
        AdapterError: there is no such adapter.
    """
    active = active_adapter(model)
    if name is None and active is None:
        waiting = ", ".join(idle_adapters(model))
        fix = f"call mx.set_adapter with one of {waiting}" if waiting else "call attach_adapters first"  # fmt: skip
        raise AdapterError(f"the model carries no {'active ' if waiting else ''}adapters; {fix}")
    if name in (None, active):
        return HeldAdapter(model.adapter_config, model.inventory, None)
    assert name is not None
    if name not in idle_adapters(model):
        known = adapter_names(model)
        close = nearest(name, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AdapterError(
            f"the model has no adapter {name!r} (it has: {', '.join(known) or 'none'}){hint}"
        )
    return HeldAdapter(*idle_adapters(model)[name], name)


def set_adapter(model: nn.Module, name: str | None) -> None:
    """Let adapter ``name``, and no other, take part in the forward; with None the bare base.

    Its factors train as its configuration says, those of every other adapter require no gradient. In evaluation mode a model may
    be switched after Megatron's DDP was built around it; a factor without a gradient buffer then requires no gradient either.

    Raises:
        AdapterError: there is no such adapter; the adapters are merged or disabled; or the model trains and DDP is built.
    """
    active = active_adapter(model)
    wanted = None if name is None else held_adapter(model, name)
    for host in hosts_of(model):
        refuse_aside(host)
    if name == active:
        return
    buffered = _buffered(model)
    if buffered and model.training:
        raise AdapterError(
            f"the optimizer's gradient buffers were built for adapter {active!r}, and the model is in training mode; build a new "
            "model to train another adapter, or call model.eval() to switch for inference"
        )
    if active is not None:
        idle_adapters(model)[active] = (model.adapter_config, model.inventory)
        for host in hosts_of(model):
            host.put_away(active)
        for described in ("adapter_config", "inventory", "adapter_name"):
            vars(model).pop(described, None)
    if name is None or wanted is None:
        return
    del idle_adapters(model)[name]
    for host in hosts_of(model):
        host.take_out(name)
        for pair in host.adapters.values():
            assert isinstance(pair, LoraPair)
            for factor, _, parameter in pair.named_factors():
                parameter.requires_grad_(
                    factor.trainable and (not buffered or hasattr(parameter, "main_grad"))
                )
    model.adapter_name = name
    model.adapter_config, model.inventory = wanted.config, wanted.inventory


def remove_adapter(model: nn.Module, name: str) -> None:
    """Forget an adapter that is not active, factors and all.

    Raises:
        AdapterError: there is no such adapter, it is active, or the adapters are merged or disabled.
    """
    held_adapter(model, name)
    if name == active_adapter(model):
        raise AdapterError(
            f"adapter {name!r} is active; call mx.set_adapter(model, None) or another name first"
        )
    for host in hosts_of(model):
        refuse_aside(host)
        host.idle.pop(name, None)
    del idle_adapters(model)[name]


def _buffered(model: nn.Module) -> bool:
    """Whether Megatron's DDP has given any factor a gradient buffer."""
    return any(
        hasattr(parameter, "main_grad")
        for host in hosts_of(model)
        for held in (host.adapters, *host.idle.values())
        for parameter in held.parameters()
    )
