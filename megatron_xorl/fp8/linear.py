"""Products with a frozen weight as autograd functions: forward, dX, and LoRA factors; nothing is kept but their inputs.

The backward reads the weight again instead of keeping a dequantised copy alive, and there is no gradient for it:

* :func:`frozen_linear`: ``y = x W^T`` for one projection;
* :func:`frozen_grouped_linear`: ``y_e = x_e W_e^T`` for the tokens of each expert of a bank, each with the bits it has alone;
* :func:`frozen_head_matmul`: the absorbed form of ``kv_b_proj``, one small matrix a head, contracted over its rows (K half)
  or over its columns (V half);
* :func:`adapted_linear`: ``frozen_linear`` with LoRA on ranges of its output rows. Saved for backward: the input and the
  rank-r products ``t``, each only if a factor's gradient needs it;
* :func:`adapted_grouped_linear`: the same on a bank, each factor one per expert or one for all;
* :func:`lora_shrink` and :func:`lora_add`: the two halves of ``adapted_linear``, for layers that communicate between them.

With ``t = scale x A^T``: ``y[slot] += t B^T`` after y was rounded; ``u = scale dy[slot] B``; ``dX = dY W + u A``;
``dA = u^T x``; ``dB = dy[slot]^T t`` (Hu et al. 2021, LoRA, section 4.1, differentiated).

How a product is computed, and where it is rounded, is the backend's: :mod:`megatron_xorl.fp8.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.errors import AdapterError, LayoutError
from megatron_xorl.fp8.engine import Backend, LowRank, engine
from megatron_xorl.fp8.weight import FrozenWeight

__all__ = [
    "LoraOperand",
    "adapted_grouped_linear",
    "adapted_linear",
    "frozen_grouped_linear",
    "frozen_head_matmul",
    "frozen_linear",
    "lora_add",
    "lora_shrink",
]


@dataclass(frozen=True)
class LoraOperand:
    """One adapter of a linear: A ``[R, K]``, B ``[n, R]`` on output rows ``slot``, ``scale = alpha / R``.

    On a bank of E experts A and B have a leading axis: E where each expert has its own, 1 where one serves all.
    """

    a: Tensor
    b: Tensor
    scale: float
    slot: slice


def frozen_linear(x: Tensor, weight: FrozenWeight) -> Tensor:
    """Return ``x W^T``: x ``[..., K]`` -> ``[..., N]``, dtype of ``x``."""
    return _AdaptedLinear.apply(x, weight, (), ())


def adapted_linear(x: Tensor, weight: FrozenWeight, adapters: Sequence[LoraOperand]) -> Tensor:
    """Return ``x W^T`` plus each adapter's product on its rows: x ``[..., K]`` -> ``[..., N]``, dtype of ``x`` and factors."""
    factors = [factor for one in adapters for factor in (one.a, one.b)]
    return _AdaptedLinear.apply(x, weight, [one.scale for one in adapters], [one.slot for one in adapters], *factors)  # fmt: skip


def lora_shrink(x: Tensor, a: Tensor, scale: float) -> Tensor:
    """Return ``t = scale x A^T``: x ``[..., K]``, A ``[R, K]`` -> ``[..., R]``; saves x for dA."""
    return _Shrink.apply(x, a, scale)


def lora_add(y: Tensor, t: Tensor, b: Tensor, slot: slice) -> Tensor:
    """Add ``t B^T`` to ``y[..., slot]`` in place and return ``y``: t ``[..., R]``, B ``[n, R]``; saves t for dB."""
    return _Add.apply(y, t, b, slot)


def frozen_grouped_linear(x: Tensor, weight: FrozenWeight, tokens_per_expert: list[int]) -> Tensor:
    """Return ``x_e W_e^T`` for consecutive groups of rows.

    Args:
        x: ``[T, K]``, the tokens of expert 0 first; ``T == sum(tokens_per_expert)``.
        weight: bank ``[E, N, K]``.
        tokens_per_expert: E counts, zero allowed.

    Raises:
        LayoutError: not E counts, or their sum is not T.
    """
    return adapted_grouped_linear(x, weight, tokens_per_expert, ())


