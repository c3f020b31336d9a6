"""One adapted projection: the pair of LoRA factors A and B, as this rank holds them.

One idea: a factor is *defined* by its logical name and its full logical shape; what a rank holds is a slice of it. A is drawn
from a generator seeded by the logical name (and the expert), over the full fan-in, and then sliced; so every TP/EP/PP layout
starts from identical bytes. B starts at zero, so step one reproduces the frozen base.

Kaiming-uniform with ``a = sqrt(5)`` is ``U(-1/sqrt(fan_in), 1/sqrt(fan_in))`` (He et al. 2015; PEFT's and XoRL's default).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_xorl.adapters.cuts import factor_ranges, range_lengths
from megatron_xorl.adapters.inventory import Factor

__all__ = ["FactorSlice", "LoraPair", "draw_lora_A"]


@dataclass(frozen=True)
class FactorSlice:
    """Which part of a factor's full logical shape a rank holds.

    ``tp`` cuts ``factor.tp_axis`` (over the tensor group, or the expert-tensor group for a bank), ``ep`` cuts
    ``factor.ep_axis``; each is ``(rank, size)``.
    """

    factor: Factor
    tp: tuple[int, int]
    ep: tuple[int, int]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Half-open ``(start, stop)`` of every axis of the full shape."""
        return factor_ranges(self.factor, self.tp, self.ep)

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape."""
        return range_lengths(self.ranges)

    def of(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor (a view)."""
        return full[tuple(slice(start, stop) for start, stop in self.ranges)]


def draw_lora_A(piece: FactorSlice, seed: int) -> Tensor:
    """Draw a rank's slice of lora_A, fp32: the same bytes whatever the layout.

    A bank's factor is drawn expert by expert, so that a rank draws only the experts it owns.
    """
    factor = piece.factor
    bound = 1.0 / math.sqrt(factor.shape[-1])
    if len(factor.shape) == 2:
        return piece.of(_uniform(factor.shape, bound, seed, factor.name)).clone()
    (first, last), inner = piece.ranges[0], piece.ranges[1:]
    local = torch.empty(piece.shape, dtype=torch.float32)
    for expert in range(first, last):
        full = _uniform(factor.shape[1:], bound, seed, f"{factor.name}.{expert}")
        local[expert - first] = full[tuple(slice(a, b) for a, b in inner)]
    return local


def _uniform(shape: tuple[int, ...], bound: float, seed: int, name: str) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)


class LoraPair(nn.Module):
    """The two factors of one target on this rank.

    Ordinary target: ``lora_A`` ``[r, in]``, ``lora_B`` ``[out, r]``. Bank: a leading expert axis on both, of size 1 where the
    factor is shared by all experts.

    Args:
        a, b: which slice of each factor this rank holds.
        scale: of the product B A, ``AdapterConfig.scale_of(rank)``.
        dtype: dtype of both factors, the model's.
        device: where they live.
        seed: seed of the initialisation; ``None`` leaves both zero (they are about to be loaded).
        dropout: probability that an element of A's input is dropped in training mode (``layers.dropout``).
    """

    def __init__(
        self,
        a: FactorSlice,
        b: FactorSlice,
        *,
        scale: float,
        dtype: torch.dtype,
        device: torch.device | str | None,
        seed: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.slices = {"A": a, "B": b}
        self.scale = scale
        self.dropout = dropout
        meta = device is not None and torch.device(device).type == "meta"
        lora_A = (
            torch.empty(a.shape, dtype=dtype, device="meta")
            if meta
            else draw_lora_A(a, seed).to(device, dtype)
        )
        self.lora_A = nn.Parameter(lora_A)
        self.lora_B = nn.Parameter(torch.zeros(b.shape, dtype=dtype, device=device))

    def forward(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Both factors, A first; a call lets what was hung on this module happen before they are read (``layers.gathered``)."""
        return self.lora_A, self.lora_B

    @property
    def target(self) -> str:
        """Logical name of the adapted projection."""
        return self.slices["A"].factor.target

    def named_factors(self) -> list[tuple[Factor, FactorSlice, nn.Parameter]]:
        """Both factors with their logical description, A first."""
        return [
            (piece.factor, piece, param)
            for piece, param in ((self.slices["A"], self.lora_A), (self.slices["B"], self.lora_B))
        ]
