"""Fold the active adapter into the base weights, and take it out again.

One idea: ``W + scale * B A`` is formed a few rows (of one expert) at a time: B A in fp32, times the scale, plus W in fp32, one
cast into the bytes that hold W. So no more than a tile is in fp32, whatever the weight (8 MiB, a few copies of it at once).

Parallel layouts need no communication. What is cut is an outer axis of the product, never the rank: a rank that holds rows of W
holds the same rows of B and all of A (column, vocabulary), one that holds columns of W the same columns of A and all of B (row),
one that holds some experts their factors or the shared one. Its own factors give exactly its own part of the product.

A block-FP8 base cannot hold the sum: codes have 3 bits after the point, so what is small beside a weight, as a delta is, is
mostly rounded away. It is refused unless ``requantize=True``, which dequantises, adds and quantises again
(``fp8.format.quantize_blocks``) and says target by target what was lost. Blocks that no adapter touches keep their bytes, and so
does everything under a pair whose A or B is zero.

Afterwards the pairs are out of the forward (``AdapterHost.aside``), the forward is that of a plain model, and training, saving,
exporting, disabling and switching are refused until :func:`unmerge_adapters`, which puts the kept bytes back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_xorl.errors import AdapterError
from megatron_xorl.fp8.format import quantize_blocks
from megatron_xorl.fp8.weight import SCRATCH_BYTES, FrozenWeight
from megatron_xorl.layers.host import AdapterHost
from megatron_xorl.layers.lora import LoraPair
from megatron_xorl.layers.switch import active_adapter, hosts_of, refuse_aside

__all__ = ["MergeError", "MergeReport", "merge_adapters", "unmerge_adapters"]

_LABELS = 4  # place of ``labels`` among GPTModel.forward's positional arguments


@dataclass
class MergeError:
    """How far the bytes that hold one merged target are from the fp32 sum, on this rank.

    Attributes:
        max_abs: largest difference of an element.
        rel_l2: norm of the difference over the norm of the sum.
        of_delta: norm of the difference over the norm of ``scale * B A``: 1 says that rounding is as large as the adapter.
    """

    max_abs: float = 0.0
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, held: Tensor, exact: Tensor, delta: Tensor) -> None:
        """Count a part of the target."""
        difference = held - exact
        self.max_abs = max(self.max_abs, float(difference.abs().max()))
        for number, part in enumerate((difference, exact, delta)):
            self._squares[number] += float(part.square().sum(dtype=torch.float64))

    @property
    def rel_l2(self) -> float:
        """Of the sum."""
        return math.sqrt(self._squares[0] / self._squares[1]) if self._squares[1] else 0.0

    @property
    def of_delta(self) -> float:
        """Of the adapter's own part."""
        return math.sqrt(self._squares[0] / self._squares[2]) if self._squares[2] else 0.0


@dataclass(frozen=True)
class MergeReport:
    """What a merge did on this rank: ``targets`` by logical name, and the bytes held so that it can be undone."""

    targets: dict[str, MergeError]
    kept_bytes: int


@dataclass(frozen=True)
class _Addend:
    """One pair, and for each row range of the base that it adds to: the range, and where B's rows for it begin."""

    pair: LoraPair
    ranges: tuple[tuple[slice, int], ...]


def merge_adapters(
    model: nn.Module, *, requantize: bool = False, keep_original: bool = True
) -> MergeReport:
    """Fold the active adapter of ``model`` into its base, on this rank; the adapter is out of the forward then.

    Args:
        model: with adapters attached.
        requantize: allow block-FP8 weights to be dequantised, added to and quantised again.
        keep_original: keep the bytes that are replaced, so that :func:`unmerge_adapters` can put them back. This doubles the
            memory of the adapted weights; without it a merge cannot be undone.

    Returns:
        What was merged, and how far what is held now is from the fp32 sum. A pair whose A or B is zero is not in it.

    Raises:
        AdapterError: nothing was changed: no adapter is active; adapters are merged already, or disabled; a base is block-FP8 and
            ``requantize`` is off; or a factor holds inf or NaN.
    """
    hosts = list(hosts_of(model))
    for host in hosts:
        refuse_aside(host)
    if active_adapter(model) is None and not any(host.adapters for host in hosts):
        raise AdapterError(
            "the model carries no active adapter to merge; call attach_adapters, load_adapter or set_adapter first"
        )
    addends = [(host, found) for host in hosts if (found := _addends(host))]
    if not requantize:
        _refuse_quantized(addends)
    kept, targets = 0, {}
    with torch.no_grad():
        for host, found in addends:
            if keep_original:
                host.original.append(copy.deepcopy(host.base))
                kept += host.base.nbytes
            targets |= _merge(host.base, found)
    for host in hosts:
        host.set_aside()
        host.merged = True
    model.restorable = keep_original
    model.merge_guard = model.register_forward_pre_hook(_refuse_training, with_kwargs=True)
    return MergeReport(targets, kept)


def unmerge_adapters(model: nn.Module) -> None:
    """Put back the bytes that :func:`merge_adapters` replaced, bit for bit, and let the adapter take part again.

    Raises:
        AdapterError: nothing was changed: nothing is merged, or the merge kept no original bytes.
    """
    hosts = list(hosts_of(model))
    if not any(host.merged for host in hosts):
        raise AdapterError("nothing is merged into this model; call merge_adapters first")
    if not model.restorable:
        raise AdapterError(
            "the merge kept no original weights (keep_original=False), and a sum that was rounded does not give them back; load "
            "the base and the adapter again"
        )
    for host in hosts:
        if host.original:
            host.base = host.original.pop()
        host.take_back()
        host.merged = False
    model.merge_guard.remove()
    del model.merge_guard, model.restorable


