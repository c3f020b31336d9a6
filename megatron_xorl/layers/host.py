"""A frozen weight that LoRA pairs stand on.

One idea: a base may be fused (gate|up, or Megatron's interleaved query-key-value) while its logical projections stay apart. The
host knows the rows of its output that belong to each, which may carry a pair of its own, and adds their deltas there.

Only ``adapters`` takes part in the forward, is registered, and is seen by DDP and optimizers. Pairs that wait (``idle``, by
adapter name), pairs that are set aside for a while (``aside``: disabled, or merged into the base) and the bytes that a merge
replaced (``original``) are held outside the module tree; ``.to()`` and casts reach them all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron_xorl.errors import AdapterError
from megatron_xorl.fp8.weight import FrozenWeight
from megatron_xorl.layers.lora import LoraPair

__all__ = ["AdapterHost", "Rows"]

Rows = tuple[slice, ...]
"""Output rows of one projection in a base: one range, or several in the projection's own row order."""


class AdapterHost(nn.Module):
    """A frozen weight ``[out, in]``, or a bank ``[E, out, in]``, with adapters on its output slots.

    Attributes:
        base: the local frozen weight.
        adapters: ``{leaf name: LoraPair}`` of the active adapter, e.g. ``{"gate_proj": …, "up_proj": …}``.
        slots: ``{leaf name: local output rows}``, in row order; empty until adapters are attached.
        idle: ``{adapter name: its pairs}`` of adapters that are not active.
        aside: pairs that a merge or ``disable_adapters`` took out of the forward, the last one on top.
        merged: whether the pairs in ``aside`` are part of ``base``.
        original: the base as it was before a merge, where it was kept.
    """

    def __init__(self, base: FrozenWeight) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()
        self.slots: dict[str, slice] = {}
        self.idle: dict[str, nn.ModuleDict] = {}
        self.aside: list[nn.ModuleDict] = []
        self.merged = False
        # In a list: a module that is an attribute of its own would be registered.
        self.original: list[FrozenWeight] = []

    def set_slots(self, leaves: Sequence[str], rows: Sequence[int] | None = None) -> None:
        """Name consecutive row ranges of the output, in order (``("gate_proj", "up_proj")`` for a fused base).

        Args:
            leaves: names.
            rows: local rows of each; equal parts by default.

        Raises:
            AdapterError: the ranges are not the rows of the base.
        """
        total = self.base.shape[-2]
        sizes = [total // len(leaves)] * len(leaves) if rows is None else list(rows)
        if len(sizes) != len(leaves) or sum(sizes) != total:
            raise AdapterError(
                f"rows {sizes} were given to {', '.join(leaves)}; expected one number each, {total} in all"
            )
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.slots = {
            leaf: slice(start, start + size)
            for leaf, start, size in zip(leaves, starts, sizes, strict=True)
        }

    @property
    def leaves(self) -> tuple[str, ...]:
        """Leaf names that a pair can be attached to, in row order."""
        return tuple(self.slots)

    def rows_of(self, leaf: str) -> Rows:
        """Local output rows of projection ``leaf``, in its own row order; several ranges where a base interleaves its parts."""
        return (self.slots[leaf],)

    def attach(self, leaf: str, pair: LoraPair, idle: str | None = None) -> None:
        """Attach the factors of projection ``leaf``: to the active adapter, or to the idle one of that name."""
        held = self.adapters if idle is None else self.idle.setdefault(idle, nn.ModuleDict())
        held[leaf] = pair

    def put_away(self, name: str) -> None:
        """Make the active pairs those of idle adapter ``name``; none is active then."""
        self.adapters.requires_grad_(False)
        self.idle[name], self.adapters = self.adapters, nn.ModuleDict()

    def take_out(self, name: str) -> None:
        """Make the pairs of idle adapter ``name`` the active ones; it may have none here."""
        self.adapters = self.idle.pop(name, nn.ModuleDict())

    def set_aside(self) -> None:
        """Take the active pairs out of the forward until :meth:`take_back`."""
        self.aside.append(self.adapters)
        self.adapters = nn.ModuleDict()

    def take_back(self) -> None:
        """Undo the last :meth:`set_aside`."""
        self.adapters = self.aside.pop()

    def add_deltas(self, y: Tensor, delta: Callable[[LoraPair], Tensor]) -> Tensor:
        """Add ``delta(pair)`` of every adapter to its slot of the base's output ``y`` ``[..., out]``."""
        if not self.adapters:
            return y
        if len(self.slots) == 1:
            (pair,) = self.adapters.values()
            return y + delta(pair)
        sizes = [rows.stop - rows.start for rows in self.slots.values()]
        parts = list(y.split(sizes, dim=-1))
        for index, leaf in enumerate(self.slots):
            if leaf in self.adapters:
                parts[index] = parts[index] + delta(self.adapters[leaf])
        return torch.cat(parts, dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AdapterHost:
        """Move what is held outside the module tree too."""
        super()._apply(fn, recurse)
        for held in (*self.idle.values(), *self.aside, *self.original):
            held._apply(fn, recurse)
        return self
