"""The frozen base weight of one projection (or one bank of experts), in the bytes the checkpoint holds.

One idea: a frozen weight is *storage*, not a parameter. It lives in buffers, so that neither DDP
nor an optimizer ever sees it, and it is read a tile at a time, so that no dequantised copy of a
whole weight exists at any moment.

Two forms, decided by what the file holds and never by a list in a config:

* block FP8: ``codes`` uint8 ``[(E,) N, K]`` (the bytes of ``float8_e4m3fn``) and ``scales`` fp32
  ``[(E,) ceil(N/b0), ceil(K/b1)]``;
* dense: ``dense`` ``[(E,) N, K]`` in the model's dtype.

Refused: casting the scales. ``module.bfloat16()`` (which Megatron's ``Float16Module`` calls) would
silently round fp32 scales, so :meth:`FrozenWeight._apply` lets devices change but keeps ``scales``
in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_xorl.errors import FormatError
from megatron_xorl.fp8.format import block_grid

__all__ = ["SCRATCH_BYTES", "FrozenWeight"]

SCRATCH_BYTES = 8 * 2**20
"""Largest dequantised tile, in bytes. A weight above it is processed in several tiles."""


class FrozenWeight(nn.Module):
    """Frozen weight of shape ``[N, K]`` or, for a bank, ``[E, N, K]``.

    Args:
        shape: local shape on this rank.
        block: FP8 block ``(rows, columns)``, or ``None`` for a dense weight.
        dtype: dtype of the dense form.
        device: where the buffers are allocated (``"meta"`` allowed).
        parts: equal parts that the rows are stacked from (gate and up: 2). Each has a block grid of its own, since each is a
            tensor of the file, and its last rows may fill a part of a block.
    """

    codes: Tensor | None
    scales: Tensor | None
    dense: Tensor | None

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        block: tuple[int, int] | None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        parts: int = 1,
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.parts = parts
        self.block = block
        self.dtype = dtype
        self.register_buffer("codes", None)
        self.register_buffer("scales", None)
        self.register_buffer("dense", None)
        if block is None:
            self.dense = torch.zeros(self.shape, dtype=dtype, device=device)
        else:
            self.codes = torch.zeros(self.shape, dtype=torch.uint8, device=device)
            self.scales = torch.ones(self.grid, dtype=torch.float32, device=device)

    @property
    def quantized(self) -> bool:
        """Whether the weight is held in block FP8."""
        return self.codes is not None

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of ``scales`` for the block in use."""
        assert self.block is not None
        rows, columns = block_grid((self.shape[-2] // self.parts, self.shape[-1]), self.block)
        return (*self.shape[:-2], self.parts * rows, columns)

    @property
    def nbytes(self) -> int:
        """Bytes held, codes and scales or the dense tensor."""
        return sum(b.numel() * b.element_size() for b in self.buffers())

    def set_dense(self, value: Tensor) -> None:
        """Hold ``value`` ``[(E,) N, K]`` as the weight, in the dtype the module was built with."""
        self._check_shape(value.shape)
        self.codes = self.scales = None
        self.dense = value.to(self.dtype)

    def set_quantized(self, codes: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
        """Hold the file's bytes: ``codes`` uint8 or float8_e4m3fn, ``scales`` fp32.

        Raises:
            FormatError: the shapes, the grid or the scale dtype are not those of this weight.
        """
        self._check_shape(codes.shape)
        self.block = block
        if scales.dtype != torch.float32 or tuple(scales.shape) != self.grid:
            raise FormatError(
                f"block scales are {scales.dtype} {tuple(scales.shape)}; a {self.shape} weight in blocks of {block} "
                f"needs float32 {self.grid}; reload them from the checkpoint unchanged"
            )
        self.dense = None
        self.codes = codes.view(torch.uint8)
        self.scales = scales

    def _check_shape(self, found: torch.Size) -> None:
        if tuple(found) != self.shape:
            raise FormatError(
                f"weight is {tuple(found)}; this rank's module holds {self.shape}; check the layout"
            )

    def tile(
        self, dtype: torch.dtype, *, rows: slice, cols: slice, expert: int | None = None
    ) -> Tensor:
        """Return ``W[expert][rows, cols]`` in ``dtype``: code x scale as an fp32 product, then one cast.

        For an fp64 ``dtype`` the product is exact, which is what the reference tests use.
        """
        if self.dense is not None:
            return (self.dense if expert is None else self.dense[expert])[rows, cols].to(dtype)
        assert self.codes is not None and self.scales is not None and self.block is not None
        codes = (self.codes if expert is None else self.codes[expert])[rows, cols]
        scales = self.scales if expert is None else self.scales[expert]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        value = codes.contiguous().view(torch.float8_e4m3fn).to(wide)
        height, grid = self.shape[-2] // self.parts, scales.shape[0] // self.parts
        for part in range(rows.start // height, -(-rows.stop // height)):
            first = max(rows.start, part * height)
            own = value[first - rows.start : (part + 1) * height - rows.start]
            own_scales = scales[part * grid : (part + 1) * grid].to(wide)
            _scale_blocks(own, own_scales, self.block, first - part * height, cols.start)
        return value.to(dtype)

    def row_tiles(self, dtype: torch.dtype, *, multiple: int = 1) -> list[slice]:
        """Cut the N rows so that one ``[rows, K]`` tile stays within :data:`SCRATCH_BYTES`."""
        return _cut(self.shape[-2], self.shape[-1], dtype, multiple)

    def col_tiles(self, dtype: torch.dtype) -> list[slice]:
        """Cut the K columns so that one ``[N, columns]`` tile stays within :data:`SCRATCH_BYTES`."""
        return _cut(self.shape[-1], self.shape[-2], dtype, 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenWeight:
        """Apply device moves to everything, dtype changes to the dense form only."""
        scales = self.scales
        super()._apply(fn, recurse)
        if scales is not None and self.scales is not None and self.scales.dtype != torch.float32:
            self.scales = scales.to(self.scales.device)
        return self

    def extra_repr(self) -> str:
        """Shape and storage, for ``print(model)``."""
        return f"{self.shape}, {'block-FP8 ' + str(self.block) if self.quantized else 'dense'}"


def _scale_blocks(
    value: Tensor, scales: Tensor, block: tuple[int, int], first_row: int, first_col: int
) -> None:
    """Multiply each block of ``value`` ``[n, k]`` in place by its scale; the tile begins at (first_row, first_col).

    Whole blocks are multiplied through a broadcast view, so no scale is expanded to the tile's size; a tile that begins or ends
    inside a block is cut at the block borders first.
    """
    height, width = block
    for row in _pieces(first_row, value.shape[0], height):
        for col in _pieces(first_col, value.shape[1], width):
            part = value[
                row.start - first_row : row.stop - first_row,
                col.start - first_col : col.stop - first_col,
            ]
            grid = scales[
                row.start // height : -(-row.stop // height),
                col.start // width : -(-col.stop // width),
            ]
            shape = (
                grid.shape[0],
                part.shape[0] // grid.shape[0],
                grid.shape[1],
                part.shape[1] // grid.shape[1],
            )
            strides = (
                shape[1] * part.stride(0),
                part.stride(0),
                shape[3] * part.stride(1),
                part.stride(1),
            )
            part.as_strided(shape, strides).mul_(grid[:, None, :, None])


def _pieces(start: int, length: int, block: int) -> list[slice]:
    """Cut ``start .. start + length`` into a head inside one block, whole blocks, and a tail inside one block."""
    stop = start + length
    borders = sorted(
        {start, min(-(-start // block) * block, stop), max(stop // block * block, start), stop}
    )
    return [slice(a, b) for a, b in itertools.pairwise(borders)]


def _cut(length: int, other: int, dtype: torch.dtype, multiple: int) -> list[slice]:
    bytes_each = max(1, other * dtype.itemsize)
    step = max(multiple, SCRATCH_BYTES // bytes_each // multiple * multiple)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
