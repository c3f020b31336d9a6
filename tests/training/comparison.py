"""What two layouts of one job gave, in logical terms, and how far they differ.

The one idea: every rank reports the pieces of factors and gradients that it holds with their place in
the full logical tensor; :func:`assemble` puts the pieces of all ranks together and refuses if two
ranks hold different bits of the same place. So nothing here knows a layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIMITS = {"gradient": 1e-5, "grad_norm": 1e-5, "loss": 1e-5, "drift": 1e-3}
"""Equality across layouts in fp32: per-factor gradient rel-L2 and gradient norm at identical state; loss at every step and
per-factor drift relative to the distance travelled, free running."""

Piece = tuple[tuple[tuple[int, int], ...], int, int, Tensor]
"""Half-open ranges of the full tensor, then which flattened part of that box the values are."""


@dataclass(frozen=True)
class Outcome:
    """A job's results in logical terms."""

    losses: list[float]
    norms: list[float]
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    gradients: dict[str, dict[str, Tensor]]
    state_norms: dict[str, float]
    choices: dict[tuple[int, int, str], Tensor]
    """Of step 1, where every B is zero."""
    random_choices: dict[tuple[int, int, str], Tensor]
    """At random factors."""
    copies: int
    """Elements of factors that more than one rank holds, all found equal."""
    differing: dict[str, str]
    """Factors whose copies have other hashes (``training.replicas``), and the ranks."""
    cpu_seconds: float
    """Of all ranks together."""


def assemble(pieces: list[dict[str, Piece]]) -> tuple[dict[str, Tensor], int]:
    """Full tensors from the pieces of all ranks, and how many elements more than one rank holds.

    Raises:
        AssertionError: two ranks hold different values of one place, or a place is held by nobody.
    """
    full: dict[str, Tensor] = {}
    copies = 0
    shapes: dict[str, list[int]] = {}
    for held in pieces:
        for name, (ranges, *_) in held.items():
            stops = [stop for _, stop in ranges]
            shapes[name] = [max(a, b) for a, b in zip(shapes.get(name, stops), stops, strict=True)]
    for held in pieces:
        for name, (ranges, start, end, values) in held.items():
            target = full.setdefault(
                name, torch.full(shapes[name], float("nan"), dtype=values.dtype)
            )
            places = torch.arange(target.numel()).view(target.shape)
            box = places[tuple(slice(a, b) for a, b in ranges)].reshape(-1)[start:end]
            there = target.view(-1)[box]
            known = ~there.isnan()
            different = int((there[known] != values[known]).sum())
            assert not different, (
                f"{name}: {different} elements differ between ranks that share them"
            )
            copies += int(known.sum())
            target.view(-1)[box] = values
    for name, value in full.items():
        assert not value.isnan().any(), f"{name}: no rank holds part of it"
    return full, copies


def join_choices(ranks: list[dict[str, Any]], which: str) -> dict[tuple[int, int, str], Tensor]:
    """``[s, …]`` of whole sequences from the tokens that each rank chose for.

    Raises:
        AssertionError: two ranks chose differently for one token.
    """
    joined: dict[tuple[int, int, str], Tensor] = {}
    known: dict[tuple[int, int, str], Tensor] = {}
    for rank in ranks:
        for key, value in rank[which].items():
            slots = rank["slots"][key[2]]
            length = 1 + max(int(other["slots"]["index"].max()) for other in ranks)
            if key not in joined:
                joined[key] = value.new_zeros(length, *value.shape[1:])
                known[key] = torch.zeros(length, dtype=torch.bool)
            twice = known[key][slots]
            assert torch.equal(joined[key][slots][twice], value[twice]), key
            joined[key][slots], known[key][slots] = value, True
    assert all(bool(places.all()) for places in known.values())
    return joined


def relative(found: Tensor, expected: Tensor) -> float:
    """rel-L2 in fp64; a pair of exact zeros is equal."""
    scale = expected.double().norm()
    gap = (found.double() - expected.double()).norm()
    return 0.0 if gap == 0 else (gap / scale).item()


def difference(one: Outcome, other: Outcome) -> dict[str, tuple[float, str]]:
    """Worst figure of each kind in :data:`LIMITS`, with where it was seen."""
    worst = dict.fromkeys(LIMITS, (0.0, ""))

    def note(kind: str, figure: float, where: str) -> None:
        if not figure <= worst[kind][0]:  # a NaN is noted too
            worst[kind] = (figure, where)

    for state, gradients in one.gradients.items():
        assert gradients.keys() == other.gradients[state].keys()
        for name, gradient in gradients.items():
            note("gradient", relative(other.gradients[state][name], gradient), f"{state}, {name}")
        gap = abs(other.state_norms[state] - one.state_norms[state])
        note("grad_norm", gap / one.state_norms[state], state)
    for step, (a, b) in enumerate(zip(one.losses, other.losses, strict=True), 1):
        note("loss", abs(a - b) / abs(a), f"step {step}")
    for name, end in one.end.items():
        travelled = (end - one.start[name]).double().norm().item()
        gap = (other.end[name] - end).double().norm().item()
        note("drift", gap / travelled if travelled else float(gap > 0), name)
    return worst


def beyond_limits(worst: dict[str, tuple[float, str]]) -> dict[str, tuple[float, str]]:
    """The kinds that exceed :data:`LIMITS`."""
    return {kind: found for kind, found in worst.items() if not found[0] <= LIMITS[kind]}