def adapted_grouped_linear(
    x: Tensor, weight: FrozenWeight, tokens_per_expert: Sequence[int], adapters: Sequence[LoraOperand]
) -> Tensor:  # fmt: skip
    """Return ``x_e W_e^T`` plus each adapter's product: x ``[T, K]`` -> ``[T, N]``, dtype of ``x`` and factors.

    Bit for bit what :func:`adapted_linear` gives on each expert's rows alone. An expert without tokens gets a zero gradient.

    Args:
        x: ``[T, K]``, the tokens of expert 0 first; ``T == sum(tokens_per_expert)``.
        weight: bank ``[E, N, K]``.
        tokens_per_expert: E counts, zero allowed.
        adapters: A ``[1 or E, R, K]`` and B ``[1 or E, n, R]``.

    Raises:
        LayoutError: not E counts, or their sum is not T.
        AdapterError: a factor of another number of experts.
    """
    experts = weight.shape[0]
    if len(tokens_per_expert) != experts or sum(tokens_per_expert) != x.shape[0]:
        raise LayoutError(
            f"{len(tokens_per_expert)} experts with {sum(tokens_per_expert)} tokens were given for {x.shape[0]} rows and a bank "
            f"of {experts}; count every row once and every expert, those without tokens too"
        )
    factors = [factor for one in adapters for factor in (one.a, one.b)]
    if odd := next((tuple(f.shape) for f in factors if f.ndim != 3 or f.shape[0] not in (1, experts)), None):  # fmt: skip
        raise AdapterError(
            f"an expert factor is {odd}; a bank of {experts} needs a leading axis of {experts}, or of 1 for one that all share"
        )
    return _AdaptedGroupedLinear.apply(
        x, weight, tokens_per_expert, [one.scale for one in adapters], [one.slot for one in adapters], *factors
    )  # fmt: skip


def frozen_head_matmul(x: Tensor, weight: FrozenWeight, rows: slice, *, contract: str) -> Tensor:
    """Multiply each head's slice of ``x`` with that head's rows of the weight.

    Args:
        x: ``[T, H, D]``; the weight is ``[H * R, K]``, R rows a head.
        rows: which of a head's R rows take part (``0..nope`` for K, ``nope..nope+v`` for V).
        contract: ``"rows"``: D = number of rows, returns ``[T, H, K]``; ``"cols"``: D = K, returns ``[T, H, rows]``.
    """
    return _FrozenHeadMatmul.apply(x, weight, rows, contract)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: FrozenWeight,
        scales: Sequence[float],
        slots: Sequence[slice],
        *factors: Tensor,
    ) -> Tensor:
        chosen = engine(x)
        ctx.backend, ctx.weight, ctx.scales, ctx.slots = chosen.backend, weight, scales, slots
        flat = _flat(x)
        # Not a view: Megatron's cross-entropy works in place on the head's output, which autograd refuses for views.
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        products = []
        for a, scale in zip(factors[::2], scales, strict=True):
            products.append(x.new_empty(flat.shape[0], a.shape[0]))
            chosen.backend.shrink(flat, a, scale, products[-1])
        terms = [LowRank(*term) for term in zip(products, factors[1::2], slots, strict=True)]
        chosen.backend.linear(flat, weight, out.view(-1, weight.shape[0]), mode=chosen.mode, lora=terms)  # fmt: skip
        needs_a, needs_b = ctx.needs_input_grad[4::2], ctx.needs_input_grad[5::2]
        kept = [t if needed else None for t, needed in zip(products, needs_b, strict=True)]
        ctx.save_for_backward(x if any(needs_a) else None, *kept, *factors)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        count = len(ctx.slots)
        x, products, factors = (
            ctx.saved_tensors[0],
            ctx.saved_tensors[1 : count + 1],
            ctx.saved_tensors[count + 1 :],
        )
        backend, flat = ctx.backend, _flat(dy)
        gradients: list[Tensor | None] = [None] * (2 * count)
        terms = []
        for i, (scale, slot) in enumerate(zip(ctx.scales, ctx.slots, strict=True)):
            a, b = factors[2 * i], factors[2 * i + 1]
            needs_a, needs_b = ctx.needs_input_grad[4 + 2 * i : 6 + 2 * i]
            own = flat[:, slot]
            if needs_a or ctx.needs_input_grad[0]:
                u = dy.new_empty(flat.shape[0], a.shape[0])
                backend.shrink(own, b.t(), scale, u)
                terms.append(LowRank(u, a))
            if needs_a:
                gradients[2 * i] = torch.empty_like(a)
                backend.factor_gradient(u, _flat(x), gradients[2 * i])
            if needs_b:
                gradients[2 * i + 1] = torch.empty_like(b)
                backend.factor_gradient(own, products[i], gradients[2 * i + 1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy.new_empty(*dy.shape[:-1], ctx.weight.shape[1])
            backend.linear_dx(flat, ctx.weight, _flat(dx), lora=terms)
        return dx, None, None, None, *gradients


class _Shrink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, scale: float) -> Tensor:
        ctx.backend, ctx.scale = engine(x).backend, scale
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, a)
        out = x.new_empty(*x.shape[:-1], a.shape[0])
        ctx.backend.shrink(_flat(x), a, scale, _flat(out))
        return out

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, a = ctx.saved_tensors
        u = _flat(dt) * ctx.scale
        dx = da = None
        if ctx.needs_input_grad[0]:
            dx = dt.new_empty(*dt.shape[:-1], a.shape[1])
            ctx.backend.shrink(u, a.t(), 1.0, _flat(dx))
        if ctx.needs_input_grad[1]:
            da = torch.empty_like(a)
            ctx.backend.factor_gradient(u, _flat(x), da)
        return dx, da, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, t: Tensor, b: Tensor, slot: slice) -> Tensor:
        ctx.backend, ctx.slot = engine(y).backend, slot
        ctx.save_for_backward(t if ctx.needs_input_grad[2] else None, b)
        ctx.mark_dirty(y)
        ctx.backend.add(y.view(-1, y.shape[-1])[:, slot], _flat(t), b.t())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        t, b = ctx.saved_tensors
        own = _flat(dy)[:, ctx.slot]
        dt = db = None
        if ctx.needs_input_grad[1]:
            dt = dy.new_empty(*dy.shape[:-1], b.shape[1])
            ctx.backend.shrink(own, b.t(), 1.0, _flat(dt))
        if ctx.needs_input_grad[2]:
            db = torch.empty_like(b)
            ctx.backend.factor_gradient(own, _flat(t), db)
        return dy, dt, db, None


