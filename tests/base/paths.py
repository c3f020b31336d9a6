"""The two ways our model can run a batch, and a count of what it really did.

The one idea: short rows take one product with a range of keys, and score every query at once; long rows take a few queries at
a time, score them a few at a time, and attend to copies of the selected keys. Which way is a matter of three constants of
``megatron_xorl.layers``, so a short row can be made to run like a long one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor

WORKSPACE_BYTES = 24 << 10
"""Attention: 3 to 4 queries at a time in fp32 and 6 to 8 in bf16, with the matrix's sizes."""

SCORE_BYTES = 16 << 10
"""Index scores: 4 to 6 queries at a time for rows of 41 tokens."""


@contextmanager
def like_long_rows() -> Iterator[None]:
    """Copies of the selected keys for every chunk of attention, and small chunks of attention and of scoring."""
    from megatron_xorl.layers import indexer, sparse

    with (
        patch.object(sparse, "COPY_HEADS", -1e9),
        patch.object(sparse, "WORKSPACE_BYTES", WORKSPACE_BYTES),
        patch.object(indexer, "SCORE_BYTES", SCORE_BYTES),
    ):
        yield


@dataclass
class Taken:
    """What attention and indexer did, one entry for each row of each batch that they were called with."""

    chunks: list[int] = field(default_factory=list)
    """Chunks of attention (forward, and once more for backward)."""
    copied: int = 0
    """Chunks that multiplied with copies of their keys."""
    ranges: int = 0
    """Chunks that multiplied with a range of keys."""
    scored: list[int] = field(default_factory=list)
    """Chunks of queries that were scored, of rows in which any was."""


@contextmanager
def counted() -> Iterator[Taken]:
    """Count while our model runs; the models' results do not change."""
    from megatron_xorl.layers import indexer, sparse

    taken = Taken()
    chunks, chunk, scores = sparse._chunks, sparse._chunk, indexer._scores
    below: list[bool] = []

    def count_chunks(*given: Any) -> Any:
        taken.chunks.append(len(result := chunks(*given)))
        return result

    def count_kind(*given: Any) -> Any:
        result = chunk(*given)
        in_a_range = isinstance(result.slots, slice)
        taken.ranges, taken.copied = taken.ranges + in_a_range, taken.copied + (not in_a_range)
        return result

    def count_scored(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        # The keys in sight grow within a row; the first chunk of the next row sees fewer again, unless each row is one chunk.
        begun = not below or key.shape[0] <= below[-1]
        below.append(key.shape[0])
        if begun:
            taken.scored.append(0)
        taken.scored[-1] += 1
        return scores(query, key, weights)

    with (
        patch.object(sparse, "_chunks", count_chunks),
        patch.object(sparse, "_chunk", count_kind),
        patch.object(indexer, "_scores", count_scored),
    ):
        yield taken
