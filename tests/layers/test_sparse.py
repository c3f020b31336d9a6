"""Attention over selected keys and the chunked selection, against their dense forms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.comparison import relative
from tests.training.harness import use_one_process

CASES = {
    # s, b, heads, d, value, keys, topk
    "fewer keys than topk": (20, 2, 4, 24, 16, 20, 20),
    "a little longer than topk": (50, 2, 4, 24, 16, 50, 32),
    "much longer than topk": (300, 1, 3, 24, 16, 300, 16),
    "one head, one key each": (40, 1, 1, 8, 8, 40, 1),
    "a few queries at the end of many keys": (3, 2, 4, 24, 16, 200, 16),
}
WAYS = {"as it chooses": None, "copies of the keys": 0.0, "ranges of keys": float("inf")}
"""``COPY_HEADS`` that leave the choice between a copy and a range, and that force either."""


def _inputs(case: str, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Query, key, selection, and a weight for every output."""
    s, b, heads, d, value, keys, topk = CASES[case]
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(s, b, heads, d, generator=generator, dtype=torch.float64)
    key = torch.randn(keys, b, d, generator=generator, dtype=torch.float64)
    scores = torch.rand(s, b, keys, generator=generator)
    place = torch.arange(keys - s, keys).view(s, 1, 1)
    best = scores.masked_fill(torch.arange(keys) > place, -1.0).topk(topk)
    selected = best.indices.masked_fill(best.values < 0, -1).int()
    weight = torch.randn(s, b, heads, value, generator=generator, dtype=torch.float64)
    leaves = [t.to(dtype).requires_grad_() for t in (query, key)]
    return (leaves[0], leaves[1], selected), weight.to(dtype)


