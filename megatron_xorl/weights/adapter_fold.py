"""Fold the logical factors of projections that engines fuse into one pair, and back, bit for bit: for weight sync into serving.

An engine that runs gate and up (or q, k and v) as one product takes one pair for it. The canonical pair of n projections of ranks
r_i on one input stacks the A and puts the B on a diagonal::

    A [sum r_i, in]      B [sum out_i, sum r_i], zero off the blocks          banks with a leading expert axis on both

so that B(A x) is the projections' own deltas above each other, with nothing rounded. Where all A are bit-equal (one A was trained
for all) ``shared=True`` keeps it once: A [r, in], B [sum out_i, r]. A projection without an adapter has rank 0 and rows of zeros.

An engine scales by alpha / rank of what it is given; the rank has grown, so alpha has to: see :attr:`Fused.rank`.

Refused: other inputs, dtypes or expert axes than the first's, scales that differ, ``shared`` where the A differ; going back, a
non-zero value off the blocks, which no independent factors could give.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.errors import AdapterError

__all__ = ["FUSED", "Fused", "fold", "fold_adapter", "unfold", "unfold_adapter"]

FUSED: dict[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
}
"""What engines fuse, in row order."""

type Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Fused:
    """A folded pair and what is needed to take it apart: ``ranks`` (0: no adapter) and ``rows`` of each projection."""

    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    shared: bool

    @property
    def rank(self) -> int:
        """Rank of the pair: an engine that divides by it needs alpha = scale * rank."""
        return self.a.shape[-2]


def fold(
    pairs: Sequence[Pair | None],
    rows: Sequence[int],
    *,
    scales: Sequence[float] | None = None,
    shared: bool = False,
) -> Fused:
    """Fold the pairs of the projections of one fused product.

    Args:
        pairs: ``(A [r, in], B [out, r])`` of each projection in row order, or with a leading expert axis on both; None for a
            projection without an adapter.
        rows: output rows of each projection.
        scales: what multiplies each pair's B(A x); checked to be one number.
        shared: keep one A; they must be bit-equal.

    Raises:
        AdapterError: they do not fold; names the first difference.
    """
    given = [pair for pair in pairs if pair is not None]
    if not given or len(pairs) != len(rows):
        raise AdapterError(
            f"{len(given)} pairs for {len(rows)} projections, expected one or more, and None where there is none"
        )
    _check_alike(pairs, rows)
    if (
        scales is not None
        and len({scale for scale, pair in zip(scales, pairs, strict=True) if pair is not None}) > 1
    ):
        raise AdapterError(
            f"the projections have scales {list(scales)}, one fused pair has one; fold factors of one alpha and rank"
        )
    ranks = tuple(0 if pair is None else pair[0].shape[-2] for pair in pairs)
    if shared:
        return _fold_shared(pairs, ranks, tuple(rows))
    first_b = given[0][1]
    b = torch.zeros(
        *first_b.shape[:-2], sum(rows), sum(ranks), dtype=first_b.dtype, device=first_b.device
    )
    for pair, (row, column) in zip(pairs, _corners(rows, ranks), strict=True):
        if pair is not None:
            height, width = pair[1].shape[-2:]
            b[..., row : row + height, column : column + width] = pair[1]
    a = torch.cat([pair[0] for pair in given], dim=-2)
    return Fused(a, b, ranks, tuple(rows), shared=False)


def _check_alike(pairs: Sequence[Pair | None], rows: Sequence[int]) -> None:
    first: Pair | None = None
    for index, (pair, height) in enumerate(zip(pairs, rows, strict=True)):
        if pair is None:
            continue
        a, b = pair
        if a.shape[-2] != b.shape[-1] or b.shape[-2] != height:
            raise AdapterError(
                f"projection {index} has A {list(a.shape)} and B {list(b.shape)}, expected B [{height}, {a.shape[-2]}]"
            )
        first = first or pair
        same = (
            (a.shape[-1], first[0].shape[-1]),
            (a.shape[:-2], first[0].shape[:-2]),
            (b.shape[:-2], first[1].shape[:-2]),
            (a.dtype, first[0].dtype),
            (b.dtype, first[1].dtype),
        )
        for mine, its in same:
            if mine != its:
                raise AdapterError(
                    f"projection {index} has A {list(a.shape)} {a.dtype}, the first {list(first[0].shape)} {first[0].dtype}; "
                    "only projections of one input, dtype and expert axis fold"
                )


def _fold_shared(
    pairs: Sequence[Pair | None], ranks: tuple[int, ...], rows: tuple[int, ...]
) -> Fused:
    given = [pair for pair in pairs if pair is not None]
    a = given[0][0]
    for index, pair in enumerate(pairs):
        if pair is not None and not _equal(pair[0], a):
            raise AdapterError(
                f"projection {index} has another A than the first, so they cannot share one; fold with shared=False"
            )
    empty = given[0][1]
    blocks = [
        empty.new_zeros(*empty.shape[:-2], height, a.shape[-2]) if pair is None else pair[1]
        for pair, height in zip(pairs, rows, strict=True)
    ]
    return Fused(a, torch.cat(blocks, dim=-2), ranks, rows, shared=True)


def unfold(fused: Fused) -> tuple[Pair | None, ...]:
    """Return the pairs that were folded, None where there was none.

    Raises:
        AdapterError: shapes are not those of ``ranks`` and ``rows``, or B has a value off the blocks.
    """
    total = max(fused.ranks) if fused.shared else sum(fused.ranks)
    if fused.a.shape[-2] != total or tuple(fused.b.shape[-2:]) != (sum(fused.rows), total):
        raise AdapterError(
            f"the fused pair has A {list(fused.a.shape)} and B {list(fused.b.shape)}, expected rank {total} and "
            f"{sum(fused.rows)} rows"
        )
    rest = fused.b.clone()
    pairs: list[Pair | None] = []
    for rank, height, (row, column) in zip(
        fused.ranks, fused.rows, _corners(fused.rows, fused.ranks), strict=True
    ):
        start = 0 if fused.shared else column
        block = (..., slice(row, row + height), slice(start, start + rank))
        pairs.append(
            (fused.a[..., start : start + rank, :].contiguous(), fused.b[block].contiguous())
            if rank
            else None
        )
        rest[block] = 0
    if stray := int(rest.count_nonzero()):
        raise AdapterError(
            f"the fused B has {stray} non-zero values off its blocks, expected none; it was not folded from independent factors"
        )
    return tuple(pairs)


def _corners(rows: Sequence[int], ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    row = column = 0
    for height, width in zip(rows, ranks, strict=True):
        yield row, column
        row, column = row + height, column + width


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def fold_adapter(factors: Iterable[tuple[Factor, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Fold a whole adapter as it streams by; a projection that no engine fuses passes as it is.

    Args:
        factors: in inventory order, full logical tensors.

    Yields:
        ``(logical name, tensor)``: ``….mlp.gate_up_proj.lora_A``, ``….lora_B``, and the others under their own names.
    """
    held: dict[str, Tensor] = {}
    group: str | None = None
    for factor, tensor in factors:
        parent, _, leaf = factor.target.rpartition(".")
        fused = next((name for name, leaves in FUSED.items() if leaf in leaves), None)
        own = f"{parent}.{fused}" if fused else None
        if own != group and group is not None:
            yield from _folded(group, held)
            held.clear()
        group = own
        if own is None:
            yield factor.name, tensor
        else:
            held[f"{leaf}.{factor.side}"] = tensor
    if group is not None:
        yield from _folded(group, held)


