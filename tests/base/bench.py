"""One case of the matrix, and what was run for it.

The one idea: a :class:`Bench` runs each model once and every contract reads the same outcome. Batches of three rows run ours
the way it runs long rows (``tests/base/paths.py``), batches of one row as it chooses by itself, which for rows this short is
one product with the whole range of keys.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.base.paths import like_long_rows
from tests.base.subject import (
    Seen,
    Subject,
    embedding_gradient_ours,
    embedding_gradient_theirs,
    run_ours,
    run_theirs,
)
from tests.base.variants import TOPK

LENGTHS = {"below": TOPK - 5, "at": TOPK, "above": 2 * TOPK + 9}
"""Tokens in a batch, by their relation to ``index_topk``."""


@dataclass(frozen=True)
class Case:
    """One cell of the product: names of a variant and of its weights, the length, the batch."""

    variant: str
    weights: str
    length: str
    batch: int

    @property
    def conditioned(self) -> bool:
        """Whether fp32 carries this model: with four times the weights of a trained one, errors grow a hundredfold."""
        return self.weights != "unit gain x4"

    def __str__(self) -> str:
        """As the table shows it."""
        return f"{self.variant}; {self.weights}; {LENGTHS[self.length]} tokens x {self.batch}"


class Bench:
    """A case being measured; what several contracts need is computed once."""

    def __init__(self, case: Case, subject: Subject, folder: Path) -> None:
        self.case, self.subject, self.folder = case, subject, folder
        self.ids = subject.ids(case.batch, LENGTHS[case.length])
        self.labels = subject.ids(case.batch, LENGTHS[case.length], seed=7)

    def path(self) -> AbstractContextManager[None]:
        """How our model runs in this case."""
        return like_long_rows() if self.case.batch == 3 else nullcontext()

    def run(self, model: Any, ids: Tensor) -> Seen:
        """A model of ours on these ids, in this case's way."""
        with self.path():
            return run_ours(model, ids)

    @cached_property
    def ours(self) -> Seen:
        """Our fp32."""
        return self.run(self.subject.model, self.ids)

    @cached_property
    def theirs(self) -> Seen:
        """transformers' fp32."""
        return run_theirs(self.subject.oracle, self.ids)

    @cached_property
    def exact(self) -> Seen:
        """transformers in fp64."""
        return run_theirs(self.subject.exact, self.ids)

    @cached_property
    def half(self) -> Seen:
        """Our bf16."""
        return self.run(self.subject.half, self.ids)

    @cached_property
    def their_half(self) -> Seen:
        """transformers' bf16."""
        seen = run_theirs(self.subject.oracle_half, self.ids)
        seen.logits = seen.logits.float()
        return seen

    @cached_property
    def embedding_gradients(self) -> tuple[Tensor, Tensor]:
        """Ours and transformers', fp32 ``[b, s, h]``; both models' parameters have their gradients then."""
        with self.path():
            ours = embedding_gradient_ours(self.subject.model, self.ids, self.labels)
        return ours, embedding_gradient_theirs(self.subject.oracle, self.ids, self.labels)