class _AdaptedGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: FrozenWeight,
        counts: Sequence[int],
        scales: Sequence[float],
        slots: Sequence[slice],
        *factors: Tensor,
    ) -> Tensor:
        chosen = engine(x)
        ctx.backend, ctx.weight, ctx.counts = chosen.backend, weight, list(counts)
        ctx.scales, ctx.slots = scales, slots
        out = x.new_empty(x.shape[0], weight.shape[1])
        products = [
            _shrink_groups(chosen.backend, x, a, scale, ctx.counts)
            for a, scale in zip(factors[::2], scales, strict=True)
        ]
        terms = [LowRank(*term) for term in zip(products, factors[1::2], slots, strict=True)]
        chosen.backend.grouped_linear(x, weight, ctx.counts, out, mode=chosen.mode, lora=terms)
        needs_a, needs_b = ctx.needs_input_grad[5::2], ctx.needs_input_grad[6::2]
        kept = [t if needed else None for t, needed in zip(products, needs_b, strict=True)]
        ctx.save_for_backward(x if any(needs_a) else None, *kept, *factors)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        count = len(ctx.slots)
        products, factors = saved[:count], saved[count:]
        backend: Backend = ctx.backend
        gradients: list[Tensor | None] = []
        terms = []
        for i, (scale, slot) in enumerate(zip(ctx.scales, ctx.slots, strict=True)):
            a, b = factors[2 * i], factors[2 * i + 1]
            needs_a, needs_b = ctx.needs_input_grad[5 + 2 * i : 7 + 2 * i]
            own, da, db = dy[:, slot], None, None
            if needs_a or ctx.needs_input_grad[0]:
                u = _shrink_groups(backend, own, b.transpose(1, 2), scale, ctx.counts)
                terms.append(LowRank(u, a))
            if needs_a:
                da = _group_gradients(backend, u, x, a, ctx.counts)
            if needs_b:
                db = _group_gradients(backend, own, products[i], b, ctx.counts)
            gradients += [da, db]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy.new_empty(dy.shape[0], ctx.weight.shape[2])
            backend.grouped_dx(dy, ctx.weight, ctx.counts, dx, lora=terms)
        return dx, None, None, None, None, *gradients


def _shrink_groups(
    backend: Backend, x: Tensor, a: Tensor, scale: float, counts: Sequence[int]
) -> Tensor:
    out = x.new_empty(x.shape[0], a.shape[1])
    backend.grouped_shrink(x, a, scale, counts, out)
    return out


def _group_gradients(
    backend: Backend, left: Tensor, right: Tensor, factor: Tensor, counts: Sequence[int]
) -> Tensor:
    out = torch.empty_like(factor)
    backend.grouped_factor_gradient(left, right, counts, out)
    return out


class _FrozenHeadMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, rows: slice, contract: str) -> Tensor:
        ctx.backend, ctx.weight, ctx.rows, ctx.contract = engine(x).backend, weight, rows, contract
        return _head_matmul(ctx, x, contract)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _head_matmul(ctx, dy, "cols" if ctx.contract == "rows" else "rows"), None, None, None


def _head_matmul(ctx: Any, x: Tensor, contract: str) -> Tensor:
    size = ctx.weight.shape[1] if contract == "rows" else ctx.rows.stop - ctx.rows.start
    out = x.new_empty(x.shape[0], x.shape[1], size)
    ctx.backend.head_matmul(x, ctx.weight, ctx.rows, contract, out)
    return out
