"""Which tile of rows belongs to which expert, found on the device.

One idea: tokens lie sorted by expert, so a grouped product is a grid of row tiles with an expert each. Their number depends on
the routing, which only the device knows; ``ceil(M / tile) + E`` tiles are always enough, the rest is idle (expert -1), and no
host synchronisation is needed. Experts without tokens have no tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_xorl.kernels.launch import cdiv, require

__all__ = ["check_offsets", "tile_map"]


def tile_map(offsets: Tensor, rows: int, tile: int) -> tuple[Tensor, Tensor]:
    """Expert and first row of each tile.

    Args:
        offsets: int32 ``[E + 1]``, expert e has rows ``offsets[e] .. offsets[e + 1]``; the last is ``rows``.
        rows: M, known to the host.
        tile: rows of a tile.

    Returns:
        int32 ``[ceil(M / tile) + E]`` each: the expert or -1, and the first row.
    """
    experts = offsets.numel() - 1
    tiles = (offsets.diff() + tile - 1) // tile
    end = tiles.cumsum(0)
    index = torch.arange(cdiv(rows, tile) + experts, device=offsets.device)
    expert = (index[:, None] >= end[None, :]).sum(1)
    used = expert < experts
    expert = expert.clamp(max=experts - 1)
    first = offsets[expert] + (index - end[expert] + tiles[expert]) * tile
    return torch.where(used, expert, -1).int(), torch.where(used, first, 0).int()


def check_offsets(offsets: Tensor, experts: int) -> None:
    """Offsets are int32 ``[E + 1]``; their values are the caller's promise, reading them would synchronise.

    Raises:
        ValueError: another dtype or length.
    """
    fits = offsets.dtype == torch.int32 and tuple(offsets.shape) == (experts + 1,)
    require(
        fits, f"offsets are {offsets.dtype} {tuple(offsets.shape)}; expected int32 {(experts + 1,)}"
    )
