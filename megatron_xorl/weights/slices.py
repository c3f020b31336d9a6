"""Which part of a tensor a rank owns, in elements and in FP8 blocks.

Plain integers, no torch: the same arithmetic serves loading, legality checks and planning. A cut of a block-FP8 weight must lie
on the block grid, since a block has one scale and no rank may hold half a block; off the grid it is refused with the sizes
that would be legal.
"""

from __future__ import annotations

from megatron_xorl.errors import LayoutError

__all__ = ["legal_cuts", "owned_range", "scale_range"]


def owned_range(name: str, size: int, rank: int, world: int, *, block: int | None = None) -> slice:
    """Range of ``size`` elements that ``rank`` of ``world`` owns.

    Args:
        name: tensor name, for the message.
        size: length of the axis that is cut.
        rank, world: position in the group that cuts it.
        block: FP8 block length along the axis, ``None`` for a dense tensor.

    Raises:
        LayoutError: ``world`` does not divide the axis, or the cut falls inside a block.
    """
    if size % world or (world > 1 and block is not None and (size // world) % block):
        legal = ", ".join(map(str, legal_cuts(size, block)))
        on = f"blocks of {block}" if block else "whole elements"
        raise LayoutError(
            f"{name}: an axis of {size} cannot be cut {world} ways into {on}; legal sizes: {legal}"
        )
    step = size // world
    return slice(rank * step, (rank + 1) * step)


def scale_range(part: slice, block: int) -> slice:
    """Range on the scale grid of an element range that starts on the grid."""
    return slice(part.start // block, -(-part.stop // block))


def legal_cuts(size: int, block: int | None) -> list[int]:
    """Numbers of ranks up to 64 that ``size`` can be cut over."""
    return [
        n
        for n in range(1, 65)
        if size % n == 0 and (n == 1 or block is None or (size // n) % block == 0)
    ]
