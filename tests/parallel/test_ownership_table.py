"""The printed owners are what the marks do: compared with a count over every rank, for every kind of factor and layout."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_xorl.adapters.cuts import owned_ranges
from megatron_xorl.cli import main
from megatron_xorl.config.layout import ParallelLayout, rank_coordinates
from megatron_xorl.parallel import ownership_table
from megatron_xorl.parallel.ownership_table import (
    AXES,
    DENSE_SUM,
    EXPERT_SUM,
    TENSOR_SUM,
    factor_owners,
)
from tests.parallel.test_ownership import KINDS, LAYOUTS, _factor

GRIDS = (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp"))


def _layout(sizes: tuple[int, ...], pp: int = 1) -> ParallelLayout:
    tp, ep, etp, cp, dp = sizes
    return ParallelLayout(tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, world=tp * cp * dp * pp)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_sums_are_those_of_a_count_over_all_ranks(kind: str) -> None:
    factor = _factor(KINDS[kind])
    for sizes in LAYOUTS:
        layout = _layout(sizes)
        places = [rank_coordinates(layout, rank) for rank in range(layout.world)]
        own = owned_ranges(factor, layout, places[0])
        holders = [place for place in places if owned_ranges(factor, layout, place) == own]
        found = factor_owners(factor, layout)
        assert found.sound and found.copies == len(holders), (kind, layout)
        for grid in GRIDS:
            for axis in grid:
                line = [
                    place
                    for place in places[1:]
                    if all(
                        getattr(place, other) == getattr(places[0], other)
                        for other in grid
                        if other != axis
                    )
                ]
                same = sum(place in holders for place in line)
                expected = (
                    "alone" if not line else "cut" if not same else "copies" if same == len(line) else "both"
                )  # fmt: skip
                assert found.axes[axis].holds == expected, (kind, axis, layout)
                # Whoever holds a copy is reached: no axis has copies that nobody sums.
                assert bool(found.axes[axis].by) == bool(same), (kind, axis, layout)


def test_the_owners_that_the_design_names() -> None:
    layout = ParallelLayout(tp=2, ep=2, etp=1, cp=1, pp=2, world=8)
    shared = factor_owners(_factor(KINDS["bank shared A"]), layout)
    assert (shared.axes["tp"].by, shared.axes["dp"].by) == ((TENSOR_SUM,), (DENSE_SUM,))
    own = factor_owners(_factor(KINDS["bank own B"]), layout)
    assert (str(own.axes["ep"]), own.axes["edp"].by) == ("cut", (EXPERT_SUM,))
    assert str(own.axes["pp"]) == "one stage"
    column = factor_owners(_factor(KINDS["column B"]), layout)
    assert (str(column.axes["tp"]), column.axes["dp"].by) == ("cut", (DENSE_SUM,))
    # EP folded over TP alone: the copies along ep are the tensor ranks.
    folded = ParallelLayout(tp=2, ep=2, world=2)
    assert factor_owners(_factor(KINDS["bank shared A"]), folded).axes["ep"].by == (TENSOR_SUM,)


@pytest.mark.parametrize(
    ("kind", "wrong", "sizes"),
    [
        ("bank shared A", {"allreduce": False}, {"ep": 2}),
        ("bank shared A", {"allreduce": False}, {"tp": 2, "ep": 2}),
        ("bank shared B", {"sequence_parallel": False}, {"tp": 2, "ep": 2}),
        ("bank own B", {"allreduce": True}, {"ep": 2}),
        ("bank own A", {"sequence_parallel": True}, {"tp": 2, "ep": 2}),
        ("replicated A", {"sequence_parallel": False}, {"tp": 2}),
    ],
)
def test_a_wrong_mark_shows_in_the_table(
    kind: str, wrong: dict[str, bool], sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ParallelLayout(**sizes, world=4)
    assert factor_owners(_factor(KINDS[kind]), layout).sound
    right = ownership_table.ownership
    monkeypatch.setattr(ownership_table, "ownership", lambda *a, **n: right(*a, **n) | wrong)
    assert not factor_owners(_factor(KINDS[kind]), layout).sound


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    said = capsys.readouterr()
    assert (int(left.value.code or 0), said.err) == (0, "")
    return said.out


def test_the_command_lists_every_factor_once_and_says_frozen_of_what_does_not_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "targets",
        "glm-5.2",
        "--ownership",
        "--tp",
        "2",
        "--ep",
        "8",
        "--cp",
        "2",
        "--pp",
        "2",
    ]
    found: dict[str, Any] = json.loads(_run(capsys, *words, "--json"))
    names = [name for kind in found["kinds"] for name in kind["factors"]]
    assert len(names) == len(set(names)) == 1700
    assert all(kind["copies"] == kind["summed"] for kind in found["kinds"])
    assert all(tuple(kind["axes"]) == AXES for kind in found["kinds"])
    text = _run(capsys, *words, "--scope", "routed_experts")
    assert "frozen" in text and TENSOR_SUM in text and "one stage" in text