def _run(form: str, case: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and both gradients."""
    use_one_process()
    from megatron_xorl.layers import sparse

    (query, key, selected), weight = _inputs(case, dtype)
    output = getattr(sparse, form)(query, key, selected, query.shape[-1] ** -0.5, weight.shape[-1])
    output.backward(weight)
    assert query.grad is not None and key.grad is not None
    return [output.detach(), query.grad, key.grad]


@contextmanager
def _forced(way: str, workspace: int | None = None) -> Iterator[None]:
    use_one_process()
    from megatron_xorl.layers import sparse

    with pytest.MonkeyPatch.context() as patch:
        if WAYS[way] is not None:
            patch.setattr(sparse, "COPY_HEADS", WAYS[way] if WAYS[way] else -1e9)
        if workspace is not None:
            patch.setattr(sparse, "WORKSPACE_BYTES", workspace)
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_the_dense_form(case: str, way: str) -> None:
    for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        expected = _run("attend_masked", case, dtype)
        # Chunks of one query, of a few, and one chunk.
        for workspace in (1, 1 << 14, None):
            with _forced(way, workspace):
                found = _run("attend_selected", case, dtype)
            assert all(relative(f, e) <= limit for f, e in zip(found, expected, strict=True))


def test_bf16_is_as_near_to_fp64_as_the_dense_form_is() -> None:
    case = "much longer than topk"
    exact = _run("attend_masked", case, torch.float64)
    dense = _run("attend_masked", case, torch.bfloat16)
    found = _run("attend_selected", case, torch.bfloat16)
    for f, d, e in zip(found, dense, exact, strict=True):
        assert f.dtype == torch.bfloat16
        # Gradients of keys are summed in fp32 here, so they may be nearer; twice the dense form's error at the most.
        assert 1e-4 < relative(f.double(), e) <= 2 * relative(d.double(), e)


def test_a_query_without_a_selected_key_attends_to_nothing() -> None:
    use_one_process()
    from megatron_xorl.layers.sparse import attend_selected

    (query, key, selected), weight = _inputs("much longer than topk", torch.float32)
    selected[100:103] = -1
    for way in WAYS:
        with _forced(way):
            query.grad = key.grad = None
            output = attend_selected(query, key, selected, 0.2, weight.shape[-1])
            output.backward(weight)
        assert not output[100:103].any() and not query.grad[100:103].any()
        assert output.isfinite().all() and key.grad.isfinite().all()
        assert output[103].any() and query.grad[99].any()


def test_gradients_agree_with_finite_differences() -> None:
    use_one_process()
    from megatron_xorl.layers.sparse import attend_selected

    (query, key, selected), _ = _inputs("a little longer than topk", torch.float64)
    some = [t[:9].detach().requires_grad_() for t in (query, key)]
    few = selected[:9].clamp(max=8)
    few = torch.where(torch.arange(few.shape[-1]) < 3, torch.arange(32).int() % 9, -1).expand_as(
        few
    )
    assert torch.autograd.gradcheck(
        lambda q, k: attend_selected(q, k, few, 0.3, 16), some, fast_mode=True
    )


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor):
                self.bytes = max(self.bytes, value.numel() * value.element_size())
        return out


def _largest(form: str, length: int) -> int:
    from megatron_xorl.layers import sparse

    query = torch.randn(length, 1, 8, 24, requires_grad=True)
    key = torch.randn(length, 1, 24, requires_grad=True)
    selected = torch.stack([torch.randperm(length)[:16] for _ in range(length)]).int()
    with _Largest() as seen:
        out = getattr(sparse, form)(query, key, selected.unsqueeze(1), 0.2, 16)
        out.backward(torch.ones_like(out))
    return seen.bytes


def test_no_tensor_of_forward_or_backward_grows_with_the_square_of_the_sequence() -> None:
    # The largest are inputs, outputs and gradients (linear), or one chunk's copies (bounded by the workspace).
    with _forced("as it chooses", 1 << 16):
        short, long = _largest("attend_selected", 512), _largest("attend_selected", 2048)
    assert long <= 4 * short and long <= max(2048 * 8 * 24 * 4, 1 << 16)
    assert _largest("attend_masked", 2048) >= 2048 * 2048 * 8 * 4


# ---- the selection --------------------------------------------------------------------------------


def _index_inputs(length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(length, batch, 16, 12, generator=generator)
    key = torch.randn(length, batch, 12, generator=generator)
    return query, key, torch.randn(length, batch, 16, generator=generator)


def _dense_selection(
    query: Tensor, key: Tensor, weights: Tensor, first: Tensor, topk: int
) -> Tensor:
    """bool ``[b, s, s]`` by one product per head, in fp64: the definition."""
    q, k, w = query.double(), key.double(), weights.double()
    scores = torch.einsum("qbhd,kbd->bqhk", q, k).clamp(min=0) / 12**0.5
    scores = torch.einsum("qbh,bqhk->bqk", w, scores)
    place = torch.arange(len(query))
    legal = (place <= place[:, None]) & (place >= first[:, None])
    best = scores.masked_fill(~legal, float("-inf")).topk(min(topk, len(query)), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & legal


@pytest.mark.parametrize("bounds", [[0, 70], [0, 1, 20, 61, 62, 70], [0, 30, 55]], ids=str)
@pytest.mark.parametrize("score_bytes", [1, 1 << 14, 1 << 30])
def test_the_chunked_selection_is_the_dense_one(bounds: list[int], score_bytes: int) -> None:
    use_one_process()
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_xorl.layers import indexer
    from megatron_xorl.layers.visible import causal_keys
    from tests.training.harness import index_sets

    query, key, weights = _index_inputs(70)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))
    visible = causal_keys(70, packed, query.device)
    first = torch.zeros(70, dtype=torch.int64)
    for start, end in zip(bounds, [*bounds[1:], 70], strict=True):
        first[start:end] = start  # tokens after the last bound are a document of their own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "SCORE_BYTES", score_bytes)
        selected = indexer.select_topk(query, key, weights, visible, 16)
    assert selected.dtype == torch.int32 and selected.shape == (70, 2, 16)
    assert torch.equal(index_sets(selected), _dense_selection(query, key, weights, first, 16))
    for row in selected.flatten(0, 1).tolist():
        chosen = [slot for slot in row if slot >= 0]
        assert len(set(chosen)) == len(chosen)  # no key twice


@pytest.mark.parametrize("topk", [1, 5, 16])
def test_of_equal_scores_the_earliest_key_is_taken_however_many_are_looked_at(topk: int) -> None:
    use_one_process()
    from megatron_xorl.layers import indexer
    from megatron_xorl.layers.visible import causal_keys
    from tests.training.harness import index_sets

    # Small whole numbers: products are exact, and most scores are zero or equal.
    generator = torch.Generator().manual_seed(5)
    query = torch.randint(-1, 2, (70, 1, 2, 4), generator=generator).float()
    key = torch.randint(-1, 2, (70, 1, 4), generator=generator).float()
    weights = torch.randint(-1, 2, (70, 1, 2), generator=generator).float()
    expected = torch.zeros(1, 70, 70, dtype=torch.bool)
    for place in range(70):
        scores = (
            torch.relu(query[place, 0] @ key[: place + 1, 0].T * 0.5) * weights[place, 0, :, None]
        ).sum(0)
        order = sorted(range(place + 1), key=lambda slot: (-scores[slot].item(), slot))
        expected[0, place, order[:topk]] = True
    for score_bytes in (1, 2000, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(indexer, "SCORE_BYTES", score_bytes)
            visible = causal_keys(70, None, query.device)
            selected = indexer.select_topk(query, key, weights, visible, topk)
        assert torch.equal(index_sets(selected), expected)


@pytest.mark.parametrize("length", [1, 7, 15, 16, 17])
def test_sequences_around_topk_select_no_more_than_there_is(length: int) -> None:
    use_one_process()
    from megatron_xorl.layers.indexer import select_topk
    from megatron_xorl.layers.visible import causal_keys

    visible = causal_keys(length, None, torch.device("cpu"))
    selected = select_topk(*_index_inputs(length), visible, 16)
    assert selected.shape == (length, 2, min(16, length))
    counts = (selected >= 0).sum(-1)
    assert torch.equal(counts, torch.arange(1, length + 1).clamp(max=16)[:, None].expand(-1, 2))
    assert int(selected.max()) == length - 1


def test_scoring_makes_no_tensor_beyond_its_workspace_and_one_query_s_scores() -> None:
    use_one_process()
    from megatron_xorl.layers import indexer
    from megatron_xorl.layers.visible import causal_keys

    query, key, weights = _index_inputs(1024, batch=1)
    visible = causal_keys(1024, None, query.device)
    seen = {}
    for limit in (1 << 18, 1 << 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(indexer, "SCORE_BYTES", limit)
            with _Largest() as mode:
                seen[limit] = indexer.select_topk(query, key, weights, visible, 16), mode.bytes
    assert torch.equal(seen[1 << 18][0].sort().values, seen[1 << 40][0].sort().values)
    inputs = query.numel() * 4
    assert seen[1 << 18][1] <= max(inputs, 1 << 18)
    assert seen[1 << 40][1] >= 1024 * 1024 * 16 * 4


def test_bounds_of_padded_documents_keep_padding_out_of_every_document_s_sight() -> None:
    use_one_process()
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_xorl.layers.visible import causal_keys

    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 3, 5], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, 4, 8], dtype=torch.int32),
    )
    visible = causal_keys(8, packed, torch.device("cpu"))
    assert visible.first.flatten().tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert visible.positions.flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
