"""The matrix runs both ways of the sparse layers: what ran is counted, forward and backward, and the ways agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.base import measures
from tests.base.bench import LENGTHS, Bench, Case
from tests.base.paths import Taken, counted, like_long_rows
from tests.base.subject import Subject, run_ours
from tests.base.variants import VARIANTS, WEIGHTS, write_variant

LAYERS, INDEXERS = 7, 4
"""Of the variant like GLM-5.2."""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Like GLM-5.2."""
    folder = tmp_path_factory.mktemp("paths") / "model"
    return Subject(write_variant(folder, VARIANTS["5.2-like"], WEIGHTS["unit gain"]))


def _bench(subject: Subject, length: str, batch: int) -> Bench:
    return Bench(Case("5.2-like", "unit gain", length, batch), subject, subject.directory)


def _taken(subject: Subject, length: str, batch: int, what: str) -> Taken:
    bench = _bench(subject, length, batch)
    with counted() as taken:
        getattr(bench, what)
    return taken


def test_three_rows_take_copies_and_several_chunks(subject: Subject) -> None:
    for what, passes in (("ours", 1), ("half", 1), ("embedding_gradients", 2)):
        taken = _taken(subject, "above", 3, what)
        assert len(taken.chunks) == passes * LAYERS * 3, what
        assert min(taken.chunks) >= 5 and taken.copied == sum(taken.chunks), what
        assert taken.ranges == 0, what
        assert len(taken.scored) == INDEXERS * 3 and min(taken.scored) >= 4, what


def test_one_row_takes_one_range_and_scores_at_once(subject: Subject) -> None:
    for what, passes in (("ours", 1), ("embedding_gradients", 2)):
        taken = _taken(subject, "above", 1, what)
        assert taken.chunks == [1] * passes * LAYERS, what
        assert (taken.copied, taken.ranges) == (0, passes * LAYERS), what
        assert taken.scored == [1] * INDEXERS, what


@pytest.mark.parametrize("length", ["below", "at"])
def test_up_to_index_topk_tokens_nothing_is_scored_and_attention_still_goes_both_ways(
    length: str, subject: Subject
) -> None:
    chunked, whole = (_taken(subject, length, batch, "ours") for batch in (3, 1))
    assert min(chunked.chunks) >= 2 and chunked.ranges == 0
    assert whole.chunks == [1] * LAYERS and whole.copied == 0
    assert chunked.scored == whole.scored == []


def test_both_ways_give_the_same(subject: Subject) -> None:
    found, ids = _bench(subject, "above", 3).ours, subject.ids(3, LENGTHS["above"])
    whole = run_ours(subject.model, ids)
    assert all(torch.equal(found.selected[n], whole.selected[n]) for n in whole.selected)
    assert not torch.equal(found.logits, whole.logits)  # sums in another order
    # fp32 noise through seven layers, in logits of size one: the limit of the matrix.
    torch.testing.assert_close(found.logits, whole.logits, atol=1e-5, rtol=0)


def _lose_a_copy(patch: pytest.MonkeyPatch) -> None:
    """A query that attends to copies misses the last of them."""
    from megatron_xorl.layers import sparse

    real = sparse._chunk

    def chunk(*given: Any) -> Any:
        made = real(*given)
        if not isinstance(made.slots, slice):
            made.used[-1, -1] = False
        return made

    patch.setattr(sparse, "_chunk", chunk)


def _lose_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """The last copy gives no gradient back to its key."""
    from megatron_xorl.layers import sparse

    real = sparse._Chunk.add_key_gradient

    def add(self: Any, total: Tensor, *given: Tensor) -> None:
        before = total.clone()
        real(self, total, *given)
        if not isinstance(self.slots, slice):
            total[self.slots[-1]] = before[self.slots[-1]]

    patch.setattr(sparse._Chunk, "add_key_gradient", add)


def _score_later_chunks_wrongly(patch: pytest.MonkeyPatch) -> None:
    """Every chunk of scores but the first of a row has the wrong head weights for its first query."""
    from megatron_xorl.layers import indexer

    real = indexer._scores

    def scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        if len(query) < len(key) and len(query) > 1:
            weights = torch.cat([weights[1:2], weights[1:]])
        return real(query, key, weights)

    patch.setattr(indexer, "_scores", scores)


@pytest.mark.parametrize(
    ("fault", "measure"),
    [
        (_lose_a_copy, measures.logits),
        (_lose_a_gradient, measures.gradient),
        (_score_later_chunks_wrongly, measures.index_sets),
    ],
)
def test_a_fault_of_the_way_of_long_rows_is_caught_by_three_rows_and_hidden_from_one(
    fault: Any, measure: Any, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    for batch, caught in ((3, True), (1, False)):
        figure, limit = measure(_bench(subject, "above", batch))
        assert (figure > limit) is caught, batch


def test_the_constants_are_restored_whatever_happens() -> None:
    from megatron_xorl.layers import indexer, sparse

    def constants() -> tuple[float, ...]:
        return sparse.COPY_HEADS, sparse.WORKSPACE_BYTES, indexer.SCORE_BYTES

    before = constants()
    with pytest.raises(ZeroDivisionError), like_long_rows():
        assert all(now != then for now, then in zip(constants(), before, strict=True))
        raise ZeroDivisionError
    assert constants() == before
