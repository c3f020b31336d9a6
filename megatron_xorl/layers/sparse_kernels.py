"""Sparse attention and its selection by Triton kernels, where the ``triton`` backend computes.

One idea: the layers' functions (``attend_selected`` of :mod:`~megatron_xorl.layers.sparse`, ``select_topk`` of
:mod:`~megatron_xorl.layers.indexer`) stay what is called, and ask here first. What is taken: bf16, and sizes that the kernels
know (widths of powers of two). Anything else returns ``None`` and is computed in torch, which is right at every size.

In mode ``w8a8`` the index scores multiply e4m3 codes of queries and keys (one scale a token and head), as DeepSeek's and SGLang's
indexers do; in ``w8a16`` they stay fp32 products of the bf16 values. The selection of given scores is the same set in every form:
of equal scores the earliest key.

The latents' gradient is summed by fp32 atomics, in an order of their own, or in a fixed one under
``torch.use_deterministic_algorithms(True)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.fp8.engine import engine
from megatron_xorl.layers.visible import VisibleKeys

__all__ = ["attend", "select"]

SCORE_BYTES = 512 << 20
"""What the fp32 scores of one chunk of queries may take on a GPU."""

LEAST_WIDTH = 16  # of a value and of a rotary part: the shortest side of a matrix instruction
Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
"""fp32 ``[q, k]`` of queries ``[q, heads, d]``, keys ``[k, d]`` and head weights ``[q, heads]``."""

INDEX_WIDTHS = (32, 64, 128)
MOST_INDEX_HEADS = 128


def attend(
    query: Tensor, key: Tensor, selected: Tensor, scale: float, value_dim: int
) -> Tensor | None:
    """``attend_selected`` of :mod:`megatron_xorl.layers.sparse`, or None where no kernel takes it."""
    widths = (value_dim, query.shape[-1] - value_dim)
    if not _kernels_compute(query) or not all(w >= LEAST_WIDTH and _is_power(w) for w in widths):
        return None
    output: Tensor = _KernelAttention.apply(query, key, selected.int(), scale, value_dim)
    return output


def select(
    query: Tensor, key: Tensor, weights: Tensor, visible: VisibleKeys, topk: int, scores: Scores
) -> Tensor | None:
    """``select_topk`` of :mod:`megatron_xorl.layers.indexer`, or None where no kernel takes it; ``scores`` is its fp32 form."""
    heads, dim = query.shape[2:]
    fits = dim in INDEX_WIDTHS and _is_power(heads) and heads <= MOST_INDEX_HEADS
    if not _kernels_compute(query) or not fits:
        return None
    from megatron_xorl.kernels.topk import topk_select

    length, batch, keys = query.shape[0], query.shape[1], key.shape[0]
    selected = query.new_empty((length, batch, min(topk, keys)), dtype=torch.int32)
    quantized = engine(query).mode == "w8a8"
    step = max(1, SCORE_BYTES // (4 * keys * (1 if quantized else heads)))
    for row in range(batch):
        column = row if visible.first.shape[1] > 1 else 0
        lo = visible.first[:, column].int()
        hi = visible.last[:, column].int() + 1
        for start in range(0, length, step):
            rows = slice(start, min(start + step, length))
            operands = (query[rows, row], key[:, row], weights[rows, row])
            found = _fp8_scores(*operands, lo[rows], hi[rows]) if quantized else scores(*operands)
            selected[rows, row] = topk_select(
                found, lo[rows].contiguous(), hi[rows].contiguous(), selected.shape[2]
            )
    return selected


def _fp8_scores(query: Tensor, key: Tensor, weights: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    from megatron_xorl.kernels.indexer_logits import indexer_logits
    from megatron_xorl.kernels.quantize_rows import quantize_rows

    queries, heads, dim = query.shape
    codes, scales = quantize_rows(query.reshape(queries * heads, dim))
    key_codes, key_scales = quantize_rows(key)
    weights = weights.float() * scales.view(queries, heads) * dim**-0.5
    return indexer_logits(
        codes.view(queries, heads, dim), key_codes, key_scales[:, 0].contiguous(), weights, lo.contiguous(), hi.contiguous()
    )  # fmt: skip


def _kernels_compute(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and engine(x).backend.name == "triton"


def _is_power(n: int) -> bool:
    return n & (n - 1) == 0


class _KernelAttention(torch.autograd.Function):
    """Row by row of the batch; kept for backward: the inputs, the output, and the log-sum-exp of every query and head."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, selected: Tensor, scale: float, value_dim: int
    ) -> Tensor:
        from megatron_xorl.kernels.sparse_mla import sparse_mla

        ctx.scale = scale
        rows = [
            sparse_mla(query[:, row], key[:, row], selected[:, row].contiguous(), scale, value_dim)
            for row in range(query.shape[1])
        ]
        output = torch.stack([out for out, _ in rows], 1)
        ctx.save_for_backward(query, key, selected, output, *[lse for _, lse in rows])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        from megatron_xorl.kernels.sparse_mla_backward import sparse_mla_backward

        query, key, selected, output, *lse = ctx.saved_tensors
        rows = [
            sparse_mla_backward(
                grad[:, row].contiguous(), query[:, row], key[:, row], selected[:, row].contiguous(), output[:, row],
                lse[row], ctx.scale, deterministic=torch.are_deterministic_algorithms_enabled(),
            )
            for row in range(query.shape[1])
        ]  # fmt: skip
        grad_query = torch.stack([dq for dq, _ in rows], 1)
        grad_key = torch.stack([dkv for _, dkv in rows], 1)
        return grad_query, grad_key.to(key.dtype), None, None, None
