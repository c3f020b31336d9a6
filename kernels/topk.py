"""Exact top-k of indexer scores: a radix search for the k-th largest value, then one pass that writes the selection.

An fp32 score becomes an unsigned key of the same order (all bits flipped for negatives, else the sign bit). Four passes over the
row, one per byte from the top, count how many keys share the prefix found so far and have each next byte; the byte where the
count from above reaches k is fixed. After them the key of the k-th largest is known, and how many of its equals still fit.

The set is exact; of equal scores the lowest index is taken; the result is the same every time (no atomics): first the keys above
the threshold in index order, then the equal ones in index order, then -1. A score of -inf is never selected, nor is NaN. -0.0
equals 0.0 (ReLU makes both). Nothing is rounded. A masked lane is beyond the row's range and counts nowhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import launch, padded, require, row_stride

__all__ = ["reference", "topk_select"]

CONFIG = {"num_warps": 8, "num_stages": 2}
MOST_LANES = 2048


@triton.jit
def _keys(x, t, high):
    """Ordered keys of the scores at ``t``, and which of them may be selected."""
    value = tl.load(x + t, mask=t < high, other=float("-inf"))
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | (-2147483648)).to(tl.uint32, bitcast=True)
    return key, (t < high) & (value > float("-inf"))


@triton.jit
def _digit(x, low, high, prefix, need, wanted, SHIFT: tl.constexpr, TOPK: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """Fix the byte at ``SHIFT`` of the threshold; ``need`` counts those wanted from the keys not above it."""
    digit = tl.arange(0, 256)
    count = tl.zeros((256,), tl.int32)
    for first in range(low, high, BT):
        key, ok = _keys(x, first + tl.arange(0, BT), high)
        if SHIFT < 24:
            ok = ok & ((key >> (SHIFT + 8)) == (prefix >> (SHIFT + 8)))
        count += tl.histogram(((key >> SHIFT) & 255).to(tl.int32), 256, mask=ok)
    if SHIFT == 24:
        wanted = tl.minimum(tl.sum(count, 0), TOPK)
        need = wanted
    from_above = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    chosen = tl.max(tl.where(from_above >= need, digit, 0), 0)
    need -= tl.sum(tl.where(digit > chosen, count, 0), 0)
    return prefix | (chosen.to(tl.uint32) << SHIFT), need, wanted


@triton.jit
def _kernel(scores, lo, hi, out, stride, TOPK: tl.constexpr, BT: tl.constexpr):
    row = tl.program_id(0)
    low, high = tl.load(lo + row), tl.load(hi + row)
    x = scores + row.to(tl.int64) * stride
    out += row.to(tl.int64) * TOPK
    prefix, need, wanted = _digit(x, low, high, tl.full((), 0, tl.uint32), 0, 0, 24, TOPK, BT)
    prefix, need, wanted = _digit(x, low, high, prefix, need, wanted, 16, TOPK, BT)
    prefix, need, wanted = _digit(x, low, high, prefix, need, wanted, 8, TOPK, BT)
    prefix, need, wanted = _digit(x, low, high, prefix, need, wanted, 0, TOPK, BT)

    lane = tl.arange(0, BT)
    written, equal = 0, 0
    for first in range(low, high, BT):
        key, ok = _keys(x, first + lane, high)
        larger, same = ok & (key > prefix), ok & (key == prefix)
        place = written + tl.cumsum(larger.to(tl.int32), 0) - 1
        tl.store(out + place, first + lane, mask=larger)
        rank = equal + tl.cumsum(same.to(tl.int32), 0)
        tl.store(out + wanted - need + rank - 1, first + lane, mask=same & (rank <= need))
        written += tl.sum(larger.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)
    for first in range(0, TOPK, BT):
        place = first + lane
        tl.store(out + place, -1, mask=(place >= wanted) & (place < TOPK))


def topk_select(scores: Tensor, lo: Tensor, hi: Tensor, topk: int) -> Tensor:
    """Indices of the ``topk`` largest scores of each row within its range.

    Args:
        scores: float32 ``[S, T]``; rows may be strided.
        lo: int32 ``[S]``, first column of each row's range.
        hi: int32 ``[S]``, one past its last, at most T.
        topk: how many; a row with fewer finite scores has all of them.

    Returns:
        int32 ``[S, topk]``, -1 in unused places.

    Raises:
        ValueError: another dtype, or ranges of another length.
    """
    rows = scores.shape[0]
    require(scores.dtype == torch.float32, f"scores are {scores.dtype}; expected float32")
    ranges = lo.shape == hi.shape == (rows,) and lo.dtype == hi.dtype == torch.int32
    require(ranges, f"ranges are {lo.dtype} {tuple(lo.shape)}; expected int32 ({rows},)")
    out = torch.empty(rows, topk, dtype=torch.int32, device=scores.device)
    lanes = min(MOST_LANES, padded(scores.shape[1], 256))
    launch(
        _kernel, (rows,), scores, lo, hi, out, row_stride(scores, "scores"),
        TOPK=topk, BT=lanes, **CONFIG,
    )  # fmt: skip
    return out


def reference(scores: Tensor, lo: Tensor, hi: Tensor, topk: int) -> Tensor:
    """:func:`topk_select` by a stable sort; the selection of each row is sorted by index, unused places come last."""
    place = torch.arange(scores.shape[1], device=scores.device)
    legal = (place >= lo[:, None]) & (place < hi[:, None]) & (scores > float("-inf"))
    masked = scores.masked_fill(~legal, float("-inf"))
    order = masked.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    picked = order.masked_fill(~legal.gather(1, order), scores.shape[1]).sort(1).values
    picked = torch.nn.functional.pad(picked, (0, topk - picked.shape[1]), value=scores.shape[1])
    return picked.masked_fill(picked == scores.shape[1], -1).int()
