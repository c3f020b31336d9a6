"""A frozen weight that LoRA pairs stand on.

One idea: a base may be fused (gate|up) while its logical projections stay apart. The host names the row ranges of its output
(``slots``), each of which may carry a pair of its own, and adds their deltas where they belong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_xorl.fp8.weight import FrozenWeight
from megatron_xorl.layers.lora import LoraPair

__all__ = ["AdapterHost"]


class AdapterHost(nn.Module):
    """A frozen weight ``[out, in]``, or a bank ``[E, out, in]``, with adapters on its output slots.

    Attributes:
        base: the local frozen weight.
        adapters: ``{leaf name: LoraPair}``, e.g. ``{"gate_proj": …, "up_proj": …}``.
        slots: ``{leaf name: local output rows}``, in row order; empty until adapters are attached.
    """

    def __init__(self, base: FrozenWeight) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()
        self.slots: dict[str, slice] = {}

    def set_slots(self, leaves: tuple[str, ...]) -> None:
        """Name the equal row ranges of the output, in order (``("gate_proj", "up_proj")`` for a fused base)."""
        step = self.base.shape[-2] // len(leaves)
        self.slots = {leaf: slice(i * step, (i + 1) * step) for i, leaf in enumerate(leaves)}

    def attach(self, leaf: str, pair: LoraPair) -> None:
        """Attach the factors of projection ``leaf``."""
        self.adapters[leaf] = pair

    def add_deltas(self, y: Tensor, delta: Callable[[LoraPair], Tensor]) -> Tensor:
        """Add ``delta(pair)`` of every adapter to its slot of the base's output ``y`` ``[..., out]``."""
        if not self.adapters:
            return y
        if len(self.slots) == 1:
            (pair,) = self.adapters.values()
            return y + delta(pair)
        parts = list(y.split([slot.stop - slot.start for slot in self.slots.values()], dim=-1))
        for index, leaf in enumerate(self.slots):
            if leaf in self.adapters:
                parts[index] = parts[index] + delta(self.adapters[leaf])
        return torch.cat(parts, dim=-1)
