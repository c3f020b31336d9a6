"""Attach the adapters of an inventory to a built model, freeze everything else, and check the contract.

One idea: the inventory says what exists and what trains; the model is made to agree with it, and
then checked against it. After :func:`attach_adapters` the set of parameters that require a gradient
is exactly the trainable part of the inventory that this rank owns; anything more or less is a
fault.

``frozen_factors: keep`` builds out-of-scope factors with ``lora_B == 0``, so they contribute
exactly nothing; ``drop`` leaves them out of the inventory. Both train the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from megatron.core import parallel_state
from torch import nn

from megatron_xorl.adapters.available import check_available
from megatron_xorl.adapters.inventory import Factor, Inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import AdapterError
from megatron_xorl.layers.base import megatron_modules
from megatron_xorl.layers.host import AdapterHost
from megatron_xorl.layers.lora import FactorSlice, LoraPair
from megatron_xorl.layers.switch import hosts_of, idle_adapters, refuse_aside
from megatron_xorl.parallel.ownership import mark_ownership
from megatron_xorl.weights.names import hf_tensors

__all__ = [
    "attach_inventory",
    "build_pair",
    "check_gradients",
    "check_trainability",
    "freeze",
    "lora_pairs",
    "named_factors",
]


def freeze(model: nn.Module) -> None:
    """Make every parameter of the base untrainable, and let gradients start at the embedding's output.

    A frozen embedding returns a tensor that needs no gradient, and a reentrant activation
    checkpoint whose input needs none silently drops the gradients of all adapters inside it
    (Megatron-Bridge issue 1750).
    """
    model.requires_grad_(False)
    embedding = getattr(model, "embedding", None)
    if embedding is not None and model.config.recompute_granularity is not None:
        embedding.register_forward_hook(_require_grad)


def _require_grad(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output.detach().requires_grad_() if torch.is_grad_enabled() else output


def attach_inventory(
    model: nn.Module,
    glm: GlmConfig,
    adapter: AdapterConfig,
    inventory: Inventory,
    *,
    seed: int,
    idle: str | None = None,
) -> None:
    """Build the factors of ``inventory`` that this pipeline stage owns and mark what trains; under a name, as an idle adapter.

    Raises:
        AdapterError: the model already carries adapters, or the configuration asks for what is not built yet.
    """
    check_available(adapter)
    if idle is None and (any(lora_pairs(model)) or idle_adapters(model)):
        raise AdapterError(
            "the model already carries adapters; add another configuration with mx.add_adapter, or build a fresh model"
        )
    modules = megatron_modules(model)
    targets = set(inventory.targets)
    for name, leaves in _homes(glm).items():
        if name not in modules or not leaves.keys() & targets:
            continue
        module = modules[name]
        assert isinstance(module, AdapterHost)
        module.set_slots(tuple(leaves.values()))
        for target, leaf in leaves.items():
            if target in targets:
                pair = _pair_of(module, target, inventory, adapter, seed)
                module.attach(leaf, pair.requires_grad_(False) if idle else pair, idle)


def _homes(glm: GlmConfig) -> dict[str, dict[str, str]]:
    """``{Megatron module: {target: leaf}}`` from the name table, in row order; a bank is named without its expert."""
    homes: dict[str, dict[str, str]] = {}
    for row in hf_tensors(glm):
        if row.megatron is None:
            continue
        projection = row.hf.removesuffix(".weight")
        if row.expert is not None:
            projection = projection.replace(f".experts.{row.expert}.", ".experts.")
        home = homes.setdefault(row.megatron.rpartition(".")[0], {})
        home[projection] = projection.rpartition(".")[2]
    return homes


def _pair_of(
    host: AdapterHost, target: str, inventory: Inventory, adapter: AdapterConfig, seed: int
) -> LoraPair:
    a, b = (_owned(inventory.by_name[f"{target}.lora_{side}"]) for side in "AB")
    scale = adapter.scale_of(a.factor.rank)
    return build_pair(host, a, b, scale=scale, seed=seed, dropout=adapter.dropout)


def build_pair(
    host: AdapterHost,
    a: FactorSlice,
    b: FactorSlice,
    *,
    scale: float,
    seed: int,
    dropout: float = 0.0,
) -> LoraPair:
    """Slices ``a`` and ``b`` of two factors in the dtype and on the device of ``host``'s base, marked for what trains."""
    base = host.base
    device = next(base.buffers()).device
    pair = LoraPair(a, b, scale=scale, dtype=base.dtype, device=device, seed=seed, dropout=dropout)
    for factor, _, parameter in pair.named_factors():
        parameter.requires_grad_(factor.trainable)
        mark_ownership(parameter, factor, **_sizes())
    return pair


