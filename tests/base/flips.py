"""Whether two bf16 runs may differ in a discrete choice: a flip must be explained by how far their scores differ.

The one idea: let D be the largest difference of the two runs' scores in one row. If one run prefers a choice by more than 2 D,
the other must prefer it too, whatever the rounding. So each choice that only one run made must be within 2 D of each that only
the other made. (That the k-th and the next choice are within 2 D follows, and is weaker: it would excuse a flip of the very
best against the very worst.) A flip beyond that is a wrong selection, not a rounding.

Scores are compared as they are chosen by: routes by ``sigmoid(logits) + bias`` and, with groups, groups by the sum of their two
best; keys by their index scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.base.bench import Bench
from tests.base.subject import Seen


class Flips(NamedTuple):
    """Rows (tokens of a layer) in which two runs chose differently."""

    found: int
    unexplained: int


def unexplained(
    ours: Tensor, theirs: Tensor, our_scores: Tensor, their_scores: Tensor, open_to_both: Tensor
) -> Tensor:
    """Rows ``[...]`` whose flip is beyond twice the difference of scores; a score that is NaN explains nothing.

    Args:
        ours, theirs: bool ``[..., n]``, what each run chose.
        our_scores, their_scores: ``[..., n]``.
        open_to_both: bool ``[..., n]``, what both runs could choose.
    """
    a, b = our_scores.double(), their_scores.double()
    bound = 2 * (a - b).abs().masked_fill(~open_to_both, 0).amax(-1)
    lost, won = theirs & ~ours & open_to_both, ours & ~theirs & open_to_both
    highest = b.masked_fill(~lost, float("-inf")).amax(-1)
    lowest = b.masked_fill(~won, float("inf")).amin(-1)
    explained = (highest - lowest <= bound) & (ours.sum(-1) == theirs.sum(-1))
    return (ours != theirs).any(-1) & ~explained


def index_flips(ours: Seen, theirs: Seen) -> Flips:
    """Queries, over all layers that own an indexer."""
    found = wrong = 0
    for layer, sets in theirs.selected.items():
        causal = torch.ones(sets.shape[-2:], dtype=torch.bool).tril()
        flipped = (ours.selected[layer] != sets).any(-1)
        scores = (ours.index_scores[layer], theirs.index_scores[layer])
        bad = unexplained(ours.selected[layer], sets, *scores, causal)
        bad |= (ours.selected[layer] & ~causal).any(-1)
        found += int(flipped.sum())
        wrong += int(bad.sum())
    return Flips(found, wrong)


def route_flips(ours: Seen, theirs: Seen, groups: int, kept: int) -> Flips:
    """Tokens, over all sparse layers; of ``groups`` of experts a token may use ``kept``."""
    found = wrong = 0
    for layer, sets in theirs.routes.items():
        pair = (ours.routes[layer], sets)
        scores = (ours.route_scores[layer], theirs.route_scores[layer])
        grouped = [_kept_groups(score, groups, kept) for score in scores]
        use = [mine.repeat_interleave(sets.shape[-1] // groups, -1) for mine, _ in grouped]
        bad = unexplained(*pair, *scores, use[0] & use[1])
        everything = torch.ones_like(grouped[0][0])
        (our_groups, our_sums), (their_groups, their_sums) = grouped
        bad |= unexplained(our_groups, their_groups, our_sums, their_sums, everything)
        for chosen, allowed in zip(pair, use, strict=True):
            bad |= (chosen & ~allowed).any(-1)
        found += int((pair[0] != sets).any(-1).sum())
        wrong += int(bad.sum())
    return Flips(found, wrong)


def _kept_groups(scores: Tensor, groups: int, kept: int) -> tuple[Tensor, Tensor]:
    """bool ``[T, groups]``, the groups that a token may use, and their scores."""
    if groups == 1:
        return torch.ones_like(scores[:, :1], dtype=torch.bool), torch.zeros_like(scores[:, :1])
    sums = scores.view(len(scores), groups, -1).topk(2, dim=-1).values.sum(-1)
    best = sums.topk(kept, dim=-1).indices
    return torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True), sums


def half_index_flips(bench: Bench) -> tuple[float, float]:
    return float(index_flips(bench.half, bench.their_half).unexplained), 0


def half_route_flips(bench: Bench) -> tuple[float, float]:
    glm = bench.subject.glm
    flips = route_flips(bench.half, bench.their_half, glm.n_group, glm.topk_group)
    return float(flips.unexplained), 0
