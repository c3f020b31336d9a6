"""A live model's adapters to and from files, or to a stream of tensors without a file.

The file does not know layouts: whatever the ranks hold is put together factor by factor on rank 0 and written once, so that bytes
are the same whatever the layout and memory is one bank; loading gives each rank its slice.

What contributes is in the file: factors that train, and those that are frozen and not zero (``adapters.carried``). Loading reads
and checks everything before it changes anything, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_xorl.adapters.carried import check_carried, stored_factors
from megatron_xorl.adapters.formats import file_entries
from megatron_xorl.adapters.inventory import Factor, build_inventory
from megatron_xorl.errors import AdapterError
from megatron_xorl.layers.attach import check_trainability, named_factors
from megatron_xorl.layers.lora import FactorSlice
from megatron_xorl.layers.switch import HeldAdapter, active_adapter, held_adapter
from megatron_xorl.training.model import attach_adapters
from megatron_xorl.weights.adapter_files import AdapterFile
from megatron_xorl.weights.adapter_layouts import compose_stream
from megatron_xorl.weights.adapter_writer import check_output, write_adapter

__all__ = ["export_adapter", "full_factors", "iter_adapter", "load_adapter", "writes_slice"]


def full_factors(
    model: nn.Module, name: str | None = None
) -> Iterator[tuple[Factor, Tensor | None]]:
    """Every factor of an adapter that a file holds, in inventory order: its full tensor on rank 0, None elsewhere; collective.

    Without a name, of the active adapter.

    Raises:
        AdapterError: a frozen factor contributes without permission.
    """
    adapter = held_adapter(model, name)
    yield from _gathered_factors(model, adapter, _file_factors(model, adapter))


def _file_factors(model: nn.Module, adapter: HeldAdapter) -> tuple[Factor, ...]:
    """What a file of this adapter holds; collective, the same on every rank."""
    inventory = adapter.inventory
    if len(inventory.factors) == len(inventory.trainable):
        return inventory.factors
    mine = {
        factor.target
        for factor, _, parameter in named_factors(model, adapter.idle).values()
        if factor.side == "B" and not factor.trainable and bool(parameter.detach().ne(0).any())
    }
    carried = set().union(*_everywhere(mine))
    check_carried("the model", carried, allowed=adapter.config.allow_nonzero_frozen)
    return stored_factors(inventory, carried)


def _everywhere(value: Any) -> list[Any]:
    """The value of every rank; collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _gathered_factors(
    model: nn.Module, adapter: HeldAdapter, factors: Sequence[Factor]
) -> Iterator[tuple[Factor, Tensor | None]]:
    held = named_factors(model, adapter.idle)
    for factor in factors:
        full = torch.zeros(factor.shape, dtype=model.config.params_dtype)
        if factor.name in held and writes_slice(held[factor.name][1]):
            _, piece, parameter = held[factor.name]
            piece.of(full).copy_(parameter.detach())
        if dist.get_world_size() > 1:
            # Exactly one rank contributes each element; adding bytes to zeros moves them unchanged, the sign of -0.0 included.
            dist.reduce(full.view(torch.uint8), dst=0)
        yield factor, full if dist.get_rank() == 0 else None


def writes_slice(piece: FactorSlice) -> bool:
    """Whether this rank contributes its slice: one of the ranks that hold the same one."""
    bank, per_expert = len(piece.factor.shape) == 3, piece.factor.ep_axis is not None
    if per_expert:
        return parallel_state.get_expert_data_parallel_rank() == 0
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    cut = piece.factor.tp_axis is not None and not bank
    return replica and (cut or parallel_state.get_tensor_model_parallel_rank() == 0)


