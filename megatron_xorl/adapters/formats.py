"""Adapter file formats: which tensors of a file hold which factors, and how.

The one idea: a format is a table of :class:`Entry`, one a tensor of the file, computed from the inventory alone. Writing,
streaming, sizes, reading and the completeness check all read that table, so that they cannot disagree.

``sglang_shared_outer`` (default): ordinary targets as PEFT writes them, banks as 3-D tensors under ``experts.w1|w2|w3`` (w1
gate, w2 down, w3 up) whose leading axis is 1 where the factor is shared by all experts. SGLang, vLLM and XoRL read it.

``hf_peft``: one pair an expert (``experts.3.gate_proj``), a shared factor repeated for every expert; transformers + PEFT read it.

``hf_peft_fused``: PEFT's own storage of a bank that transformers holds fused. Gate and up are one parameter of twice the rank: A
stacks both expert by expert, ``[E * 2r, in]``, B is block-diagonal with the expert last, ``[2 * out, 2r * E]``.

Refused in the two PEFT formats, since transformers' fused parameter has one rank and one scale: gate without up, and ranks of
gate and up that differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_xorl.adapters.inventory import DTYPE_BYTES, Factor
from megatron_xorl.errors import AdapterError, nearest

__all__ = [
    "EXPANDED_BYTES",
    "EXPERT_KEYS",
    "FORMATS",
    "PREFIX",
    "Entry",
    "check_format",
    "check_size",
    "file_entries",
    "file_size",
    "inventory_hash",
    "is_bank",
]

PREFIX = "base_model.model."
EXPERT_KEYS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
FORMATS: tuple[str, ...] = ("sglang_shared_outer", "hf_peft", "hf_peft_fused")

EXPANDED_BYTES = 8 * 2**30
"""An expanded form is refused above this size where it is also more than :data:`EXPANDED_RATIO` times the shared form's."""

EXPANDED_RATIO = 2.0


