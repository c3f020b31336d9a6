"""Which part of a factor a rank holds.

The one idea: the inventory says which axis of a factor is cut over tensor ranks and which over expert ranks; the range on each
axis is arithmetic on that. The modules, the listing and the plan use this one rule. Imports no torch.

Refused: a group that does not divide the axis it cuts (a legal layout has none, see ``config/layout.py``).
"""

from __future__ import annotations

from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.config.layout import ParallelLayout, RankCoordinates
from megatron_xorl.errors import LayoutError

__all__ = ["factor_ranges", "owned_ranges", "range_lengths"]

Ranges = tuple[tuple[int, int], ...]


def factor_ranges(factor: Factor, tp: tuple[int, int], ep: tuple[int, int]) -> Ranges:
    """Return the half-open element range ``(start, stop)`` on every axis of the full shape of ``factor``.

    Args:
        factor: which factor.
        tp: ``(rank, size)`` of the group that cuts ``tp_axis``: tensor, for a bank expert tensor.
        ep: ``(rank, size)`` of the group that cuts ``ep_axis``.

    Raises:
        LayoutError: a group does not divide its axis.
    """
    ranges = []
    for axis, size in enumerate(factor.shape):
        rank, world = {factor.ep_axis: ep, factor.tp_axis: tp}.get(axis, (0, 1))
        if size % world:
            raise LayoutError(
                f"{factor.name}: axis {axis} of {size} cannot be cut {world} ways; expected a size that divides it"
            )
        step = size // world
        ranges.append((rank * step, (rank + 1) * step))
    return tuple(ranges)


def owned_ranges(factor: Factor, layout: ParallelLayout, where: RankCoordinates) -> Ranges:
    """Return what the rank at ``where`` holds of ``factor``, if its stage has the factor's layer.

    Raises:
        LayoutError: a group does not divide its axis.
    """
    tp = (where.etp, layout.etp) if len(factor.shape) == 3 else (where.tp, layout.tp)
    return factor_ranges(factor, tp, (where.ep, layout.ep))


def range_lengths(ranges: Ranges) -> tuple[int, ...]:
    """Return the shape that ``ranges`` cut out."""
    return tuple(stop - start for start, stop in ranges)