def iter_adapter(
    model: nn.Module, format: str = "sglang_shared_outer", *, name: str | None = None
) -> Iterator[tuple[str, Tensor | None]]:
    """The factors of a live model in a file format's spelling, without a file: for weight sync into an engine.

    Collective: every rank iterates to the end, in step. One bank at most is held at a time.

    Args:
        model: with adapters attached.
        format: ``sglang_shared_outer``, ``hf_peft`` or ``hf_peft_fused``.
        name: of one of several adapters; the active one by default.

    Yields:
        ``(key, tensor)`` as :func:`export_adapter` would write them, in the same order; on ranks other than 0 the tensor is None.

    Raises:
        AdapterError: there is no such format, it cannot hold these factors, or the model carries no adapters.
    """
    adapter = held_adapter(model, name)
    factors = _file_factors(model, adapter)
    entries = file_entries(factors, format)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for factor, tensor in _gathered_factors(model, adapter, factors):
            # Other ranks go through the same steps with a tensor that has no values.
            yield (
                factor.name,
                torch.empty(factor.shape, device="meta") if tensor is None else tensor,
            )

    if dist.get_rank() == 0:
        for entry, tensor in compose_stream(entries, gathered()):
            yield entry.key, tensor
        return
    arrived: set[str] = set()
    waiting = iter(entries)
    entry = next(waiting, None)
    for name, _ in gathered():
        arrived.add(name)
        while entry is not None and arrived.issuperset(entry.sources):
            yield entry.key, None
            entry = next(waiting, None)


def export_adapter(
    model: nn.Module,
    path: str | Path,
    format: str = "sglang_shared_outer",
    *,
    allow_expanded: bool = False,
    name: str | None = None,
) -> None:
    """Write the factors of a live model that trained, or contribute frozen, to a directory; collective, rank 0 writes.

    Args:
        model: with adapters attached.
        path: directory to make.
        format: ``sglang_shared_outer``, ``hf_peft`` or ``hf_peft_fused``.
        allow_expanded: write an expanded form that is far larger than the shared one.
        name: of one of several adapters; the active one by default.

    Raises:
        AdapterError: on every rank: the format is not known or cannot hold the factors, the output exists, the disk is full, the
            model has no trained adapters, or a frozen factor contributes without permission.
    """
    adapter = held_adapter(model, name)
    # Refuses what is merged or disabled, before anything is written.
    named_factors(model, adapter.idle)
    factors, out = _file_factors(model, adapter), Path(path)
    _together(lambda: check_output(out, factors, format, allow_expanded=allow_expanded))
    stream = _gathered_factors(model, adapter, factors)
    _together(lambda: _write(model, adapter, out, format, factors, stream, allow_expanded), stream)


def _write(
    model: nn.Module,
    adapter: HeldAdapter,
    out: Path,
    format: str,
    factors: Sequence[Factor],
    stream: Iterator[tuple[Factor, Tensor | None]],
    allow_expanded: bool,
) -> None:
    write_adapter(
        out,
        factors,
        ((factor.name, tensor) for factor, tensor in stream if tensor is not None),
        adapter.config,
        base_model=str(model.base_directory),
        base_fingerprint=model.base_fingerprint,
        format=format,
        allow_expanded=allow_expanded,
    )


def _together(action: Callable[[], object], stream: Iterable[object] = ()) -> None:
    """Do ``action`` on rank 0 while the others take part in ``stream``; its error is raised on every rank.

    Whatever it is: a rank 0 that left here would let the others wait for it.
    """
    told: list[str | None] = [None]
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            told, cause = [str(error)], error
    for _ in stream:  # rank 0 goes on too after a fault: the others wait for it in every reduction
        pass
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise AdapterError(told[0]) from cause


