"""Indexer loss over the selected keys, and its gradient, in one pass.

    target[j] = p[s, j] / sum_i p[s, i]              detached
    prob[j]   = softmax_j( sel[s, j] )
    loss[s]   = coef * sum_j target[j] * ( log target[j] - log prob[j] )
    dsel[j]   = coef * ( prob[j] - target[j] )

``sel`` are the indexer's scores of the selected keys, -inf for an unused place; ``p`` the head-summed attention probabilities.
All in fp32, one program a query, sums over a row in one fixed order. A term with ``target = 0`` is 0. A query without a selected
key, or without a target, has loss 0 and dsel 0. Masked lanes are unused places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_xorl.kernels.launch import launch, padded, require

__all__ = ["indexer_kl", "reference"]

CONFIG = {"num_warps": 8, "num_stages": 1}


@triton.jit
def _kernel(sel, p, loss, slope, coef, width, BJ: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BJ)
    score = tl.load(sel + row * width + j, mask=j < width, other=float("-inf"))
    used = score > float("-inf")
    target = tl.load(p + row * width + j, mask=used, other=0.0)
    mass = tl.sum(target, 0)
    some = mass > 0.0
    target = target / tl.where(some, mass, 1.0)
    largest = tl.max(score, 0)
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    shifted = tl.where(used, score - largest, 0.0)
    weight = tl.where(used, tl.exp(shifted), 0.0)
    total = tl.sum(weight, 0)
    total = tl.where(total > 0.0, total, 1.0)
    positive = target > 0.0
    gap = tl.log(tl.where(positive, target, 1.0)) - (shifted - tl.log(total))
    tl.store(loss + row, coef * tl.sum(tl.where(positive, target * gap, 0.0), 0))
    slopes = tl.where(used & some, (weight / total - target) * coef, 0.0)
    tl.store(slope + row * width + j, slopes, mask=j < width)


def indexer_kl(selected: Tensor, probs: Tensor, coef: float) -> tuple[Tensor, Tensor]:
    """Loss of each query, and its gradient by the selected scores.

    Args:
        selected: float32 ``[S, topk]``, dense, -inf in unused places.
        probs: float32 ``[S, topk]``, dense, not negative.
        coef: factor of the loss.

    Returns:
        float32 ``[S]``, to be summed by the caller, and float32 ``[S, topk]``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    same = selected.shape == probs.shape and selected.is_contiguous() and probs.is_contiguous()
    require(
        same and selected.dtype == probs.dtype == torch.float32,
        f"selected {selected.dtype} {tuple(selected.shape)} and probs {probs.dtype} {tuple(probs.shape)}: want float32, dense",
    )
    rows, width = selected.shape
    loss = torch.empty(rows, dtype=torch.float32, device=selected.device)
    slope = torch.empty_like(selected)
    launch(
        _kernel, (rows,), selected, probs, loss, slope, float(coef), width, BJ=padded(width), **CONFIG
    )  # fmt: skip
    return loss, slope


def reference(
    selected: Tensor, probs: Tensor, coef: float, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The losses in ``dtype``; differentiable in ``selected``."""
    used = selected > float("-inf")
    target = torch.where(used, probs.to(dtype), 0.0)
    mass = target.sum(-1, keepdim=True)
    target = target / torch.where(mass > 0, mass, 1.0)
    score = torch.where(used, selected.to(dtype), -1e30)
    log_prob = torch.where(used, score.log_softmax(-1), 0.0)
    positive = target > 0
    term = target * (torch.where(positive, target, 1.0).log() - log_prob)
    return coef * torch.where(positive, term, 0.0).sum(-1)
