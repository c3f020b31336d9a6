"""A memory sanitizer for Triton's interpreter: what a GPU would forgive, or punish much later, fails at once.

Every launch is watched, byte by byte, over the tensors it was given:

* a lane that is not masked and lies outside every tensor, or in the gap between the rows of a strided one;
* two lanes of one store that write the same element;
* programs that touch the same element when one of them writes it without an atomic (the grid has no order);
* masked lanes of a load without ``other``, which the interpreter fills with zeros and a GPU leaves undefined: poisoned, NaN for
  floats and all bits set for integers, so that a kernel which uses them shows it.

Not seen here: races between the threads of one program (the compiler places those barriers), alignment, speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter as stock

__all__ = ["Fault", "install"]

Builder = stock.InterpreterBuilder

_NOBODY, _MANY, _ATOMIC = -1, -2, -3


class Fault(Exception):
    """What the sanitizer found; the interpreter wraps it in its own error, whose text holds this one's."""


@dataclass
class _Region:
    """One argument's bytes: which of them are elements, and which program wrote or read each last."""

    start: int
    valid: np.ndarray
    writer: np.ndarray
    reader: np.ndarray


_regions: list[_Region] = []


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "base"):
        yield from _tensors(value.base)


def _watch(tensors: list[torch.Tensor]) -> None:
    """Begin a launch: forget the last one, map the elements of each tensor."""
    _regions.clear()
    histories: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in histories:
            nobody = np.full(storage.nbytes(), _NOBODY, np.int32)
            histories[storage.data_ptr()] = (nobody, nobody.copy())
        size = tensor.element_size()
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        valid = torch.zeros(extent, dtype=torch.bool)
        valid.as_strided(tensor.shape, tensor.stride()).fill_(True)
        first = tensor.data_ptr() - storage.data_ptr()
        part = slice(first, first + extent * size)
        writer, reader = (history[part] for history in histories[storage.data_ptr()])
        _regions.append(_Region(tensor.data_ptr(), valid.numpy().repeat(size), writer, reader))


def _program() -> int:
    x, y, z = stock.interpreter_builder.grid_idx
    _, ny, nz = stock.interpreter_builder.grid_dim
    return (x * ny + y) * nz + z


def _lanes(pointers: Any, mask: Any) -> np.ndarray:
    address = np.asarray(pointers).astype(np.int64)
    return address[np.broadcast_to(np.asarray(mask, bool), address.shape)].reshape(-1)


def _located(address: np.ndarray, size: int, what: str) -> list[tuple[_Region, np.ndarray]]:
    """The regions that the lanes fall into, with their byte offsets there."""
    outside = np.ones(address.size, bool)
    hits = []
    for region in _regions:
        offset = address - region.start
        within = (offset >= 0) & (offset + size <= region.valid.size)
        within[within] = region.valid[offset[within]]
        if within.any():
            hits.append((region, offset[within]))
            outside &= ~within
    if outside.any():
        raise Fault(
            f"out of bounds: {what} of {int(outside.sum())} of {address.size} lanes lies in no tensor, program {_program()}"
        )
    return hits


def _conflict(history: np.ndarray, me: int, *allowed: int) -> bool:
    foreign = history != me
    for one in allowed:
        foreign &= history != one
    return bool(foreign.any())


def _on_load(address: np.ndarray, size: int) -> None:
    me = _program()
    for region, offset in _located(address, size, "a load"):
        if _conflict(region.writer[offset], me, _NOBODY):
            raise Fault(f"race: program {me} reads what another program of the launch writes")
        before = region.reader[offset]
        region.reader[offset] = np.where((before == _NOBODY) | (before == me), me, _MANY)


def _on_store(address: np.ndarray, size: int) -> None:
    me = _program()
    if np.unique(address).size < address.size:
        raise Fault(f"race: two lanes of one store of program {me} write the same element")
    for region, offset in _located(address, size, "a store"):
        if _conflict(region.writer[offset], me, _NOBODY):
            raise Fault(f"race: program {me} overwrites what another program of the launch wrote")
        if _conflict(region.reader[offset], me, _NOBODY):
            raise Fault(f"race: program {me} overwrites what another program of the launch reads")
        region.writer[offset] = me


def _on_atomic(address: np.ndarray, size: int) -> None:
    me = _program()
    for region, offset in _located(address, size, "an atomic"):
        if _conflict(region.writer[offset], me, _NOBODY, _ATOMIC):
            raise Fault(f"race: program {me} adds to what another program stores without an atomic")
        if _conflict(region.reader[offset], me, _NOBODY):
            raise Fault(f"race: program {me} adds to what another program of the launch reads")
        region.writer[offset] = _ATOMIC


def _size(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _poison(pointers: Any) -> Any:
    """All bits set is NaN in bf16 and fp8, -1 or the largest value in integers."""
    kind = pointers.get_element_ty()
    dtype = stock._get_np_dtype(kind)
    if np.issubdtype(dtype, np.floating):
        data = np.full(np.shape(pointers.data), np.nan, dtype)
    else:
        data = np.full(np.shape(pointers.data), True if dtype == np.bool_ else -1, np.int64)
        data = data.astype(dtype)
    return stock.TensorHandle(data, kind)


_installed = False


def install() -> None:
    """Watch every interpreted launch of this process from now on."""
    global _installed
    if _installed:
        return
    begin = stock.GridExecutor._init_args_hst
    load, store, rmw = Builder.create_masked_load, Builder.create_masked_store, Builder.create_atomic_rmw  # fmt: skip

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        ready = begin(self, args, kwargs)
        _watch(list(_tensors([*ready[0], *ready[1].values()])))
        return ready

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        _on_load(_lanes(pointers.data, mask.data), _size(pointers))
        return load(self, pointers, mask, _poison(pointers) if other is None else other, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _on_store(_lanes(pointers.data, mask.data), _size(pointers))
        return store(self, pointers, value, mask, *rest)

    def atomic_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _on_atomic(_lanes(pointers.data, mask.data), _size(pointers))
        return rmw(self, op, pointers, value, mask, *rest)

    stock.GridExecutor._init_args_hst = init_args
    Builder.create_masked_load, Builder.create_masked_store = masked_load, masked_store
    Builder.create_atomic_rmw = atomic_rmw
    _installed = True
