"""A fused frozen linear taken apart into one linear for each projection, for architectures that split them physically.

One idea: an explicit act that returns a stand-in. ``attention.linear_qkv = mx.unfuse(attention.linear_qkv)`` holds copies of the
rows in linears of their own, with the adapters that stood on them, and gives the same output in the same row order. It costs a
product and, at TP > 1, a gather for each projection; independent adapters do not need it.

Refused: block-FP8 bases, whose bytes and block grids stay the checkpoint's; banks; linears that are not fused.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_xorl.errors import AdapterError
from megatron_xorl.layers.host import AdapterHost, Rows
from megatron_xorl.layers.linear import ColumnParallelLinear
from megatron_xorl.layers.lora import LoraPair
from megatron_xorl.layers.switch import refuse_aside

__all__ = ["SplitLinear", "unfuse"]


class SplitLinear(nn.Module):
    """Column-parallel linears in the place of a fused one.

    Attributes:
        projections: ``{leaf name: ColumnParallelLinear}``.
        rows: ``{leaf name: where its output stands in the fused one}``.
    """

    def __init__(self, projections: dict[str, ColumnParallelLinear], rows: dict[str, Rows]) -> None:
        super().__init__()
        self.projections = nn.ModuleDict(projections)
        self.rows = rows

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """``[s/tp, b, in]`` -> ``([s, b, out/tp], None)``, as the fused linear gives it."""
        placed: list[tuple[int, Tensor]] = []
        for leaf, linear in self.projections.items():
            starts = [rows.start for rows in self.rows[leaf]]
            sizes = [rows.stop - rows.start for rows in self.rows[leaf]]
            placed += zip(starts, linear(x)[0].split(sizes, dim=-1), strict=True)
        placed.sort(key=lambda part: part[0])
        return torch.cat([part for _, part in placed], dim=-1), None

    def backward_dw(self) -> None:
        """Nothing: a frozen base has no weight gradient."""


def unfuse(linear: AdapterHost) -> SplitLinear:
    """Return the projections of a fused dense linear as linears of their own, adapters included; ``linear`` is used up.

    Args:
        linear: a column-parallel linear with several slots: :class:`~megatron_xorl.layers.qkv.FusedQKVLinear`, or gate|up.

    Raises:
        AdapterError: its base is block-FP8, it is a bank or not fused, or its adapters are merged or disabled.
    """
    if not isinstance(linear, ColumnParallelLinear) or len(linear.leaves) < 2:
        raise AdapterError(
            f"{type(linear).__name__} is no fused linear with two named projections or more; name them with set_slots, and leave "
            "banks as they are: their factors are independent already"
        )
    refuse_aside(linear)
    if linear.base.dense is None:
        raise AdapterError(
            f"{', '.join(linear.leaves)} stand on one block-FP8 base, whose bytes and block grid stay the checkpoint's; adapters "
            "on each are independent without unfusing, or use a BF16 base"
        )
    rows = {leaf: linear.rows_of(leaf) for leaf in linear.leaves}
    return SplitLinear({leaf: _split(linear, leaf) for leaf in linear.leaves}, rows)


def _split(fused: ColumnParallelLinear, leaf: str) -> ColumnParallelLinear:
    assert fused.base.dense is not None
    weight = torch.cat([fused.base.dense[rows] for rows in fused.rows_of(leaf)])
    rows, columns = weight.shape
    own = ColumnParallelLinear(
        columns,
        rows * fused.tp_group.size(),
        config=fused.config,
        block=None,
        tp_group=fused.tp_group,
    )
    own.base.set_dense(weight)
    own.set_slots((leaf,))
    for name, held in ((None, fused.adapters), *fused.idle.items()):
        if leaf in held:
            pair = held[leaf]
            assert isinstance(pair, LoraPair)
            own.attach(leaf, pair, name)
    return own
