"""What Megatron's ``--recompute-granularity selective --recompute-modules …`` means in our layers.

One idea: a module's name says what is computed again in backward. ``core_attn``, ``mla_up_proj`` (``layers.attention``),
``layernorm`` (``layers.block``) and ``moe_act`` (``layers.experts``) are ours; ``mlp``, ``moe`` and ``shared_experts`` are
Megatron's, which wrap our modules whole. Every form gives the gradients of a run without it, to the bit in fp32.

For ``layernorm`` and ``moe_act`` what costs memory is the output, which whatever follows keeps for its own backward.
Megatron-core 0.19.2 frees it by swapping storages in a C++ extension that it compiles during the first backward (and asks
Transformer Engine, which may be absent, for its FP8 state). :func:`freed` needs neither: what follows keeps a note instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

__all__ = ["freed", "one_edge", "recomputed_modules"]


def recomputed_modules(config: TransformerConfig) -> frozenset[str]:
    """Names of the modules that are computed again in backward; none unless the granularity is selective."""
    if config.recompute_granularity != "selective":
        return frozenset()
    return frozenset(config.recompute_modules or ())


def one_edge(x: Tensor) -> Tensor:
    """``x`` behind a node of its own, which sums the gradients of what follows before they go on.

    A module that uses its input several times and is sometimes a checkpoint needs this: floating-point sums depend on their
    order, and inside a checkpoint the module's terms are summed first.
    """
    return x.view_as(x)


@contextmanager
def freed(function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[Tensor]:
    """``function(x)``, which nothing that runs in this block keeps for backward: it is computed again from ``x`` there.

    Args:
        function: deterministic, of one tensor.
        x: kept instead of the output and of everything inside ``function``.
    """
    y: Tensor = tensor_parallel.checkpoint(function, False, x)
    again = _Again(function, x.detach())
    place = y.untyped_storage().data_ptr()

    def pack(kept: Tensor) -> Tensor | _View:
        if kept.untyped_storage().data_ptr() != place:
            return kept
        again.waiting += 1
        return _View(kept.size(), kept.stride(), kept.storage_offset())

    def unpack(kept: Tensor | _View) -> Tensor:
        return again.view(kept) if isinstance(kept, _View) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield y


class _View(NamedTuple):
    """Where a saved tensor stood in the output that is not kept."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Again:
    """The output, computed when it is first asked for and forgotten once every note has been redeemed."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.function, self.x = function, x
        self.value: Tensor | None = None
        self.waiting = 0
        self.redeemed = 0

    def view(self, note: _View) -> Tensor:
        if self.value is None:
            with torch.no_grad():
                self.value = self.function(self.x)
        result = self.value.as_strided(*note)
        self.redeemed += 1
        if self.redeemed == self.waiting:
            self.value, self.redeemed = None, 0
        return result