def _folded(group: str, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    leaves = FUSED[group.rpartition(".")[2]]
    pairs = [
        (held[f"{leaf}.A"], held[f"{leaf}.B"]) if f"{leaf}.A" in held else None for leaf in leaves
    ]
    known = [pair[1].shape[-2] for pair in pairs if pair is not None]
    # gate and up have equal heights, and a group with one projection left out is filled with its partner's
    rows = [known[0] if pair is None else pair[1].shape[-2] for pair in pairs]
    fused = fold(pairs, rows)
    yield f"{group}.lora_A", fused.a
    yield f"{group}.lora_B", fused.b


def unfold_adapter(
    factors: Sequence[Factor], fused: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Take apart what :func:`fold_adapter` yields.

    Args:
        factors: the logical factors, in inventory order.
        fused: what :func:`fold_adapter` yields of them.

    Yields:
        ``(factor name, tensor)`` in inventory order within each group.

    Raises:
        AdapterError: a group does not have the ranks and rows of ``factors``.
    """
    ranks = {factor.target: factor.rank for factor in factors}
    rows = {factor.target: factor.shape[-2] for factor in factors if factor.side == "B"}
    a: Tensor | None = None
    for name, tensor in fused:
        target, _, side = name.rpartition(".")
        parent, _, leaf = target.rpartition(".")
        if leaf not in FUSED:
            yield name, tensor
        elif side == "lora_A":
            a = tensor
        else:
            assert a is not None
            leaves = [f"{parent}.{part}" for part in FUSED[leaf]]
            height = next(rows[part] for part in leaves if part in rows)
            pair = Fused(
                a,
                tensor,
                tuple(ranks.get(part, 0) for part in leaves),
                tuple(rows.get(part, height) for part in leaves),
                False,
            )
            for part, found in zip(leaves, unfold(pair), strict=True):
                if found is not None:
                    yield f"{part}.lora_A", found[0]
                    yield f"{part}.lora_B", found[1]
