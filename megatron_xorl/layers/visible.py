"""Which keys each query may see: an interval of key slots, whatever it comes from.

One idea: causal documents packed into a row, one whole sequence, and a generation cache all say "the keys from ``first`` to
``last``", and the rotary position of a token is its distance from the first key of its document. So the indexer, the rotary
angles and the caches need one pair of integers a token, never an ``[s, s]`` mask.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_xorl.errors import DataError

__all__ = ["VisibleKeys", "causal_keys", "document_bounds"]


@dataclass(frozen=True)
class VisibleKeys:
    """Legal keys of every query: slots ``first`` to ``last``, both included; int64 ``[s, b]``, or ``[s, 1]`` for all rows."""

    first: Tensor
    last: Tensor

    @property
    def positions(self) -> Tensor:
        """Rotary position of every token within its document, of the shape of ``first``."""
        return self.last - self.first

    def of(self, slots: Tensor | None) -> VisibleKeys:
        """The keys of the queries in ``slots`` ``[q]`` alone; None: of all."""
        return self if slots is None else VisibleKeys(self.first[slots], self.last[slots])

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


def causal_keys(
    length: int, packed: PackedSeqParams | None, device: torch.device, batch: int = 1
) -> VisibleKeys:
    """Causal attention within each document of a row of ``length`` tokens.

    Args:
        length: tokens of the row.
        packed: documents packed along the row; where each document is padded to a length of its own
            (``cu_seqlens_q_padded``) those bounds count, and the padding follows its document's tokens, out of their sight. A
            tail after the last bound is a document of its own. None: one document.
        device: of the result.
        batch: rows; documents are packed into one.

    Raises:
        DataError: the bounds are not those of documents in one row of ``length`` tokens.
    """
    last = torch.arange(length, device=device)
    if packed is None:
        return VisibleKeys(torch.zeros_like(last).unsqueeze(1), last.unsqueeze(1))
    bounds = document_bounds(packed, length, batch).to(device)
    first = bounds[torch.searchsorted(bounds, last, right=True) - 1]
    return VisibleKeys(first.unsqueeze(1), last.unsqueeze(1))


def document_bounds(packed: PackedSeqParams, length: int, batch: int) -> Tensor:
    """int64 ``[documents + 1]``: where each document begins, and where the last one ends.

    Raises:
        DataError: see :func:`causal_keys`.
    """
    tokens, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    if packed.qkv_format != "thd" or batch != 1:
        raise DataError(
            f"documents are packed into one row in the thd format, found qkv_format {packed.qkv_format!r} and {batch} rows; "
            "pack them into one row, or leave packed_seq_params out"
        )
    _check_rising("cu_seqlens_q", tokens, length)
    keys = packed.cu_seqlens_kv
    if keys is not None and not torch.equal(keys.cpu(), tokens.cpu()):
        raise DataError(
            "cu_seqlens_kv differs from cu_seqlens_q; a document attends to itself alone"
        )
    if padded is None:
        return tokens.to(torch.int64)
    _check_rising("cu_seqlens_q_padded", padded, length)
    if padded.shape != tokens.shape or bool((padded.diff().cpu() < tokens.diff().cpu()).any()):
        raise DataError(
            f"cu_seqlens_q_padded is {padded.tolist()}, which leaves a document of cu_seqlens_q {tokens.tolist()} too little room"
        )
    return padded.to(torch.int64)


def _check_rising(name: str, bounds: object, length: int) -> None:
    if (
        isinstance(bounds, Tensor)
        and bounds.dim() == 1
        and bounds.dtype in (torch.int32, torch.int64)
    ):
        values = bounds.tolist()
        falling = any(a > b for a, b in itertools.pairwise(values))
        if len(values) >= 2 and values[0] == 0 and not falling and 0 < values[-1] <= length:
            return
    found = bounds.tolist() if isinstance(bounds, Tensor) and bounds.dim() < 2 else bounds
    raise DataError(
        f"{name} is {found}, expected int32 or int64 bounds of documents in a row of {length} tokens: 0, then the end of each, "
        "not falling"
    )
