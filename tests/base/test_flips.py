"""Flips of discrete choices in bf16: the rule on numbers, on real runs, and planted flips that it must find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.base.bench import Bench, Case
from tests.base.contracts import CONTRACTS
from tests.base.flips import index_flips, route_flips, unexplained
from tests.base.subject import Subject
from tests.base.variants import VARIANTS, WEIGHTS, write_variant

CASE = Case("2 of 4 groups", "unit gain", "above", 3)
NAMES = ("bf16: unexplained index flips", "bf16: unexplained route flips")


def _chosen(*places: int) -> Tensor:
    return torch.zeros(1, 5, dtype=torch.bool).index_fill(1, torch.tensor(places), True)


@pytest.mark.parametrize(
    ("ours", "moved", "wrong"),
    [
        ((0, 1), 0.0, False),  # the same choice
        ((0, 2), 0.06, False),  # 0.1 apart, and scores that differ by 0.06
        ((0, 2), 0.04, True),
        (
            (1, 2),
            0.06,
            True,
        ),  # the very best lost: beyond, though the second and third are near enough
        ((0,), 0.06, True),  # one too few
    ],
)
def test_a_flip_is_explained_by_scores_that_differ_by_half_its_margin(
    ours: tuple[int, ...], moved: float, wrong: bool
) -> None:
    theirs = torch.tensor([[2.0, 1.0, 0.9, 0.0, -torch.inf]], dtype=torch.float64)
    mine = theirs + torch.tensor([0.0, 0.0, moved, 0.0, 0.0])
    found = unexplained(_chosen(*ours), _chosen(0, 1), mine, theirs, theirs.isfinite())
    assert found.tolist() == [wrong]


def test_a_score_that_was_never_computed_explains_nothing() -> None:
    scores, missing = torch.arange(5.0)[None], torch.full((1, 5), float("nan"))
    everything = torch.ones(1, 5, dtype=torch.bool)
    assert unexplained(_chosen(2, 4), _chosen(3, 4), missing, scores, everything).item()
    assert not unexplained(_chosen(3, 4), _chosen(3, 4), missing, scores, everything).item()


def _figures(bench: Bench) -> dict[str, float]:
    return {c.name: c.measure(bench)[0] for c in CONTRACTS if c.name in NAMES}


def _plant_a_key(patch: pytest.MonkeyPatch) -> None:
    """The last query of the first row takes, in place of the key that it chose first, the first one it did not choose."""
    from megatron_xorl.layers import indexer

    real = indexer.select_topk

    def planted(*given: Any) -> Tensor:
        selected = real(*given)
        taken = set(selected[-1, 0].tolist())
        selected[-1, 0, 0] = next(key for key in range(selected.shape[0]) if key not in taken)
        return selected

    patch.setattr(indexer, "select_topk", planted)


def _plant_an_expert(patch: pytest.MonkeyPatch) -> None:
    """The last token takes the worst expert in place of the best."""
    from megatron_xorl.layers import router

    real = router.choose_experts

    def planted(logits: Tensor, bias: Tensor, glm: Any, *replay: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = real(logits, bias, glm, *replay)
        scores = logits[-1].sigmoid() + bias
        chosen[-1, scores[chosen[-1]].argmax()] = scores.argmin()
        return weights, chosen

    patch.setattr(router, "choose_experts", planted)


def test_flips_are_explained_and_a_planted_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(
        write_variant(tmp_path / "model", VARIANTS[CASE.variant], WEIGHTS[CASE.weights])
    )
    sound = Bench(CASE, subject, tmp_path)
    glm = subject.glm
    # There are flips to explain, or the rule would be idle; in fp32 there are none.
    assert index_flips(sound.half, sound.their_half).found > 0
    assert route_flips(sound.half, sound.their_half, glm.n_group, glm.topk_group).found > 0
    assert index_flips(sound.ours, sound.theirs) == (0, 0)
    assert route_flips(sound.ours, sound.theirs, glm.n_group, glm.topk_group) == (0, 0)
    assert _figures(sound) == dict.fromkeys(NAMES, 0.0)
    for plant, name in zip((_plant_a_key, _plant_an_expert), NAMES, strict=True):
        with monkeypatch.context() as patch:
            plant(patch)
            bench = Bench(CASE, subject, tmp_path)
            bench.their_half = sound.their_half
            assert _figures(bench)[name] > 0, name
    assert _figures(Bench(CASE, subject, tmp_path)) == dict.fromkeys(NAMES, 0.0)
