"""Indexer and sparse attention: ties, empty rows, short sequences, deterministic sums, a rank's heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_xorl.kernels import (
    indexer_backward,
    indexer_kl,
    indexer_logits,
    sparse_mla,
    sparse_mla_backward,
    sparse_mla_probs,
    topk,
)
from megatron_xorl.kernels.attention_subjects import selection
from megatron_xorl.kernels.linear_subjects import bf16, random_codes
from megatron_xorl.kernels.segment_sum import reference as segment_reference
from megatron_xorl.kernels.segment_sum import segment_sum
from megatron_xorl.kernels.subjects import relative

S, T, H, D, DR, TOPK = 4, 24, 16, 32, 16, 12
SCALE = (D + DR) ** -0.5


def attention(heads: int = H) -> dict[str, Tensor]:
    width = D + DR
    dims = {"S": S, "T": T, "topk": TOPK}
    found = {"q": bf16(S, heads, width, device="cpu"), "kv": bf16(T, width, device="cpu")}
    found |= {"index": selection(dims, "cpu"), "grad": bf16(S, heads, D, device="cpu")}
    found["out"], found["lse"] = forward(found)
    return found


def forward(o: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return sparse_mla.sparse_mla(o["q"], o["kv"], o["index"], SCALE, D)


def backward(o: dict[str, Tensor], **kw: object) -> tuple[Tensor, Tensor]:
    operands = (o[name] for name in ("grad", "q", "kv", "index", "out", "lse"))
    return sparse_mla_backward.sparse_mla_backward(*operands, SCALE, **kw)


def exactly(*rows: list[float], topk_: int, lo: int = 0) -> list[list[int]]:
    scores = torch.tensor(rows)
    count = scores.shape[0]
    low = torch.full((count,), lo, dtype=torch.int32)
    high = torch.full((count,), scores.shape[1], dtype=torch.int32)
    return topk.topk_select(scores, low, high, topk_).tolist()


def test_of_equal_scores_the_lowest_index_is_taken() -> None:
    assert exactly([1.0, 3.0, 1.0, 1.0, 2.0], topk_=3) == [[1, 4, 0]]


def test_minus_zero_equals_zero() -> None:
    assert exactly([-0.0, 0.0, -0.0, -1.0], topk_=2) == [[0, 1]]


def test_infinities_below_and_nan_are_never_selected() -> None:
    inf, nan = float("inf"), float("nan")
    assert exactly([-inf, 1.0, nan, -2.0, inf], [-inf] * 5, topk_=4) == [[1, 4, 3, -1], [-1] * 4]


def test_the_range_is_obeyed_and_an_empty_one_selects_nothing() -> None:
    assert exactly([9.0, 1.0, 2.0, 8.0], topk_=2, lo=1) == [[3, 2]]
    assert exactly([9.0, 1.0], topk_=2, lo=2) == [[-1, -1]]


def test_values_that_differ_in_the_last_bit_alone_are_told_apart() -> None:
    base = torch.full((600,), 1.0)
    base[[7, 300, 599]] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    scores = torch.stack([base, -base])
    ranges = torch.zeros(2, dtype=torch.int32), torch.full((2,), 600, dtype=torch.int32)
    found = topk.topk_select(scores, *ranges, 3)
    assert found.tolist() == [[7, 300, 599], [0, 1, 2]]


def test_scores_of_a_strided_matrix_are_read_in_place() -> None:
    scores = torch.randn(3, 40)
    ranges = torch.zeros(3, dtype=torch.int32), torch.full((3,), 30, dtype=torch.int32)
    assert torch.equal(
        topk.topk_select(scores[:, 5:35], *ranges, 8),
        topk.topk_select(scores[:, 5:35].contiguous(), *ranges, 8),
    )


def test_equal_keys_have_equal_scores_wherever_they_stand() -> None:
    keys = random_codes(1, 32, device="cpu").view(torch.uint8).expand(300, 32).contiguous()
    q = random_codes(3, 16, 32, device="cpu")
    lo, hi = torch.zeros(3, dtype=torch.int32), torch.full((3,), 300, dtype=torch.int32)
    found = indexer_logits.indexer_logits(q, keys, torch.ones(300), torch.randn(3, 16), lo, hi)
    assert torch.equal(found, found[:, :1].expand_as(found))


def test_a_query_without_keys_attends_to_nothing() -> None:
    o = attention()
    empty = S // 2
    assert (o["index"][empty] == -1).all()
    assert (o["out"][empty] == 0).all() and (o["lse"][empty] == float("inf")).all()
    dq, _ = backward(o)
    assert (dq[empty] == 0).all()
    probs = sparse_mla_probs.sparse_mla_probs(o["q"], o["kv"], o["index"], o["lse"], SCALE, D)
    assert (probs[empty] == 0).all()
    # Every other row sums to the number of heads, up to fp32.
    torch.testing.assert_close(probs.sum(1)[empty + 1 :], torch.full((S - empty - 1,), float(H)))


def test_a_query_does_not_depend_on_the_others() -> None:
    o = attention()
    one = {name: x[3:4] if x.shape[0] == S else x for name, x in o.items()}
    out, lse = forward(one)
    assert torch.equal(out, o["out"][3:4]) and torch.equal(lse, o["lse"][3:4])
    assert torch.equal(backward(one)[0], backward(o)[0][3:4])


def test_the_heads_of_a_rank_are_a_slice_of_all_heads() -> None:
    o = attention()
    part = o | {name: o[name][:, :8] for name in ("q",)}
    out, lse = forward(part)
    assert relative(out, o["out"][:, :8]) < 4e-3 and relative(lse, o["lse"][:, :8]) < 2e-6


def test_ordered_key_gradients_do_not_depend_on_the_chunks() -> None:
    o = attention()
    whole = backward(o, deterministic=True)
    single = backward(o, deterministic=True, scratch_bytes=1)
    assert torch.equal(whole[0], single[0]) and torch.equal(whole[1], single[1])
    assert relative(backward(o)[1], whole[1]) < 2e-7


def test_ordered_indexer_gradients_do_not_depend_on_the_chunks() -> None:
    index = selection({"S": 3, "T": T, "topk": TOPK}, "cpu")
    operands = (
        bf16(3, H, D, device="cpu"), bf16(T, D, device="cpu"), torch.randn(3, H), index,
        torch.randn(index.shape), 0.3,
    )  # fmt: skip
    call = indexer_backward.indexer_backward
    whole = call(*operands, deterministic=True)
    single = call(*operands, deterministic=True, scratch_bytes=1)
    assert all(torch.equal(a, b) for a, b in zip(whole, single, strict=True))
    assert relative(call(*operands)[1], whole[1]) < 2e-7


def test_parts_are_added_in_their_order() -> None:
    total, part = torch.randn(5, 20), torch.randn(12, 20)
    index = torch.tensor([3, -1, 0, 3, 3, 1, 0, -1, 4, 3, 1, 0], dtype=torch.int32)
    expected = total.clone()
    for row, where in zip(part, index.tolist(), strict=True):
        if where >= 0:
            expected[where] += row
    reference = segment_reference(total, part, index, torch.float64)
    segment_sum(total, part, index)
    assert torch.equal(total, expected)
    assert relative(total, reference) < 2e-7


def test_rows_without_keys_or_without_a_target_have_no_loss() -> None:
    selected = torch.randn(3, 10)
    selected[0] = float("-inf")
    probs = torch.rand(3, 10)
    probs[1] = 0.0
    loss, slope = indexer_kl.indexer_kl(selected, probs, 1.0)
    assert (loss[:2] == 0).all() and (slope[:2] == 0).all() and loss[2] > 0
    assert abs(slope[2].sum()) < 1e-6


def test_the_loss_is_torchs_divergence() -> None:
    selected, probs = torch.randn(4, 20), torch.rand(4, 20)
    target = probs / probs.sum(-1, keepdim=True)
    loss, _ = indexer_kl.indexer_kl(selected, probs, 1.0)
    oracle = torch.nn.functional.kl_div(selected.log_softmax(-1), target, reduction="none").sum(-1)
    torch.testing.assert_close(loss, oracle)


def test_what_does_not_fit_is_refused() -> None:
    o = attention()
    with pytest.raises(ValueError, match="powers of two"):
        sparse_mla.sparse_mla(o["q"], o["kv"], o["index"], SCALE, 24)
    with pytest.raises(ValueError, match="do not fit"):
        sparse_mla.sparse_mla(o["q"], o["kv"], o["index"].long(), SCALE, D)
    with pytest.raises(ValueError, match="expected float32"):
        topk.topk_select(torch.ones(1, 4).double(), o["index"][0, :1], o["index"][0, :1], 2)
