"""A tensor of an adapter file from factors, and a factor back from the tensors: the arithmetic of the three formats.

Pure moves of bytes, no product and no cast, so that a round trip is bit-exact. The fused layout is PEFT's (``ParamWrapper``): it
reads A as ``[E, r, in]`` and B as ``[out, r, E]``, and gate and up are one parameter of rank 2r whose B is block-diagonal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_xorl.adapters.formats import Entry

__all__ = ["compose", "compose_stream", "split_columns", "split_rows"]


def compose(entry: Entry, sources: Sequence[Tensor]) -> Tensor:
    """Return the tensor of ``entry`` made of its source factors, contiguous, in their dtype."""
    first = sources[0]
    if entry.transform == "expert":
        assert entry.expert is not None
        return first[entry.expert if first.shape[0] > 1 else 0].contiguous()
    if entry.transform == "rows":
        rank = sum(source.shape[1] for source in sources)
        experts = entry.shape[0] // rank
        parts = [source.expand(experts, -1, -1) for source in sources]
        return torch.cat(parts, dim=1).reshape(entry.shape)
    if entry.transform == "columns":
        return _block_diagonal(entry, sources)
    return first.contiguous()


def _block_diagonal(entry: Entry, sources: Sequence[Tensor]) -> Tensor:
    """``[out, r, E]`` with each source in rows and ranks of its own, flattened to ``[out, r * E]``."""
    rank = sum(source.shape[-1] for source in sources)
    rows, experts = entry.shape[0], entry.shape[1] // rank
    full = torch.zeros(rows, rank, experts, dtype=sources[0].dtype)
    row = column = 0
    for source in sources:
        height, width = source.shape[-2:]
        block = full[row : row + height, column : column + width]
        block.copy_(source.permute(1, 2, 0).expand(-1, -1, experts))
        row, column = row + height, column + width
    return full.reshape(entry.shape)


def split_rows(value: Tensor, experts: int, part: int, parts: int) -> Tensor:
    """``[E * parts * r, in]`` -> ``[E, r, in]`` of one part."""
    full = value.reshape(experts, -1, value.shape[-1])
    return full.chunk(parts, dim=1)[part]


def split_columns(value: Tensor, experts: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """``[parts * out, parts * r * E]`` -> ``[E, out, r]`` of one part, and the rest of its rows, which must be zero."""
    full = value.reshape(value.shape[0], -1, experts).permute(2, 0, 1)
    rows = full.chunk(parts, dim=1)[part]
    blocks = rows.chunk(parts, dim=2)
    others = [block for index, block in enumerate(blocks) if index != part]
    return blocks[part], torch.cat(others, dim=2) if others else rows[..., :0]


def compose_stream(
    entries: Sequence[Entry], factors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[Entry, Tensor]]:
    """Turn a stream of factors into the tensors of a file, in the order of ``entries``.

    A factor is held only until the last tensor that needs it is out: the two halves of one bank at most.
    """
    uses: dict[str, int] = {}
    for entry in entries:
        for name in entry.sources:
            uses[name] = uses.get(name, 0) + 1
    held: dict[str, Tensor] = {}
    waiting = iter(entries)
    entry = next(waiting, None)
    for name, tensor in factors:
        held[name] = tensor
        del tensor
        while entry is not None and all(source in held for source in entry.sources):
            yield entry, compose(entry, [held[source] for source in entry.sources])
            for source in entry.sources:
                uses[source] -= 1
                if not uses[source]:
                    del held[source]
            entry = next(waiting, None)
