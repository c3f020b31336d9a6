"""Cross-entropy of an adapted, frozen, vocabulary-parallel head, a few tokens at a time.

One idea: a token's loss needs its logits once in forward and once in backward, and nobody needs them in between. So forward
keeps the hidden rows and one log-sum-exp a token, and backward computes each chunk's logits again; no more than one chunk of
logits, :data:`CHUNK_BYTES`, exists at any moment.

With ``z = x W^T + scale (x A^T) B^T`` and ``g = dL/dloss``: ``loss = logsumexp(z) - z[label]`` and
``dz = g (softmax(z) - onehot(label))``. Every tensor rank holds V/tp rows of W and of B; the ranks' log-sum-exps are joined
relative to their greatest, in three all-reduces a call. A and x are whole on every rank and their gradients partial sums, as in
every column-parallel layer.

Logits are the compute dtype's (bf16: the base's product is rounded, the adapter's added to it and rounded once more),
everything after them is fp32 (fp64 for fp64). A dropout's mask is a function of token and feature, so chunks do not matter to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_xorl.errors import DataError
from megatron_xorl.fp8.linear import frozen_linear
from megatron_xorl.fp8.weight import FrozenWeight
from megatron_xorl.layers.dropout import Drop
from megatron_xorl.layers.lora import LoraPair

__all__ = ["CHUNK_BYTES", "token_losses"]

CHUNK_BYTES = 64 * 2**20
"""Logits of one chunk, counted as fp32 on this rank: 108 tokens of 154,880 logits. In bf16 their bf16 form comes on top."""


@dataclass(frozen=True)
class _Head:
    """What the logits of one tensor rank are made of, but for the factors."""

    weight: FrozenWeight
    scale: float
    group: dist.ProcessGroup
    step: int
    drop: Drop | None

    def dropped(self, x: Tensor, rows: slice | Tensor) -> Tensor:
        """What the adapter's dropout leaves of ``x``, the hidden ``rows``."""
        return x if self.drop is None else self.drop.at(rows).of(x)

    def add_adapter(self, base: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
        """Logits from the base's ``[c, V/tp]``, whose memory they take over, in the loss's dtype; x: the adapter's input."""
        logits = base.detach()
        if a is not None and b is not None:
            logits.addmm_(F.linear(x, a) * self.scale, b.t())
        return logits.to(_wide(x.dtype))

    def own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``labels`` ``[c]`` are this rank's, and their local rows of the vocabulary."""
        local = labels - self.group.rank() * self.weight.shape[0]
        rows = ((local >= 0) & (local < self.weight.shape[0])).nonzero().squeeze(1)
        return rows, local[rows]


def token_losses(
    x: Tensor,
    labels: Tensor,
    weight: FrozenWeight,
    pair: LoraPair | None,
    group: dist.ProcessGroup,
    chunk_bytes: int = CHUNK_BYTES,
    drop: Drop | None = None,
) -> Tensor:
    """Cross-entropy of every row: ``[N]``, fp32 (fp64 for fp64 rows).

    Args:
        x: hidden rows ``[N, H]``, the same on every tensor rank; N may be 0.
        labels: int64 ``[N]``, tokens of the whole vocabulary, the same on every tensor rank.
        weight: this rank's rows of the head, ``[V/tp, H]``.
        pair: the head's adapter, A ``[r, H]`` and B ``[V/tp, r]``.
        group: tensor group that the vocabulary is cut over.
        chunk_bytes: bound on one chunk's logits; a chunk has one token at least.
        drop: dropout of the adapter's input, of the N rows.

    Raises:
        DataError: a label is outside the vocabulary.
    """
    vocabulary = weight.shape[0] * group.size()
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < vocabulary:
        raise DataError(
            f"labels hold tokens {int(labels.min())} to {int(labels.max())}, expected 0 to {vocabulary - 1} "
            "(or -100 where a token is not trained)"
        )
    step = max(1, chunk_bytes // (weight.shape[0] * _wide(x.dtype).itemsize))
    head = _Head(weight, pair.scale if pair is not None else 1.0, group, step, drop)
    factors = (None, None) if pair is None else (pair.lora_A, pair.lora_B)
    losses: Tensor = _TokenLosses.apply(x, *factors, labels, head)
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor | None, b: Tensor | None, labels: Tensor, head: _Head
    ) -> Tensor:
        totals, picked = (x.new_zeros(x.shape[0], dtype=_wide(x.dtype)) for _ in range(2))
        for start in range(0, x.shape[0], head.step):
            chunk = slice(start, start + head.step)
            base = frozen_linear(x[chunk], head.weight)
            logits = head.add_adapter(base, head.dropped(x[chunk], chunk), a, b)
            rows, columns = head.own(labels[chunk])
            picked[start + rows] = logits[rows, columns]
            largest = logits.amax(-1)
            sums = logits.sub_(largest.unsqueeze(-1)).exp_().sum(-1)
            totals[chunk] = largest + sums.log()
        if x.shape[0] and head.group.size() > 1:
            totals = _join(totals, head.group)
            dist.all_reduce(picked, group=head.group)
        ctx.save_for_backward(x, a, b, labels, totals)
        ctx.head = head
        return totals - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, labels, totals = ctx.saved_tensors
        head: _Head = ctx.head
        wide = totals.dtype
        dx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        da, db = (
            torch.zeros_like(factor, dtype=wide) if needed and factor is not None else None
            for factor, needed in zip((a, b), ctx.needs_input_grad[1:3], strict=True)
        )
        # A token without a gradient (masked after the loss) has none to give: its logits are not computed again.
        for rows in grad.nonzero().squeeze(1).split(head.step):
            leaf = x[rows].requires_grad_(dx is not None)
            with torch.enable_grad():
                base = frozen_linear(leaf, head.weight)
            kept = head.dropped(leaf.detach(), rows)
            logits = head.add_adapter(base, kept, a, b)
            dz = logits.sub_(totals[rows].unsqueeze(-1)).exp_()
            own, columns = head.own(labels[rows])
            dz[own, columns] -= 1.0
            dz = dz.mul_(grad[rows].unsqueeze(-1)).to(x.dtype)
            if dx is not None:
                dx[rows] = torch.autograd.grad(base, leaf, dz)[0]
            if a is not None:
                _adapter_backward(head, rows, kept, dz, (a, b), (dx, da, db))
        return (
            dx,
            None if da is None else da.to(a.dtype),
            None if db is None else db.to(b.dtype),
            None,
            None,
        )


def _adapter_backward(
    head: _Head,
    rows: Tensor,
    x: Tensor,
    dz: Tensor,
    factors: tuple[Tensor, Tensor],
    sums: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Add one chunk's contributions to dX, dA and dB, the latter two in the wide dtype; x is the adapter's input."""
    (a, b), (dx, da, db) = factors, sums
    dt = (dz @ b) * head.scale
    if dx is not None:
        dx[rows] += head.dropped(dt @ a, rows)
    if da is not None:
        da += dt.t() @ x
    if db is not None:
        db += dz.t() @ (F.linear(x, a) * head.scale)


def _join(totals: Tensor, group: dist.ProcessGroup) -> Tensor:
    """log-sum-exp over the vocabulary from the ranks' own, relative to the greatest so that no exponential overflows."""
    largest = totals.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = (totals - largest).exp()
    dist.all_reduce(sums, group=group)
    return largest + sums.log()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
