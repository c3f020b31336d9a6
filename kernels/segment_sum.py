"""Sums of gathered rows back into the rows they came from, in one fixed order: the deterministic form of an atomic add.

    total[t] += sum over p with index[p] == t, in the order of p, of part[p]

``index`` is sorted stably on the device; a program takes one ``t`` and adds its parts one after the other in fp32, beginning with
what ``total[t]`` holds. So the result is the same every time and does not depend on how the parts are cut into calls. Rounding:
fp32's at each addition. Indices of -1 take no part. A masked lane is a column beyond the width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import launch, padded, require

__all__ = ["reference", "segment_sum"]

CONFIG = {"num_warps": 4, "num_stages": 4}


@triton.jit
def _kernel(total, part, order, bounds, width, BW: tl.constexpr):
    target = tl.program_id(0)
    column = tl.arange(0, BW)
    inside = column < width
    start, end = tl.load(bounds + target), tl.load(bounds + target + 1)
    at = total + target.to(tl.int64) * width + column
    if end > start:
        acc = tl.load(at, mask=inside, other=0.0)
        for place in range(start, end):
            source = tl.load(order + place).to(tl.int64)
            acc += tl.load(part + source * width + column, mask=inside, other=0.0)
        tl.store(at, acc, mask=inside)


def segment_sum(total: Tensor, part: Tensor, index: Tensor) -> None:
    """Add the rows of ``part`` to ``total`` in place.

    Args:
        total: float32 ``[T, W]``, dense.
        part: float32 ``[P, W]``, dense.
        index: int32 ``[P]``, the row of ``total``, -1 for none.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    fits = total.shape[1:] == part.shape[1:] and index.shape == part.shape[:1]
    dense = total.is_contiguous() and part.is_contiguous()
    require(
        fits and dense and total.dtype == part.dtype == torch.float32,
        f"total {tuple(total.shape)}, part {tuple(part.shape)} and index {tuple(index.shape)} must fit, dense, in float32",
    )
    rows, width = total.shape
    ordered, order = index.sort(stable=True)
    edges = torch.arange(rows + 1, dtype=index.dtype, device=index.device)
    bounds = torch.searchsorted(ordered, edges).int()
    launch(_kernel, (rows,), total, part, order.int(), bounds, width, BW=padded(width), **CONFIG)


def reference(total: Tensor, part: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`segment_sum` leaves in ``total``, in ``dtype``."""
    used = index >= 0
    return total.to(dtype).index_add(0, index[used].long(), part[used].to(dtype))
