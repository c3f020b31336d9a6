"""Sparse attention and selection as the layers call them under the ``triton`` backend, interpreted, against fp64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_xorl.fp8 import engine
from megatron_xorl.fp8.engine import use_fp8
from megatron_xorl.kernels.indexer_logits import reference as fp8_scores
from megatron_xorl.kernels.quantize_rows import reference as quantized
from megatron_xorl.kernels.subjects import relative
from tests.training.harness import use_one_process

# The kernels' own limits, bf16 outputs: docs/kernels.md.
OUTPUT, QUERY, LATENT = 4e-3, 6e-3, 5e-3


@pytest.fixture(autouse=True, params=["w8a16", "w8a8"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    use_one_process()
    use_fp8(backend="triton", mode=request.param)
    yield request.param
    engine._asked.backend = engine._asked.mode = None
    engine.engine_on.cache_clear()


def selection(length: int, batch: int, keys: int, topk: int) -> Tensor:
    """Random distinct keys among those before each query, -1 where there are fewer."""
    scores = torch.rand(length, batch, keys)
    place = torch.arange(keys - length, keys).view(-1, 1, 1)
    best = scores.masked_fill(torch.arange(keys) > place, -1.0).topk(topk)
    return best.indices.masked_fill(best.values < 0, -1).int()


def test_attention_and_its_gradients() -> None:
    from megatron_xorl.layers import sparse, sparse_kernels

    query = torch.randn(12, 2, 3, 48).bfloat16().requires_grad_()
    key = torch.randn(40, 2, 48).bfloat16().requires_grad_()
    selected, scale = selection(12, 2, 40, 20), 48**-0.5
    assert sparse_kernels.attend(query, key, selected, scale, 32) is not None
    found = sparse.attend_selected(query, key, selected, scale, 32)
    grad = torch.randn(found.shape).bfloat16()
    wide = [t.detach().double().requires_grad_() for t in (query, key)]
    right = sparse.attend_masked(*wide, selected, scale, 32)
    gradients = zip(
        torch.autograd.grad(found, [query, key], grad),
        torch.autograd.grad(right, wide, grad.double()),
        strict=True,
    )
    assert relative(found.detach(), right.detach()) < OUTPUT
    for (ours, theirs), limit in zip(gradients, (QUERY, LATENT), strict=True):
        assert ours.dtype == torch.bfloat16 and relative(ours, theirs) < limit
    moved = sparse.attend_masked(*wide, selected.roll(1, 0).clamp(min=0), scale, 32)
    assert relative(found.detach(), moved.detach()) > 0.1


def test_what_no_kernel_takes_is_torch_s() -> None:
    from megatron_xorl.layers import sparse_kernels

    selected = selection(3, 1, 9, 4)
    for dtype, width, value in ((torch.float32, 48, 32), (torch.bfloat16, 44, 32), (torch.bfloat16, 40, 32)):  # fmt: skip
        query, key = torch.randn(3, 1, 2, width).to(dtype), torch.randn(9, 1, width).to(dtype)
        assert sparse_kernels.attend(query, key, selected, 1.0, value) is None


@pytest.mark.parametrize("topk", [8, 64])
def test_the_selection(topk: int, mode: str) -> None:
    from megatron_xorl.layers import indexer
    from megatron_xorl.layers.visible import VisibleKeys

    length, heads, dim, keys = 10, 4, 32, 40
    query = torch.randn(length, 2, heads, dim).bfloat16()
    key = torch.randn(keys, 2, dim).bfloat16()
    weights = torch.rand(length, 2, heads)
    last = torch.arange(keys - length, keys)
    first = torch.where(last > 34, 33, 0)  # the last queries belong to a document of their own
    visible = VisibleKeys(first[:, None], last[:, None])
    chosen = indexer.select_topk(query, key, weights, visible, topk)
    assert chosen.dtype == torch.int32 and chosen.shape == (length, 2, min(topk, keys))
    for row in range(2):
        if mode == "w8a8":
            codes, scales = quantized(query[:, row].reshape(-1, dim))
            key_codes, key_scales = quantized(key[:, row])
            folded = weights[:, row] * scales.view(length, heads) * dim**-0.5
            scores = fp8_scores(
                codes.view(length, heads, dim), key_codes, key_scales[:, 0], folded, first.int(), last.int() + 1
            )  # fmt: skip
        else:
            scores = indexer._scores(query[:, row].double(), key[:, row].double(), weights[:, row])
            scores = scores.masked_fill(~visible.legal(slice(None), row, 0, keys), float("-inf"))
        for place in range(length):
            legal = int(scores[place].isfinite().sum())
            best = set(scores[place].topk(min(topk, legal)).indices.tolist())
            assert set(chosen[place, row].tolist()) - {-1} == best
