"""Which tokens a rank is working on, as numbers that are the same in every layout: one key a token.

One idea: ``key = hash(seed, sample, position)``, where ``sample`` counts the samples of the whole run (iteration times global
batch plus the place in the global batch) and ``position`` is the token's place in its row. A mask that is a function of the key
(:mod:`megatron_xorl.layers.dropout`) needs no generator, so it cannot depend on what ran before or on which rank.

Keys reach a model as the argument ``attention_mask``, which nothing else reads here: the causal mask is the attention's own.
Megatron 0.19.2 hands that argument to every layer, through its activation checkpoints as an explicit tensor, and to the output
processor; every pipeline stage gets its own batch, so nothing is sent. Keys are **uint64**, which no mask is, so that neither can
be taken for the other. Within a layer they are current for its linears (:func:`using`), and a function that is run again in
backward takes them along (:func:`bound`): outside there are none, and a dropout without keys is an error, never a stale mask.

``mix`` is the finaliser of splitmix64, and :func:`output` is that generator's n-th number from a given state (S. Vigna, public
domain, https://prng.di.unimi.it/splitmix64.c; Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_xorl.errors import DataError, LayoutError

__all__ = [
    "GAMMA",
    "Tokens",
    "are_keys",
    "bound",
    "current",
    "dropout_keys",
    "from_columns",
    "mix",
    "name_bits",
    "output",
    "to_columns",
    "tokens_of",
    "using",
]

KEY_COLUMNS = 8
"""Columns of a dispatched row that hold a key: one byte each, a whole number that every float dtype holds exactly."""


def _signed(value: int) -> int:
    """A 64-bit word as the int64 with the same bits."""
    return (value + 2**63) % 2**64 - 2**63


GAMMA = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def mix(z: Tensor) -> Tensor:
    """Splitmix64's finaliser of every element of ``z``, int64 taken as 64-bit words, in place."""
    for shift, factor in _ROUNDS:
        # int64 shifts arithmetically: the sign bits that came in are cut off again.
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            z.mul_(factor)
    return z


def output(state: Tensor, number: Tensor) -> Tensor:
    """The ``number``-th output (from 0) of splitmix64 started at ``state``; both int64, broadcast."""
    return mix(state + (number + 1) * GAMMA)


def name_bits(name: str) -> int:
    """64 bits of a logical name: the first eight bytes of its SHA-256, big-endian, as an int64."""
    return _signed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def dropout_keys(samples: Tensor, positions: Tensor, *, seed: int = 1234) -> Tensor:
    """Keys of a batch, to be passed to the model as ``attention_mask``.

    Args:
        samples: int64 ``[b]``: number of each row's sample in the whole run, ``iteration * global_batch + place``; the same on
            every rank that holds a part of the row. A resumed run must go on counting, or old masks come again.
        positions: int64 ``[b, s]`` or ``[s]``: places of this rank's tokens in their rows (with context parallelism: the whole
            row's places). Of packed documents too, so that no two tokens of a row share one.
        seed: of the run.

    Returns:
        uint64 ``[b, s]``.

    Raises:
        DataError: the shapes do not fit, or the numbers are no integers.
    """
    whole = not (samples.is_floating_point() or positions.is_floating_point())
    if not whole or samples.dim() != 1 or positions.shape[:-1] not in ((), samples.shape):
        raise DataError(
            f"samples are {samples.dtype} {list(samples.shape)} and positions {positions.dtype} {list(positions.shape)}; "
            "expected int64 [b], a number in the run for each row, and int64 [b, s] or [s]"
        )
    samples = samples.to(positions.device, torch.int64).unsqueeze(1)
    start = torch.tensor(_signed(seed), device=positions.device)
    rows = output(output(start, torch.zeros_like(samples)), samples)
    return output(rows, positions.to(torch.int64)).view(torch.uint64)


def are_keys(mask: Tensor | None) -> bool:
    """Whether what came as ``attention_mask`` is keys."""
    return mask is not None and mask.dtype == torch.uint64


@dataclass(frozen=True)
class Tokens:
    """Keys of the tokens that a layer works on, in the order of its rows ``[s, b]``.

    Attributes:
        whole: int64 ``[s * b]``, of every token of this context rank.
        part: int64 ``[s/tp * b]``, of this rank's part under sequence parallelism.
    """

    whole: Tensor
    part: Tensor


def tokens_of(mask: Tensor | None, group: dist.ProcessGroup, *, split: bool) -> Tokens | None:
    """Keys ``[b, s]`` in the order of a layer's rows; ``split``: the sequence is cut over ``group``. None without keys.

    Raises:
        LayoutError: the sequence cannot be cut evenly.
    """
    if mask is None or not are_keys(mask):
        return None
    keys, size = mask.view(torch.int64).t(), group.size() if split else 1
    if keys.shape[0] % size:
        raise LayoutError(
            f"{keys.shape[0]} tokens do not cut over {size} tensor ranks; pad the sequence to a multiple of {size}"
        )
    part = keys if size == 1 else keys.chunk(size)[group.rank()]
    return Tokens(keys.flatten(), part.flatten())


_current: ContextVar[Tokens | None] = ContextVar("tokens", default=None)


def current() -> Tokens | None:
    """Keys of the innermost :func:`using` block, None outside of all."""
    return _current.get()


@contextmanager
def using(tokens: Tokens | None) -> Iterator[None]:
    """Make ``tokens`` the current ones in this block."""
    before = _current.set(tokens)
    try:
        yield
    finally:
        _current.reset(before)


def bound[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with the tokens that are current now, whenever and in whichever thread it is run."""
    tokens = current()
    if tokens is None:
        return function

    def again(*args: Any, **named: Any) -> R:
        with using(tokens):
            return function(*args, **named)

    return again


def to_columns(keys: Tensor, like: Tensor) -> Tensor:
    """Keys ``[T]`` as :data:`KEY_COLUMNS` columns ``[..., 8]`` beside rows ``like`` ``[..., H]`` with T rows, in its dtype."""
    return keys.contiguous().view(torch.uint8).view(*like.shape[:-1], KEY_COLUMNS).to(like.dtype)


def from_columns(columns: Tensor) -> Tensor:
    """Undo :func:`to_columns`: ``[T, 8]`` -> int64 ``[T]``."""
    return columns.detach().to(torch.uint8).contiguous().view(torch.int64).squeeze(-1)
