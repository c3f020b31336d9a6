"""Which keys each query may see: an interval of key slots, whatever it comes from.

One idea: causal documents packed into a row, one whole sequence, and a generation cache all say "the keys from ``first`` to
``last``", and the rotary position of a token is its distance from the first key of its document. So the indexer, the rotary
angles and the caches need one pair of integers a token, never an ``[s, s]`` mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

__all__ = ["VisibleKeys", "causal_keys"]


@dataclass(frozen=True)
class VisibleKeys:
    """Legal keys of every query: slots ``first`` to ``last``, both included; int64 ``[s, b]``, or ``[s, 1]`` for all rows."""

    first: Tensor
    last: Tensor

    @property
    def positions(self) -> Tensor:
        """Rotary position of every token within its document, of the shape of ``first``."""
        return self.last - self.first

    def span(self, queries: slice, row: int) -> tuple[int, int]:
        """Smallest range of slots ``(begin, end)`` that holds every legal key of ``queries`` of batch row ``row``."""
        column = row if self.first.shape[1] > 1 else 0
        return int(self.first[queries, column].min()), int(self.last[queries, column].max()) + 1

    def legal(self, queries: slice, row: int, begin: int, end: int) -> Tensor:
        """bool ``[queries, end - begin]``: which slots each query may see."""
        column = row if self.first.shape[1] > 1 else 0
        slots = torch.arange(begin, end, device=self.first.device)
        first, last = self.first[queries, column, None], self.last[queries, column, None]
        return (slots >= first) & (slots <= last)


def causal_keys(length: int, packed: PackedSeqParams | None, device: torch.device) -> VisibleKeys:
    """Causal attention within each document of a row of ``length`` tokens.

    Args:
        length: tokens of the row.
        packed: documents packed along the row; where each document is padded to a length of its own
            (``cu_seqlens_q_padded``) those bounds count, and the padding follows its document's tokens, out of their sight. A
            tail after the last bound is a document of its own. None: one document.
        device: of the result.
    """
    last = torch.arange(length, device=device)
    if packed is None:
        return VisibleKeys(torch.zeros_like(last).unsqueeze(1), last.unsqueeze(1))
    bounds = (
        packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    )
    bounds = bounds.to(device=device, dtype=torch.int64)
    first = bounds[torch.searchsorted(bounds, last, right=True) - 1]
    return VisibleKeys(first.unsqueeze(1), last.unsqueeze(1))
