"""One rank's part of a forward and backward under context parallelism, told in terms of whole rows.

The one idea: every rank passes the same rows and reports the same things (logits, gradients summed over the ranks, the selection
of every token in its place), so that a world of any size is compared with a world of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_xorl.config.adapter import AdapterConfig
from tests.layers.parity_case import token_ids
from tests.training.harness import index_sets, randomise

TOPK = 32


@dataclass(frozen=True)
class Row:
    """What is put through the model."""

    length: int
    batch: int = 1
    documents: tuple[int, ...] | None = None
    split: str = "zigzag"

    def bounds(self) -> Tensor | None:
        if self.documents is None:
            return None
        return torch.tensor([0, *torch.tensor(self.documents).cumsum(0)], dtype=torch.int32)


ROWS = {
    # Of lengths that nothing divides: the cut falls anywhere, forward_logits pads.
    "two rows": Row(109, 2),
    "two rows, contiguous": Row(109, 2, split="contiguous"),
    "no longer than topk": Row(27),
    "documents": Row(109, 1, (45, 9, 1, 1, 53)),
    "documents, contiguous": Row(109, 1, (45, 9, 1, 1, 53), "contiguous"),
    "a document within one chunk": Row(112, 1, (3, 5, 2, 102)),
    "documents cut one by one": Row(112, 1, (48, 8, 16, 40), "documents"),
    "documents cut one by one, and a tail": Row(112, 1, (48, 8, 16), "documents"),
}


@dataclass
class Told:
    """Of the whole row: logits, gradients of every factor, and bool ``[b, s, keys]`` of every layer."""

    logits: Tensor
    gradients: dict[str, Tensor]
    selected: dict[int, Tensor]
    tensor_ranks: int = 1


def start(directory: str, layout: dict[str, int], dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model on this rank, all factors random."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.model import load_model

    use_cpu()
    initialize(**layout)
    model = load_model(directory, AdapterConfig(rank=4, alpha=8), dtype=dtype)
    randomise(model)
    return model


def tell(model: Any, row: Row) -> Told:
    """Forward and backward of one row, put together over the context ranks."""
    from megatron.core import parallel_state

    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.layers.context import use_split
    from megatron_xorl.training.model import forward_logits

    use_split(model, row.split)
    group = parallel_state.get_context_parallel_group()
    model.zero_grad()
    with watched(model) as selected:
        logits = forward_logits(model, token_ids(row.batch, row.length), row.bounds())
    assert logits is not None
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(11))
    (logits * weights).sum().backward()
    gradients = {}
    for name, (_, _, parameter) in named_factors(model).items():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.float().clone()  # summed as Megatron's buffers are
        dist.all_reduce(gradients[name], group=group)
    return Told(
        logits.detach(),
        gradients,
        selected,
        parallel_state.get_tensor_model_parallel_world_size(),
    )


@contextmanager
def watched(model: Any) -> Iterator[dict[int, Tensor]]:
    """Selections of every layer, full and shared, in places of the row."""
    from megatron.core import parallel_state

    from megatron_xorl.layers.attention import SparseLatentAttention

    found: dict[int, Tensor] = {}
    size = parallel_state.get_context_parallel_world_size()
    hooks, places = [], []

    for attention in model.modules():
        if not isinstance(attention, SparseLatentAttention):
            continue
        original = attention._place

        def placed(*args: Any, original: Callable[..., Any] = original) -> Any:
            place, visible = original(*args)
            places.append(place)
            return place, visible

        def seen(module: Any, _: Any, out: Any) -> None:
            local = out[1]
            sets = index_sets(local, local.shape[0] * size).transpose(0, 1)
            found[module.layer_number - 1] = places[-1].whole(sets.to(torch.uint8)).bool()

        attention._place = placed
        hooks.append(attention.register_forward_hook(seen))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        for attention in model.modules():
            vars(attention).pop("_place", None)


def _positions_of_the_rank(patch: pytest.MonkeyPatch) -> None:
    import megatron_xorl.layers.attention as attention

    original = attention.rotary_cos_sin

    def counted(positions: Tensor, *rest: Any) -> Any:
        return original(torch.arange(positions.shape[0]).unsqueeze(1), *rest)

    patch.setattr(attention, "rotary_cos_sin", counted)


def _own_keys_alone(patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.indexer import Indexer
    from megatron_xorl.layers.visible import VisibleKeys

    legal, forward = VisibleKeys.legal, Indexer.forward
    own: list[Tensor] = []

    def indexed(self: Any, *args: Any) -> Tensor:
        own[:] = [args[-1].slots]
        return forward(self, *args)

    def local(self: VisibleKeys, queries: slice, row: int, begin: int, end: int) -> Tensor:
        return legal(self, queries, row, begin, end) & torch.isin(torch.arange(begin, end), own[0])

    patch.setattr(Indexer, "forward", indexed)
    patch.setattr(VisibleKeys, "legal", local)


def _keys_in_the_order_of_the_ranks(patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.context import Placement

    original = Placement.whole

    def unsorted(self: Placement, x: Tensor, **named: Any) -> Tensor:
        whole = original(self, x, **named)
        return whole[self.order] if x.dim() == 3 and x.shape[-1] < 200 else whole

    patch.setattr(Placement, "whole", unsorted)


def _bounds_of_the_rank(patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.visible import VisibleKeys

    def first(self: VisibleKeys, slots: Tensor) -> VisibleKeys:
        return VisibleKeys(self.first[: len(slots)], self.last[: len(slots)])

    patch.setattr(VisibleKeys, "of", first)


def _gradients_kept_to_the_rank(patch: pytest.MonkeyPatch) -> None:
    import megatron_xorl.layers.context as context

    def unreduced(mine: Tensor, wide: Tensor, group: Any) -> None:
        mine.copy_(wide.chunk(group.size())[group.rank()])

    patch.setattr(context.dist, "reduce_scatter_tensor", unreduced)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "positions counted within the rank": (_positions_of_the_rank, "logits"),
    "causal bounds counted within the rank": (_bounds_of_the_rank, "selected"),
    "top-k over the rank's own keys": (_own_keys_alone, "selected"),
    "keys left in the order of the ranks": (_keys_in_the_order_of_the_ranks, "logits"),
    "gradients of gathered keys not reduced": (_gradients_kept_to_the_rank, "gradients"),
}
"""Each with the check that must see it."""