class Entry(NamedTuple):
    """One tensor of a file.

    ``sources``: names of the factors it is made of, in order. ``transform``: ``same`` (the factor as it is), ``expert`` (one
    expert's matrix of a bank, ``expert`` says which), ``rows`` and ``columns`` (a bank as PEFT stores it: A, B).
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    transform: str = "same"
    expert: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def check_format(format: str) -> None:
    """Refuse a format that does not exist.

    Raises:
        AdapterError: names the nearest one.
    """
    if format not in FORMATS:
        close = nearest(format, FORMATS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AdapterError(f"format is {format!r}, expected one of {', '.join(FORMATS)}{hint}")


def is_bank(target: str) -> bool:
    """Whether a target is a bank of experts."""
    return target.rpartition(".")[0].endswith(".experts")


def file_entries(factors: Sequence[Factor], format: str) -> tuple[Entry, ...]:
    """Return the tensors of a file that holds ``factors``, in the order in which a stream of the factors completes them.

    Args:
        factors: in inventory order, A before B, both of every target.
        format: one of :data:`FORMATS`.

    Raises:
        AdapterError: there is no such format, or it cannot hold these factors.
    """
    check_format(format)
    if format == "hf_peft_fused":
        return tuple(_fused(factors))
    if format == "hf_peft":
        _check_fusable(factors, "hf_peft")
        experts = _expert_counts(factors)
        return tuple(
            entry
            for factor in factors
            for entry in (
                _expanded(factor, experts[_bank(factor.target)])
                if is_bank(factor.target)
                else [_plain(factor)]
            )
        )
    return tuple(_plain(factor) for factor in factors)


def _plain(factor: Factor) -> Entry:
    parent, _, leaf = factor.target.rpartition(".")
    target = f"{parent}.{EXPERT_KEYS[leaf]}" if is_bank(factor.target) else factor.target
    return Entry(_key(target, factor.side), factor.shape, factor.dtype, (factor.name,))


def _key(module: str, side: str) -> str:
    return f"{PREFIX}{module}.lora_{side}.weight"


def _bank(target: str) -> str:
    return target.rpartition(".")[0]


def _expert_counts(factors: Sequence[Factor]) -> dict[str, int]:
    """``{bank: number of experts}``: the longest leading axis of its factors."""
    counts: dict[str, int] = {}
    for factor in factors:
        if is_bank(factor.target):
            bank = _bank(factor.target)
            counts[bank] = max(counts.get(bank, 1), factor.shape[0])
    return counts


def _expanded(factor: Factor, experts: int) -> Iterator[Entry]:
    parent, _, leaf = factor.target.rpartition(".")
    shape, sources = factor.shape[1:], (factor.name,)
    for expert in range(experts):
        key = _key(f"{parent}.{expert}.{leaf}", factor.side)
        yield Entry(key, shape, factor.dtype, sources, "expert", expert)


def _fused(factors: Sequence[Factor]) -> list[Entry]:
    """PEFT nests the wrapper of ``down_proj`` around that of ``gate_up_proj``; a parameter alone has no nesting."""
    _check_fusable(factors, "hf_peft_fused")
    experts, by_name = _expert_counts(factors), {factor.name: factor for factor in factors}
    ready: list[tuple[int, Entry]] = []
    for place, factor in enumerate(factors):
        bank, leaf = _bank(factor.target), factor.target.rpartition(".")[2]
        if not is_bank(factor.target):
            ready.append((place, _plain(factor)))
        elif leaf == "down_proj":
            ready.append((place, _wrapped(bank, [factor], experts[bank])))
        elif leaf == "up_proj":  # the second half completes the parameter
            gate = by_name[f"{bank}.gate_proj.lora_{factor.side}"]
            nested = f"{bank}.down_proj.lora_A" in by_name
            module = f"{bank}.base_layer" if nested else bank
            ready.append((place, _wrapped(module, [gate, factor], experts[bank])))
    return [entry for _, entry in sorted(ready, key=lambda item: item[0])]


def _wrapped(module: str, halves: list[Factor], experts: int) -> Entry:
    first, side = halves[0], halves[0].side
    rank = first.rank * len(halves)
    if side == "A":
        shape: tuple[int, ...] = (experts * rank, first.shape[-1])
    else:
        shape = (first.shape[-2] * len(halves), rank * experts)
    transform = "rows" if side == "A" else "columns"
    names = tuple(factor.name for factor in halves)
    return Entry(_key(module, side), shape, first.dtype, names, transform)


def _check_fusable(factors: Sequence[Factor], format: str) -> None:
    """PEFT applies a bank through transformers' fused parameters, whatever the keys."""
    banks: dict[str, dict[str, int]] = {}
    for factor in factors:
        if is_bank(factor.target):
            leaf = factor.target.rpartition(".")[2]
            banks.setdefault(_bank(factor.target), {})[leaf] = factor.rank
    for bank, ranks in banks.items():
        gate, up = ranks.get("gate_proj"), ranks.get("up_proj")
        if (gate is None) != (up is None):
            have, lack = ("gate_proj", "up_proj") if up is None else ("up_proj", "gate_proj")
            raise AdapterError(
                f"{format} cannot hold {bank}.{have} without {lack}: PEFT knows them as one parameter, gate_up_proj; "
                "use sglang_shared_outer"
            )
        if gate != up:
            raise AdapterError(
                f"{format} cannot hold {bank} with rank {gate} for gate_proj and {up} for up_proj: PEFT knows them as one "
                "parameter with one scale; use sglang_shared_outer"
            )
        if format == "hf_peft" and gate is not None and "down_proj" not in ranks:
            raise AdapterError(
                f"hf_peft cannot hold {bank} without down_proj: PEFT then puts the keys of single experts on no parameter; "
                "use hf_peft_fused or sglang_shared_outer"
            )


def file_size(factors: Sequence[Factor], format: str) -> int:
    """Return the bytes of the tensors of ``factors`` in a format, from shapes alone."""
    return sum(entry.nbytes for entry in file_entries(factors, format))


def check_size(factors: Sequence[Factor], format: str, *, allow_expanded: bool = False) -> int:
    """Return the bytes of a file before anything is read, and refuse one that expansion makes needlessly large.

    Raises:
        AdapterError: the form is more than twice the shared form's size and more than 8 GiB, and ``allow_expanded`` is off.
    """
    size, shared = file_size(factors, format), file_size(factors, "sglang_shared_outer")
    if not allow_expanded and size > EXPANDED_BYTES and size > EXPANDED_RATIO * shared:
        raise AdapterError(
            f"{format} would take {_gigabytes(size)} for what sglang_shared_outer holds in {_gigabytes(shared)}: every shared "
            "factor is written once an expert; use sglang_shared_outer, or pass --allow-expanded (allow_expanded=True)"
        )
    return size


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def inventory_hash(factors: Iterable[Factor]) -> str:
    """SHA-256 over the names and shapes of the factors in a file, in order."""
    digest = hashlib.sha256()
    for factor in factors:
        digest.update(f"{factor.name} {factor.shape}\n".encode())
    return digest.hexdigest()