def _addends(host: AdapterHost) -> list[_Addend]:
    """The pairs of a host that add anything, checked for inf and NaN."""
    found = []
    for leaf in host.leaves:
        if leaf not in host.adapters:
            continue
        pair = host.adapters[leaf]
        assert isinstance(pair, LoraPair)
        for factor, _, parameter in pair.named_factors():
            if not torch.isfinite(parameter).all():
                raise AdapterError(
                    f"{factor.name} holds inf or NaN; merged, it would ruin the base; load an earlier adapter"
                )
        ranges, first = [], 0
        for rows in host.rows_of(leaf):
            ranges.append((rows, first))
            first += rows.stop - rows.start
        if pair.lora_A.any() and pair.lora_B.any():
            found.append(_Addend(pair, tuple(ranges)))
    return found


def _refuse_quantized(addends: list[tuple[AdapterHost, list[_Addend]]]) -> None:
    names = [one.pair.target for host, found in addends if host.base.quantized for one in found]
    if names:
        raise AdapterError(
            f"{len(names)} of the adapted weights are block-FP8 (first {names[0]}), whose codes would round most of the adapter "
            "away; serve the adapter beside the base, merge into a BF16 base, or pass requantize=True and read the error of each "
            "target in what it returns"
        )


def _merge(base: FrozenWeight, addends: list[_Addend]) -> dict[str, MergeError]:
    errors = {one.pair.target: MergeError() for one in addends}
    for expert in range(base.shape[0]) if len(base.shape) == 3 else [None]:
        for rows in _tiles(base):
            _merge_tile(base, rows, expert, addends, errors)
    return errors


def _tiles(base: FrozenWeight) -> Iterator[slice]:
    """Row tiles of one matrix, within the scratch limit in fp32; of an FP8 weight, whole blocks of one part."""
    rows, columns = base.shape[-2:]
    height = rows // base.parts
    block = base.block[0] if base.quantized and base.block else 1
    step = max(block, SCRATCH_BYTES // (4 * columns) // block * block)
    for part in range(0, rows, height):
        for start in range(part, part + height, step):
            yield slice(start, min(start + step, part + height))


def _merge_tile(
    base: FrozenWeight,
    rows: slice,
    expert: int | None,
    addends: list[_Addend],
    errors: dict[str, MergeError],
) -> None:
    deltas = []
    for one in addends:
        for own, first in one.ranges:
            start, stop = max(rows.start, own.start), min(rows.stop, own.stop)
            if start < stop:
                offset = first - own.start
                delta = _delta(one.pair, slice(start + offset, stop + offset), expert)
                deltas.append((one.pair.target, slice(start - rows.start, stop - rows.start), delta))  # fmt: skip
    if not deltas:
        return
    cols = slice(0, base.shape[-1])
    exact = base.tile(torch.float32, rows=rows, cols=cols, expert=expert).clone()
    for _, own, delta in deltas:
        exact[own] += delta
    _store(base, rows, expert, exact, [own for _, own, _ in deltas])
    held = base.tile(torch.float32, rows=rows, cols=cols, expert=expert)
    for target, own, delta in deltas:
        errors[target].add(held[own], exact[own], delta)


def _delta(pair: LoraPair, rows: slice, expert: int | None) -> Tensor:
    """``scale * B A`` of some rows, fp32 ``[rows, in]``; a factor that all experts share serves each."""
    a, b = pair.lora_A, pair.lora_B
    if expert is not None:
        a, b = (factor[expert if factor.shape[0] > 1 else 0] for factor in (a, b))
    return (b[rows].float() @ a.float()) * pair.scale


def _store(
    base: FrozenWeight, tile: slice, expert: int | None, value: Tensor, changed: list[slice]
) -> None:
    """Round a tile ``value`` fp32 ``[rows, in]`` once, into the bytes that hold it; of FP8, only blocks with ``changed`` rows."""
    if base.dense is not None:
        (base.dense if expert is None else base.dense[expert])[tile] = value
        return
    assert base.codes is not None and base.scales is not None and base.block is not None
    codes, scales = (t if expert is None else t[expert] for t in (base.codes, base.scales))
    new_codes, new_scales = quantize_blocks(value, base.block)
    block, height = base.block[0], base.shape[-2] // base.parts
    part, first = divmod(tile.start, height)
    grid = part * (scales.shape[0] // base.parts) + first // block
    for rows in changed:
        blocks = slice(rows.start // block, -(-rows.stop // block))
        whole = slice(blocks.start * block, min(blocks.stop * block, len(value)))
        codes[tile][whole] = new_codes[whole]
        scales[grid:][blocks] = new_scales[blocks]


def _refuse_training(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    labels = named.get("labels", args[_LABELS] if len(args) > _LABELS else None)
    if labels is not None and model.training and torch.is_grad_enabled():
        raise AdapterError(
            "the adapters are merged into the base, so nothing would train; call mx.unmerge_adapters(model), or model.eval() for "
            "losses alone"
        )
