"""What each rank of a layout holds: which tensors of the checkpoint, which part of each, under which local name.

The one idea: placement is arithmetic on the name table. A rank's position in the groups and the layers of its stage decide, for
every row, whether the rank holds it and the element range on each axis; nothing is built and no file is opened. The loader and
the real modules must agree with it, which tests and ``megatron-xorl inspect --build`` check.

* The embedding is on the first stage, the final norm and the head on the last, a layer on its stage.
* Tensor parallelism cuts the axis that the table names; routed experts are dealt out over ep and cut by etp instead.
* A row without an axis is held whole by every rank of its stage.
* MTP tensors are carried through conversion and are on no rank.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_xorl.config.layout import ParallelLayout, RankCoordinates, rank_coordinates
from megatron_xorl.config.stages import pipeline_stages
from megatron_xorl.weights.names import TensorRow, rows_by_layer
from megatron_xorl.weights.slices import owned_range, scale_range

if TYPE_CHECKING:
    from megatron_xorl.config.model import GlmConfig

__all__ = ["OwnedTensor", "global_name", "local_name", "owned_experts", "owned_tensors"]

_LAYERS = "decoder.layers."
_Part = tuple[tuple[slice, ...], tuple[slice, ...] | None, tuple[int, ...], tuple[int, ...] | None]


class OwnedTensor(NamedTuple):
    """The part of one checkpoint tensor that a rank holds.

    ``megatron`` is the local parameter name on the rank (layers counted within the stage), ``bank`` the place of a routed expert
    in the rank's bank. ``ranges`` are element ranges in the checkpoint's tensor, an axis each, ``scale_ranges`` the same on the
    grid of its block scales, None where it has none; ``shape`` and ``scale_shape`` are their lengths. ``dtype`` and ``region``
    are the table's.
    """

    row: TensorRow
    megatron: str
    bank: int | None
    ranges: tuple[slice, ...]
    scale_ranges: tuple[slice, ...] | None
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...] | None
    dtype: str
    region: str


def owned_tensors(config: GlmConfig, layout: ParallelLayout, rank: int) -> Iterator[OwnedTensor]:
    """Yield what ``rank`` holds, in the order of the name table.

    Args:
        config: the model.
        layout: sizes of the groups, legal for the model (``config.layout.check_layout``).
        rank: global rank, in Megatron's order.

    Raises:
        LayoutError: there is no such rank, or a cut is off the block grid.
    """
    where = rank_coordinates(layout, rank)
    layers = pipeline_stages(config, layout.pp)[where.pp]
    experts = owned_experts(config, layout, where)
    # Layers have the same few kinds of tensors, so that ranges are worked out once a kind and names once a parameter.
    parts: dict[tuple[object, ...], _Part] = {}
    names: dict[str, str] = {}
    for row in _rows(config, layers):
        if row.expert is not None and row.expert not in experts:
            continue
        assert row.megatron is not None
        if (name := names.get(row.megatron)) is None:
            name = names[row.megatron] = local_name(row.megatron, layers.start)
        kind = (row.shape, row.tp_axis, row.expert is None, row.quantized)
        if (part := parts.get(kind)) is None:
            part = parts[kind] = _part(config, row, layout, where)
        bank = None if row.expert is None else row.expert - experts.start
        yield OwnedTensor(row, name, bank, *part, row.dtype, row.region)


def _rows(config: GlmConfig, layers: range) -> Iterator[TensorRow]:
    """Rows of the stage with these layers, all experts of them."""
    by_layer = rows_by_layer(config)
    if layers.start == 0:
        yield from (row for row in by_layer[None] if row.region == "embedding")
    for layer in layers:
        yield from by_layer[layer]
    if layers.stop == config.num_hidden_layers:
        yield from (row for row in by_layer[None] if row.region != "embedding")


def owned_experts(config: GlmConfig, layout: ParallelLayout, where: RankCoordinates) -> range:
    """Return the routed experts of a rank."""
    each = config.n_routed_experts // layout.ep
    return range(where.ep * each, (where.ep + 1) * each)


def _part(
    config: GlmConfig, row: TensorRow, layout: ParallelLayout, where: RankCoordinates
) -> _Part:
    """Element ranges of a row on a rank, ranges of its scales, and the lengths of both."""
    ranges = [slice(0, size) for size in row.shape]
    block = config.weight_block_size if row.quantized else None
    if (axis := row.tp_axis) is not None:
        rank, world = (where.tp, layout.tp) if row.expert is None else (where.etp, layout.etp)
        along = block[axis] if block else None
        ranges[axis] = owned_range(row.hf, row.shape[axis], rank, world, block=along)
    if block is None:
        return tuple(ranges), None, _lengths(ranges), None
    scales = [scale_range(part, b) for part, b in zip(ranges, block, strict=True)]
    return tuple(ranges), tuple(scales), _lengths(ranges), _lengths(scales)


def _lengths(ranges: Sequence[slice]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in ranges)


def local_name(megatron: str, first: int) -> str:
    """Return the name on a stage that begins with layer ``first`` of a parameter with a global name."""
    return _shifted(megatron, -first)


def global_name(megatron: str, first: int) -> str:
    """Return the global name of a parameter named ``megatron`` on a stage that begins with layer ``first``."""
    return _shifted(megatron, first)


def _shifted(name: str, by: int) -> str:
    if not name.startswith(_LAYERS):
        return name
    layer, _, rest = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{int(layer) + by}.{rest}"
