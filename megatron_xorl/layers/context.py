"""Context parallelism: which tokens of a sequence each rank holds, and the way from the ranks' keys to the sequence's.

One idea: a split is a list of slots. Every rank holds the queries of some slots of the row; keys are gathered from all ranks
and put in the order of the row, so that whatever is said of keys (legal ranges, selections, positions) is said in slots of the
whole row, the same words on one rank and on sixteen. The list is the one truth for both the data that is cut and the attention.

* ``zigzag`` (default): the row is cut into ``2 * cp`` equal chunks and rank i holds chunks i and ``2 * cp - 1 - i``, since late
  tokens see more keys than early ones. It is what Megatron's ``get_batch_on_this_cp_rank`` does to a row. The row is cut whole:
  packed documents may begin and end anywhere in it.
* ``contiguous``: rank i holds the i-th part.
* ``documents``: zigzag within each packed document, which Megatron's function does to a batch that holds ``cu_seqlens``, unless
  told to balance by sequence; every (padded) document must be a multiple of ``2 * cp``.

Refused: a row or a document that cannot be cut evenly, and another split than these.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from megatron_xorl.errors import DataError, LayoutError
from megatron_xorl.layers.visible import document_bounds

__all__ = ["SPLITS", "ContextSplit", "Placement", "own_part", "split_of", "use_split"]

SPLITS = ("zigzag", "contiguous", "documents")


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one forward stand.

    ``order``: int64 ``[S]``, slots as the ranks hold them, rank after rank; None on one rank, which holds all in order.
    """

    order: Tensor | None
    group: dist.ProcessGroup

    @property
    def slots(self) -> Tensor | None:
        """int64 ``[S/cp]``: slots of this rank's tokens; None: all."""
        return (
            None if self.order is None else self.order.chunk(self.group.size())[self.group.rank()]
        )

    def whole(self, x: Tensor, *, partial_gradients: bool = True) -> Tensor:
        """All ranks' ``x`` ``[S/cp, ...]`` in the order of the row, ``[S, ...]``.

        Args:
            x: this rank's part.
            partial_gradients: the ranks do different things with the result, so a part's gradient is the sum of what the ranks
                have for it, taken in fp32 at least. No: they do the same, and each rank's gradient is complete.
        """
        if self.order is None:
            return x
        result: Tensor = _Whole.apply(x, self, partial_gradients)
        return result


@dataclass(frozen=True)
class ContextSplit:
    """How rows are cut over the ranks of ``group``."""

    group: dist.ProcessGroup
    kind: str = "zigzag"

    def place(
        self,
        length: int,
        device: torch.device,
        packed: PackedSeqParams | None = None,
        batch: int = 1,
    ) -> Placement:
        """Place the tokens of a row.

        Args:
            length: tokens of the whole row, S.
            device: of the result.
            packed: documents of the row; only the split ``documents`` looks at them.
            batch: rows.

        Raises:
            DataError: ``length``, or a document, cannot be cut evenly.
            LayoutError: the split is none of :data:`SPLITS`.
        """
        size = self.group.size()
        if size == 1:
            return Placement(None, self.group)
        if self.kind not in SPLITS:
            raise LayoutError(
                f"context split is {self.kind!r}, expected one of {', '.join(SPLITS)}"
            )
        if self.kind == "contiguous":
            _check_even("a row", length, size)
            return Placement(torch.arange(length, device=device), self.group)
        bounds = [0, length]
        if self.kind == "documents" and packed is not None:
            bounds = document_bounds(packed, length, batch).tolist()
            bounds += [length] if bounds[-1] < length else []
        documents = []
        for begin, end in itertools.pairwise(bounds):
            if begin == end:
                continue
            what = "a row" if bounds == [0, length] else f"the document of tokens {begin} to {end}"
            _check_even(what, end - begin, 2 * size)
            chunks = torch.arange(begin, end, device=device).view(2 * size, -1)
            documents.append(torch.stack([chunks[:size], chunks[size:].flip(0)], dim=1))
        # [cp, pieces of each document one after another]
        order = torch.cat([pieces.flatten(1) for pieces in documents], dim=1)
        return Placement(order.flatten(), self.group)


def _check_even(what: str, length: int, unit: int) -> None:
    if length % unit:
        below = length // unit * unit
        legal = f"{below} or {below + unit}" if below else f"{unit}"
        raise DataError(
            f"{what} has {length} tokens, which do not cut into {unit} equal parts for context parallelism; pad it to a multiple "
            f"of {unit}, nearest: {legal}"
        )


def own_part(batch: Mapping[str, Tensor], split: ContextSplit | None = None) -> dict[str, Tensor]:
    """What this context rank holds of a batch of whole rows.

    Args:
        batch: tensors ``[b, S, ...]``, cut along S; a tensor of one dimension (a number a row) is every rank's.
        split: None: zigzag over Megatron's context group.

    Raises:
        DataError: S cannot be cut evenly.
    """
    split = ContextSplit(parallel_state.get_context_parallel_group()) if split is None else split
    result = dict(batch)
    for key, value in batch.items():
        if value.dim() > 1:
            slots = split.place(value.shape[1], value.device).slots
            result[key] = value if slots is None else value.index_select(1, slots)
    return result


def split_of(model: nn.Module) -> ContextSplit:
    """The split that the attention of ``model`` was told of."""
    for module in model.modules():
        if isinstance(found := getattr(module, "context_split", None), ContextSplit):
            return found
    raise LayoutError(
        "the model has no sparse attention on this rank; expected one of megatron_xorl's"
    )


def use_split(model: nn.Module, kind: str) -> None:
    """Tell every attention of ``model`` how the rows that it gets are cut, one of :data:`SPLITS`.

    Raises:
        LayoutError: there is no such split.
    """
    if kind not in SPLITS:
        raise LayoutError(f"context split is {kind!r}, expected one of {', '.join(SPLITS)}")
    for module in model.modules():
        if isinstance(found := getattr(module, "context_split", None), ContextSplit):
            module.context_split = ContextSplit(found.group, kind)


class _Whole(torch.autograd.Function):
    """All-gather into the order of the row; backward takes this rank's part of the gradient, summed over the ranks or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, partial_gradients: bool) -> Tensor:
        ctx.placement, ctx.partial_gradients = placement, partial_gradients
        assert placement.order is not None
        gathered = x.new_empty(placement.group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=placement.group)
        return torch.empty_like(gathered).index_copy_(0, placement.order, gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        placement: Placement = ctx.placement
        assert placement.order is not None
        if not ctx.partial_gradients:
            return grad.index_select(0, placement.slots), None, None
        wide = grad.index_select(0, placement.order)
        wide = wide.to(torch.promote_types(grad.dtype, torch.float32))
        mine = wide.new_empty(wide.shape[0] // placement.group.size(), *wide.shape[1:])
        dist.reduce_scatter_tensor(mine, wide, group=placement.group)
        return mine.to(grad.dtype), None, None
