"""Dropout of an adapter's input: ``y = base(x) + scale B A drop(x)``, with a mask that is a function and not a draw.

One idea: whether an element is kept depends on its token's key, the projection's logical name and the feature's number in the
full input, and on nothing else (:mod:`megatron_xorl.layers.token_keys`). With splitmix64::

    state = mix(key ^ name)            name: 64 bits of SHA-256 of the logical name
    bits  = output f of splitmix64 started at state
    kept  = bits, as a signed number, >= floor(p 2^64) - 2^63          kept elements are multiplied by 1 / (1 - p)

So a mask is the same bits on every layout, in a recomputation, and after a resume; and as only integers are compared, on every
device. Backward computes it again: kept for it are the input, which the factor's gradient needs anyhow, and 8 bytes a token.

The routed down projection has one name for each expert (``….experts.12.down_proj``), since what a token gives them
differs; routed gate and up have one mask a token each, whichever experts it goes to.

In evaluation mode, with ``dropout: 0``, and for a pair that is kept but not trained, nothing here runs. Refused: dropout in
training mode without keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.errors import AdapterError, LayoutError
from megatron_xorl.fp8.engine import engine
from megatron_xorl.layers.lora import LoraPair
from megatron_xorl.layers.token_keys import GAMMA, Tokens, current, mix, name_bits

__all__ = ["Drop", "current_tokens", "drop_of", "dropped_shrink", "drops", "expert_drop"]

TILE = 1 << 16
"""Elements whose mask is computed at a time: 512 KiB of words, which stay in cache."""


def drops(pair: LoraPair, training: bool) -> bool:
    """Whether ``pair`` drops parts of its input now; one that does not train (out of scope, B zero) never does."""
    return training and pair.dropout > 0 and pair.lora_B.requires_grad


def current_tokens(where: str) -> Tokens:
    """Keys of the tokens that are worked on now.

    Raises:
        AdapterError: there are none; ``where`` is the projection that needs them.
    """
    if (tokens := current()) is None:
        raise AdapterError(
            f"{where} has a dropout, the model is in training mode, and it was not told which samples these are; pass "
            "mx.dropout_keys(samples, position_ids, seed=…) to the model as its attention_mask (third argument), call "
            "model.eval() for a forward without dropout, or set dropout: 0"
        )
    return tokens


@dataclass(frozen=True)
class Drop:
    """The mask of one projection's input ``[T, K]``.

    Attributes:
        states: int64 ``[T]``, where each row's numbers start.
        first: number of column 0 in the projection's full input.
        p: probability that an element is dropped.
    """

    states: Tensor
    first: int
    p: float

    def kept(self, rows: slice, columns: int) -> Tensor:
        """Bool ``[rows, columns]``."""
        numbers = torch.arange(
            self.first + 1, self.first + 1 + columns, device=self.states.device
        ).mul_(GAMMA)
        bits = mix(self.states[rows].unsqueeze(1) + numbers)
        return bits >= int(self.p * 2.0**64) - 2**63

    def of(self, x: Tensor) -> Tensor:
        """``x`` ``[T, K]`` with dropped elements 0 and the others multiplied by ``1 / (1 - p)``: a new tensor, no gradient.

        Raises:
            LayoutError: there are other keys than rows.
        """
        if x.shape[0] != self.states.shape[0]:
            raise LayoutError(
                f"{x.shape[0]} rows reached an adapter with dropout and {self.states.shape[0]} token keys; keys must be [b, s] "
                "of the same batch and the same part of the sequence as the tokens"
            )
        out, step = torch.empty_like(x), max(1, TILE // x.shape[1])
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            dropped = self.kept(rows, x.shape[1]).logical_not_()
            torch.mul(x[rows], 1.0 / (1.0 - self.p), out=out[rows]).masked_fill_(dropped, 0.0)
        return out

    def at(self, rows: Tensor | slice) -> Drop:
        """The mask of some of the rows."""
        return Drop(self.states[rows], self.first, self.p)


def drop_of(pair: LoraPair, training: bool, *, whole: bool = False) -> Drop | None:
    """The mask of the current tokens for ``pair``; None where nothing is dropped.

    Args:
        pair: whose input it is.
        training: mode of the module.
        whole: the input has every token's row, not only those of this rank's part of the sequence.

    Raises:
        AdapterError: there are no current tokens.
    """
    if not drops(pair, training):
        return None
    tokens = current_tokens(pair.target)
    return _drop(pair, tokens.whole if whole else tokens.part, name_bits(pair.target))


def expert_drop(
    pair: LoraPair, training: bool, keys: Tensor | None, counts: Sequence[int]
) -> Drop | None:
    """The mask of rows that were dispatched with their keys ``[T]``, grouped by local expert; None where nothing is dropped."""
    if not drops(pair, training):
        return None
    assert keys is not None
    factor, (first, last) = pair.slices["A"].factor, pair.slices["A"].ranges[0]
    if factor.shared:
        return _drop(pair, keys, name_bits(pair.target))
    bank, _, leaf = pair.target.rpartition(".")
    names = [name_bits(f"{bank}.{expert}.{leaf}") for expert in range(first, last)]
    per_row = torch.tensor(names, device=keys.device).repeat_interleave(
        torch.tensor(counts, device=keys.device), output_size=keys.shape[0]
    )
    return _drop(pair, keys, per_row)


def _drop(pair: LoraPair, keys: Tensor, name: int | Tensor) -> Drop:
    return Drop(mix(keys ^ name), pair.slices["A"].ranges[-1][0], pair.dropout)


def dropped_shrink(
    x: Tensor, a: Tensor, scale: float, drop: Drop, counts: Sequence[int] | None = None
) -> Tensor:
    """``scale drop(x) A^T``: x ``[..., K]`` -> ``[..., R]``; saves x itself, and that only for dA.

    Args:
        x: input of the projection.
        a: ``[R, K]``; with ``counts`` ``[E or 1, R, K]``.
        scale: of the product.
        drop: mask of x, rows flattened.
        counts: rows of each local expert.
    """
    result: Tensor = _DroppedShrink.apply(x, a, scale, drop, counts)
    return result


class _DroppedShrink(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, scale: float, drop: Drop, counts: Sequence[int] | None
    ) -> Tensor:
        backend = engine(x).backend
        ctx.backend, ctx.scale, ctx.counts = backend, scale, counts
        ctx.first, ctx.p = drop.first, drop.p
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, a, drop.states)
        out = x.new_empty(*x.shape[:-1], a.shape[-2])
        _shrink(backend, drop.of(_flat(x)), a, scale, counts, _flat(out))
        return out

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> tuple[Tensor | None, ...]:
        x, a, states = ctx.saved_tensors
        drop = Drop(states, ctx.first, ctx.p)
        u = _flat(dt) * ctx.scale
        dx = da = None
        if ctx.needs_input_grad[0]:
            dx = u.new_empty(u.shape[0], a.shape[-1])
            _shrink(ctx.backend, u, a.transpose(-1, -2), 1.0, ctx.counts, dx)
            dx = drop.of(dx).view(*dt.shape[:-1], a.shape[-1])
        if ctx.needs_input_grad[1]:
            da, masked = torch.empty_like(a), drop.of(_flat(x))
            if ctx.counts is None:
                ctx.backend.factor_gradient(u, masked, da)
            else:
                ctx.backend.grouped_factor_gradient(u, masked, ctx.counts, da)
        return dx, da, None, None, None


def _shrink(
    backend: Any, x: Tensor, a: Tensor, scale: float, counts: Sequence[int] | None, out: Tensor
) -> None:
    if counts is None:
        backend.shrink(x, a, scale, out)
    else:
        backend.grouped_shrink(x, a, scale, counts, out)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
