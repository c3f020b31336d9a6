"""The matrix: every contract on every case it applies to, the worst of each in one table, and the docs page.

python -m tests.base.matrix --write docs/base-model.md     # the full product, about 4 minutes on one core
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path

from tests.base.bench import LENGTHS, Bench, Case
from tests.base.contracts import CONTRACTS, Contract
from tests.base.subject import Subject
from tests.base.variants import TOPK, VARIANTS, WEIGHTS, write_variant

BATCHES = (1, 3)
THOROUGH = ("5.2-like", "1 of 2 groups, not normalised", "bf16 source")
"""Variants on which the default suite measures the costly contracts too."""


def full_product() -> list[Case]:
    """Every variant, weights, length and batch."""
    return [Case(*names) for names in product(VARIANTS, WEIGHTS, LENGTHS, BATCHES)]


def representative() -> list[Case]:
    """One long batch of every variant, and more of the one that is like GLM-5.2."""
    return [
        case
        for case in full_product()
        if (case.length == "above" and case.batch == 3 and case.weights == "unit gain")
        or (case.variant == "5.2-like" and (case.length == "above" or case.weights == "unit gain"))
    ]


@dataclass
class Line:
    """What one contract came to."""

    contract: Contract
    cases: int = 0
    figure: float = 0.0
    limit: float = 0.0
    worst: str = ""
    broken: list[str] = field(default_factory=list)

    def note(self, case: Case, figure: float, limit: float) -> None:
        """Add a case; the worst is the one nearest to (or farthest beyond) its limit."""
        self.cases += 1
        if self.contract.pooled:
            self.figure, self.limit, self.worst = self.figure + figure, self.limit + limit, "sum"
            return
        if not figure <= limit:  # a NaN is noted too
            self.broken.append(f"{self.contract.name}: {figure:.3g} > {limit:.3g}; {case}")
        if not self.worst or _nearness(figure, limit) > _nearness(self.figure, self.limit):
            self.figure, self.limit, self.worst = figure, limit, str(case)

    def failures(self) -> list[str]:
        """One line for each broken case."""
        if self.contract.pooled and not self.figure <= self.limit:
            return [f"{self.contract.name}: {self.figure:.3g} > {self.limit:.3g}"]
        return self.broken

    def cells(self) -> tuple[str, str, str, str, str]:
        """Contract, limit, worst figure, where, number of cases."""
        shown = f"{self.figure:.2g}"
        if self.limit not in (0, float("inf")) and not _is_fixed(self.contract):
            shown += f" of {self.limit:.2g}"
        return (
            self.contract.name,
            self.contract.limit,
            shown,
            self.worst if self.figure else "-",
            str(self.cases),
        )


def _is_fixed(contract: Contract) -> bool:
    return "twice" not in contract.limit


def _nearness(figure: float, limit: float) -> float:
    return figure / limit if 0 < limit < float("inf") else figure


def run_matrix(
    cases: Iterable[Case], folder: Path, *, costly_on: Collection[str] = tuple(VARIANTS)
) -> list[Line]:
    """Measure every contract on the cases that it applies to; a checkpoint is written and loaded once.

    Costly contracts are measured on the variants ``costly_on``.
    """
    lines = [Line(contract) for contract in CONTRACTS]
    ordered = sorted(cases, key=lambda case: (case.variant, case.weights))
    for number, ((variant, weights), group) in enumerate(
        groupby(ordered, key=lambda case: (case.variant, case.weights))
    ):
        place = folder / str(number)
        subject = Subject(write_variant(place / "model", VARIANTS[variant], WEIGHTS[weights]))
        for case in group:
            bench = Bench(case, subject, place / f"{case.length} {case.batch}")
            for line in lines:
                skipped = line.contract.costly and variant not in costly_on
                if line.contract.where(case) and not skipped:
                    line.note(case, *line.contract.measure(bench))
    return lines


def table(lines: Sequence[Line]) -> str:
    """Aligned columns, for a terminal."""
    rows = [("contract", "limit", "worst", "where it was worst", "cases")]
    rows += [line.cells() for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


PAGE = """# The base model against transformers

The frozen base of this package must be the model that its checkpoint describes. What is compared, on how many
configurations, and how near it comes, is measured by `tests/base/matrix.py`; this page is its output (CPU, one thread):

    python -m tests.base.matrix --write docs/base-model.md

The oracle is `GlmMoeDsaForCausalLM` of transformers 5.23, eager attention, on the dequantised weights of the same file. The
{variants} configurations are small models (4 to 7 layers, hidden size 64 or 88):

{names}

Each is run with four sizes of weights: as transformers initialises them (`default init`: standard deviation 0.02), those
with every projection four times as large, projections that keep the size of their input as in a trained model (`unit gain`),
and those times four. Batches have {lengths} tokens where `index_topk` is {topk}, one row and three.

A long row is computed in another way than a short one: its queries are scored, and attend, a few at a time, and the keys that
they selected are copied out first, where a short row takes all queries and the whole range of keys at once. The two ways must
give the same. So batches of one row run as the model chooses (at these lengths all at once, though with 12 heads copies are
taken at {longest} tokens too), and batches of three rows are made to run as long rows do, forward and backward: always copies,
and a few queries at a time in attention and in scoring. `tests/base/test_paths.py` counts that this is what happens.

All configurations have at least 16 index heads. With fewer it happens that every head's ReLU is zero for several keys; their
scores are then exactly equal, and which of them are among the `index_topk` best is arbitrary in transformers (here the earliest
are taken), so there would be nothing to compare with.

| contract | limit | worst figure | where it was worst | cases |
|---|---|---|---|---|
{rows}

"x of y" is a figure beside the limit that held in that case.

## What each line means

{meanings}
"""


def page(lines: Sequence[Line]) -> str:
    """The docs page."""
    *lengths, last = (str(length) for length in LENGTHS.values())
    return PAGE.format(
        variants=len(VARIANTS),
        names="\n".join(f"- {name}" for name in VARIANTS),
        lengths=f"{', '.join(lengths)} or {last}",
        topk=TOPK,
        longest=LENGTHS["above"],
        rows="\n".join("| " + " | ".join(line.cells()) + " |" for line in lines),
        meanings="\n\n".join(
            f"**{line.contract.name}** (limit {line.contract.limit}). {line.contract.meaning}"
            for line in lines
        ),
    )


def main() -> None:
    """Run the full product, print its table, write the page; exit 1 if a contract is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="docs page to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = run_matrix(full_product(), Path(folder))
    print(table(lines))
    failures = [failure for line in lines for failure in line.failures()]
    print("\n".join(failures))
    if given.write is not None and not failures:
        given.write.write_text(page(lines), encoding="utf-8")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
