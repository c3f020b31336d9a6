"""The three tables of run_all.py, and what in them is not as it must be.

The one idea: a table is made from plain numbers, so that a test can make up a job that went wrong and see its table say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SIZES = ("trained", "parameters", "optimizer", "checkpoint", "adapter")
HEADS = ("factors that train", "parameters", "optimizer B", "checkpoint B", "adapter B")


class Table(NamedTuple):
    """A title, the names of the columns, the rows, and a line for each fault."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    faults: list[str]

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *texts, *(f"NOT AS IT MUST BE: {it}" for it in self.faults)])


def failed(outcome: object) -> bool:
    """Whether a task ended in an error, which then is its outcome."""
    return isinstance(outcome, Exception)


def eight_table(found: Mapping[str, Any], bare: Any) -> Table:
    """One adapter a pair.

    Args:
        found: by project, ``{"loss", "recall", "seed"}`` of its adapter, or the error.
        bare: recall of every project in the same order by the bare base, or the error.
    """
    rows, faults = [], [f"the bare base: {bare}"] if failed(bare) else []
    alone = [None] * len(found) if failed(bare) else [pair["exact"] for pair in bare["pairs"]]
    right = 0
    for (project, outcome), known in zip(found.items(), alone, strict=True):
        without = "?" if known is None else f"{int(known)}/1"
        if known:
            faults.append(f"{project}: the base knows the answer without an adapter")
        if failed(outcome):
            faults.append(f"{project}: {outcome}")
            rows.append((project, "-", "-", "-", without, "-"))
            continue
        (pair,) = outcome["recall"]["pairs"]
        right += pair["exact"]
        if not pair["exact"]:
            faults.append(f"{project}: expected {pair['expected']!r}")
        score = f"{int(pair['exact'])}/1"
        loss = f"{outcome['loss']:.6f}"
        rows.append((project, str(outcome["seed"]), loss, score, without, pair["got"]))
    known = "?" if failed(bare) else f"{sum(alone)}/{len(rows)}"
    rows.append(("together", "", "", f"{right}/{len(rows)}", known, ""))
    columns = ("adapter", "seed", "final loss", "recall with", "without", "answer")
    return Table("Eight pairs, eight adapters", columns, rows, faults)


def swapped(recall: Mapping[str, Any]) -> int:
    """Answers that are right for another question."""
    pairs = recall["pairs"]
    return sum(
        any(pair["got"] == other["expected"] for other in pairs if other is not pair)
        for pair in pairs
    )


def three_table(found: Mapping[str, Any]) -> Table:
    """Three pairs in one adapter, by scope: ``{"loss", "recall", "sizes"}`` of each, or the error.

    ``all`` must know every answer; another scope is reported as it is.
    """
    rows, faults = [], []
    for scope, outcome in found.items():
        if failed(outcome):
            faults.append(f"{scope}: {outcome}")
            rows.append((scope, *["-"] * (len(SIZES) + 3)))
            continue
        recall, mixed = outcome["recall"], swapped(outcome["recall"])
        score = f"{recall['exact']}/{recall['total']}"
        if scope == "all" and (recall["exact"] != recall["total"] or mixed):
            faults.append(f"{scope}: {score} exact, {mixed} swapped")
        rows.append((scope, *size_cells(outcome), f"{outcome['loss']:.6f}", score, str(mixed)))
    columns = ("scope", *HEADS, "final loss", "recall", "swapped")
    return Table("Three pairs in one adapter, same data and steps", columns, rows, faults)


def scope_table(found: Mapping[tuple[str, str], Any], base: Any, steps: int) -> Table:
    """Every scope with frozen factors kept and dropped.

    Args:
        found: by ``(scope, "keep" or "drop")``, ``{"losses", "sizes"}``, or the error.
        base: loss of the bare base on the first batch, or the error.
        steps: losses that each must have.
    """
    rows, faults = [], [f"the bare base: {base}"] if failed(base) else []
    equal = {scope: _first_difference(found, scope) for scope, _ in found}
    for (scope, frozen), outcome in found.items():
        if failed(outcome):
            faults.append(f"{scope}, {frozen}: {outcome}")
            rows.append((scope, frozen, *["-"] * (len(SIZES) + 4)))
            continue
        first, last = outcome["losses"][0], outcome["losses"][-1]
        if len(outcome["losses"]) != steps:
            faults.append(f"{scope}, {frozen}: {len(outcome['losses'])} steps, expected {steps}")
        if not failed(base) and first != base:
            faults.append(f"{scope}, {frozen}: first loss {first!r}, the base's is {base!r}")
        built = str(outcome["sizes"]["built"])
        verdict = {None: "-", 0: "yes"}.get(equal[scope], "no")
        rows.append((scope, frozen, built, *size_cells(outcome), repr(first), repr(last), verdict))
    faults += [
        f"{scope}: keep and drop differ from step {step} on"
        for scope, step in equal.items()
        if step
    ]
    columns = (
        "scope",
        "frozen",
        "factors built",
        *HEADS,
        "loss at step 1",
        f"at step {steps}",
        "keep = drop",
    )
    title = f"Scopes, frozen factors kept and dropped; loss of the bare base {base!r}"
    return Table(title, columns, rows, faults)


def _first_difference(found: Mapping[tuple[str, str], Any], scope: str) -> int | None:
    """First step whose loss is not the same, to the bit, with factors kept and dropped; 0 if none, None if one has no losses."""
    kept, dropped = found[scope, "keep"], found[scope, "drop"]
    if failed(kept) or failed(dropped):
        return None
    pairs = zip(kept["losses"], dropped["losses"], strict=False)
    return next((step for step, (left, right) in enumerate(pairs, 1) if left != right), 0)


def size_cells(outcome: Mapping[str, Any]) -> Sequence[str]:
    """Factors, parameters and bytes as text."""
    return [f"{outcome['sizes'][name]:,}" for name in SIZES]
