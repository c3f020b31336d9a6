"""How a substitution is applied: rebind a name, exchange literals in code, wrap, or undo a compilation.

Each applier takes the paths (``package.module:attribute.path``) that an entry of the table names.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from megatron_xorl.parallel import standins
from megatron_xorl.parallel.literals import exchange_literals, resolve
from megatron_xorl.parallel.unequal import gathering_unequal

__all__ = [
    "Applier",
    "bind",
    "bind_each",
    "default_true",
    "exchange",
    "local_multi_tensor",
    "one_generator",
    "positions_on_this_cp_rank",
    "tensor_to_cpu",
    "with_unequal_parts",
    "without_grad",
    "without_jit_fuser",
]

type Applier = Callable[[tuple[str, ...]], None]


def bind(value: Any) -> Applier:
    """Return an ``apply`` that rebinds every named object to ``value``."""

    def apply(paths: tuple[str, ...]) -> None:
        for path in paths:
            resolve(path)
            module, _, attribute = path.partition(":")
            owner, _, leaf = attribute.rpartition(".")
            setattr(resolve(f"{module}:{owner}"), leaf, value)

    return apply


def bind_each(*values: Any) -> Applier:
    """Return an ``apply`` that rebinds the named objects to ``values``, in order."""

    def apply(paths: tuple[str, ...]) -> None:
        for path, value in zip(paths, values, strict=True):
            bind(value)((path,))

    return apply


def exchange(changes: dict[str, str]) -> Applier:
    """Return an ``apply`` that exchanges string literals in every named function."""

    def apply(paths: tuple[str, ...]) -> None:
        for path in paths:
            exchange_literals(path, changes)

    return apply


def one_generator(paths: tuple[str, ...]) -> None:
    """Bind the random-state functions, in the order of the table, to the CPU generator's."""
    bind_each(
        standins.get_rng_state,
        standins.get_rng_state,
        standins.set_rng_state,
        standins.manual_seed,
        standins.get_rng_state,
        standins.set_rng_state,
    )(paths)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        standins.DropSharedGeneratorWarning()
    )


def without_grad(paths: tuple[str, ...]) -> None:
    """Wrap every named function in no_grad."""
    for path in paths:
        bind(torch.no_grad()(resolve(path)))((path,))


def with_unequal_parts(paths: tuple[str, ...]) -> None:
    """Let every named gather take parts of unequal length."""
    for path in paths:
        bind(gathering_unequal(resolve(path)))((path,))


def default_true(paths: tuple[str, ...]) -> None:
    """Make the first parameter of every named function default to True (``allow_no_cuda``)."""
    for path in paths:
        function = resolve(path)
        function.__defaults__ = (True, *function.__defaults__[1:])


def without_jit_fuser(paths: tuple[str, ...]) -> None:
    """Give every function that the fuser has compiled its plain form back, and make the fuser do nothing."""
    bind(lambda function: function)(paths)
    loaded = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.") and module
    ]
    for module in loaded:
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        for owner in (module, *classes):
            for name, value in list(vars(owner).items()):
                if isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
                    setattr(owner, name, value._torchdynamo_orig_callable)


def local_multi_tensor(paths: tuple[str, ...]) -> None:
    """Bind the named multi-tensor operations to Megatron's own torch versions."""
    utils = resolve("megatron.core.utils")
    by_leaf = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "l2_norm_impl": utils.local_multi_tensor_l2_norm,
        "multi_tensor_l2norm": utils.local_multi_tensor_l2_norm,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        "multi_tensor_scale_tensor_impl": None,
    }
    for path in paths:
        bind(by_leaf[path.rpartition(":")[2]])((path,))


def tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Do what the original does for a CUDA tensor: split sizes must leave as numpy, gloo takes no tensor there."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def positions_on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """Return this context-parallel rank's two chunks of ``pos_emb`` along ``seq_dim``, without pinned memory."""
    size, rank = cp_group.size(), cp_group.rank()
    chunks = pos_emb.chunk(2 * size, dim=seq_dim)
    return torch.cat((chunks[rank], chunks[2 * size - rank - 1]), dim=seq_dim)