def load_adapter(
    model: nn.Module, path: str | Path, *, allow_missing: bool = False, name: str | None = None
) -> None:
    """Load an adapter directory of any format into a model, attaching the adapters it was trained with if the model has none.

    A model with more adapters than the file keeps the others with B zero, where the file's own scope and targets say that it was
    written without them: the model then computes what the file says. Factors of the file that are frozen in the model are loaded
    too, with ``allow_nonzero_frozen`` where they are not zero. Collective; a file that is refused has changed nothing, but that
    a model without adapters may carry those of the file, with B zero.

    Args:
        model: from :func:`load_model`.
        path: of the adapter.
        allow_missing: the same for a file that does not say so, such as one of PEFT.
        name: of one of several adapters, which takes the factors; the active one by default.

    Raises:
        AdapterError: on every rank: the file is damaged, of another base, or does not fit the model's adapters; or factors that
            are frozen here would contribute without permission.
    """
    file = AdapterFile(path)
    if file.base_fingerprint is not None and file.base_fingerprint != model.base_fingerprint:
        raise AdapterError(
            f"{path} was trained on a base with fingerprint {file.base_fingerprint[:12]}, "
            f"this one is {model.base_fingerprint[:12]}; use the base it was trained on"
        )
    if name is None and active_adapter(model) is None:
        attach_adapters(model, file.adapter)
    adapter = held_adapter(model, name)
    _check_names(model, adapter, file, allow_missing)
    _check_alike(adapter, file)
    local = named_factors(model, adapter.idle)
    _check_values(adapter, file, local)
    stored = {factor.name for factor in file.factors}
    with torch.no_grad():
        for factor, piece, parameter in local.values():
            if factor.name in stored:
                parameter.copy_(file.read(factor, _parts(piece)))
            elif factor.side == "B":
                parameter.zero_()
    if adapter.idle is None:
        check_trainability(model, allow_nonzero_frozen=adapter.config.allow_nonzero_frozen)


def _parts(piece: FactorSlice) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in piece.ranges)


def _check_values(
    adapter: HeldAdapter,
    file: AdapterFile,
    local: dict[str, tuple[Factor, FactorSlice, nn.Parameter]],
) -> None:
    """Read everything once, so that a fault in the last value is found before the first is copied; collective."""
    stored = {factor.name for factor in file.factors}
    contributing: set[str] = set()
    fault: str | None = None
    try:
        for factor, piece, _ in local.values():
            if factor.name in stored:
                value = file.read(factor, _parts(piece))
                if factor.side == "B" and not factor.trainable and bool(value.ne(0).any()):
                    contributing.add(factor.target)
    except AdapterError as error:
        fault = str(error)
    everywhere = _everywhere((fault, contributing))
    if faults := [found for found, _ in everywhere if found]:
        raise AdapterError(faults[0])
    check_carried(
        str(file.directory),
        set().union(*(found for _, found in everywhere)),
        allowed=adapter.config.allow_nonzero_frozen,
    )


def _check_names(
    model: nn.Module, adapter: HeldAdapter, file: AdapterFile, allow_missing: bool
) -> None:
    """Compare names both ways: what the file may lack of what trains, and nothing that is not built."""
    held = {factor.name for factor in file.factors}
    if file.own:
        recorded = build_inventory(model.glm_config, file.adapter)
        file.check_factors(stored_factors(recorded, file.frozen))  # as its own record has it
    may_lack = file.own or allow_missing
    file.check_factors(
        tuple(
            factor
            for factor in adapter.inventory.factors
            if factor.name in held or (factor.trainable and not may_lack)
        )
    )


def _check_alike(adapter: HeldAdapter, file: AdapterFile) -> None:
    """Shapes first; then scales, since the factors of a file mean something at one scale only."""
    for factor in file.factors:
        needed = adapter.inventory.by_name[factor.name].shape
        if needed != factor.shape:
            raise AdapterError(
                f"{factor.name} is {list(factor.shape)}, the model needs {list(needed)}; it is of another base or rank"
            )
    for factor in file.factors:
        mine, its = adapter.config.scale_of(factor.rank), file.adapter.scale_of(factor.rank)
        if abs(mine - its) > 1e-9 * abs(its):
            raise AdapterError(
                f"{file.directory} scales {factor.target} by {its:g}, the model's adapter config by {mine:g}; "
                "use the alpha (and rslora) it was trained with"
            )