def _sizes() -> dict[str, int]:
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _owned(factor: Factor) -> FactorSlice:
    bank = len(factor.shape) == 3
    tp = (
        (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        if bank
        else (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
    )
    ep = (
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    return FactorSlice(factor, tp, ep)


def lora_pairs(models: nn.Module | Iterable[nn.Module]) -> Iterator[LoraPair]:
    """Every adapted projection of the active adapter of a model, or of the chunks of a pipeline stage, in model order.

    Raises:
        AdapterError: the adapters are merged or disabled: whoever asks would find none, and train or save nothing.
    """
    for model in [models] if isinstance(models, nn.Module) else models:
        for module in model.modules():
            if isinstance(module, AdapterHost):
                refuse_aside(module)
            elif isinstance(module, LoraPair):
                yield module


def named_factors(
    models: nn.Module | Iterable[nn.Module], idle: str | None = None
) -> dict[str, tuple[Factor, FactorSlice, nn.Parameter]]:
    """``{logical factor name: (factor, owned slice, parameter)}`` of this rank: of the active adapter, or of an idle one.

    Raises:
        AdapterError: the active adapter was asked for, and is merged or disabled.
    """
    held = models
    if idle is not None:
        held = [host.idle[idle] for host in hosts_of(models) if idle in host.idle]
    return {
        factor.name: (factor, piece, param)
        for pair in lora_pairs(held)
        for factor, piece, param in pair.named_factors()
    }


def check_trainability(
    models: nn.Module | Iterable[nn.Module], *, allow_nonzero_frozen: bool = False
) -> None:
    """Check that exactly the trainable factors require a gradient and that frozen pairs contribute nothing.

    Raises:
        AdapterError: a base parameter trains, a pair is split, trainability differs from the inventory, or a frozen B is not 0.
    """
    chunks = [models] if isinstance(models, nn.Module) else list(models)
    factors = {id(param): factor for factor, _, param in named_factors(chunks).values()}
    faults = []
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            factor = factors.get(id(parameter))
            if factor is None and parameter.requires_grad:
                faults.append(f"base parameter {name} requires a gradient")
            elif factor is not None and parameter.requires_grad != factor.trainable:
                faults.append(
                    f"{factor.name} requires_grad is {parameter.requires_grad}, the inventory says {factor.trainable}"
                )
    for pair in lora_pairs(chunks):
        (a, _, _), (b, _, _) = pair.named_factors()
        if a.trainable != b.trainable:
            faults.append(f"{pair.target}: lora_A and lora_B must train together")
        if not b.trainable and not allow_nonzero_frozen and bool(pair.lora_B.detach().ne(0).any()):
            faults.append(
                f"{b.name} is frozen but not zero; set allow_nonzero_frozen: true to keep it contributing"
            )
    if faults:
        shown = "; ".join(faults[:5])
        raise AdapterError(
            f"{len(faults)} trainability faults: {shown}; build the model through the specs and do not change requires_grad"
        )


def check_gradients(models: nn.Module | Iterable[nn.Module]) -> None:
    """Check after a backward pass that trainable factors have a gradient and frozen ones have none.

    Raises:
        AdapterError: names the factors.
    """
    faults = []
    for name, (factor, _, parameter) in named_factors(models).items():
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if factor.trainable and gradient is None:
            faults.append(f"{name} trains and has no gradient")
        if not factor.trainable and gradient is not None:
            faults.append(f"{name} is frozen and has a gradient")
    if faults:
        raise AdapterError(
            f"{len(faults)} gradient faults: {'; '.join(faults[:5])}; every trainable factor must take part in the forward"
        )
