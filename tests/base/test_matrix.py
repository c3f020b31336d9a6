"""The contracts of the base model hold on every case; the table of worst figures is printed (``pytest -rP``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.base import measures
from tests.base.bench import LENGTHS, Bench, Case
from tests.base.contracts import CONTRACTS
from tests.base.matrix import THOROUGH, Line, full_product, representative, run_matrix, table
from tests.base.subject import Subject
from tests.base.variants import TOPK, VARIANTS, WEIGHTS, write_variant

PAGE = Path(__file__).resolve().parents[2] / "docs" / "base-model.md"


def _judge(lines: list[Line]) -> None:
    print("\n" + table(lines))
    assert [failure for line in lines for failure in line.failures()] == []
    assert all(line.cases for line in lines)


def test_every_contract_holds_on_the_representative_cases(tmp_path: Path) -> None:
    _judge(run_matrix(representative(), tmp_path, costly_on=THOROUGH))


@pytest.mark.parametrize("length", [1, 2, TOPK - 1, TOPK + 1])
def test_any_length_is_transformers(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LENGTHS, "odd", length)
    variant, weights = "5.2-like", "unit gain"
    subject = Subject(write_variant(tmp_path / "model", VARIANTS[variant], WEIGHTS[weights]))
    bench = Bench(Case(variant, weights, "odd", 2), subject, tmp_path)
    for measure in (measures.logits, measures.index_sets, measures.sources, measures.route_sets):
        figure, limit = measure(bench)
        assert figure <= limit, measure.__name__
    for chosen in bench.ours.selected.values():
        keys = torch.arange(1, length + 1).clamp(max=TOPK)
        assert torch.equal(chosen.sum(-1), keys.expand(2, -1))


@pytest.mark.slow
def test_every_contract_holds_on_the_full_product(tmp_path: Path) -> None:
    _judge(run_matrix(full_product(), tmp_path))


def test_the_docs_page_names_these_contracts_with_these_limits() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", text, re.MULTILINE)
    assert rows[0] == ("contract", "limit")
    assert rows[1:] == [(contract.name, contract.limit) for contract in CONTRACTS]
    for contract in CONTRACTS:
        assert f"**{contract.name}** (limit {contract.limit}). {contract.meaning}" in text
