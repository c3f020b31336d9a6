"""The FP8 engine: what a backend computes, and which one this process uses.

One idea: every product with a frozen weight goes through one :class:`Backend`, and layers never ask which. A backend is chosen
once per process, recorded with what it trained, and never falls back in silence.

* ``reference``: torch operations a tile at a time; every device, every dtype, fp64 included. The oracle of the others.
* ``cpu``: C++ tiles and the CPU's own GEMM (:mod:`megatron_xorl.fp8.cpu`), bf16 and fp32.
* ``triton``: kernels on a GPU (:mod:`megatron_xorl.fp8.triton`), bf16; what they do not take, the reference computes.

Chosen by :func:`use_fp8`, else ``MEGATRON_XORL_FP8_BACKEND`` (``auto`` or a name) and ``MEGATRON_XORL_FP8_MODE`` (``w8a16``,
``w8a8``; by default ``w8a8`` on ``triton``, ``w8a16`` elsewhere). ``auto`` takes ``triton`` on a GPU and ``cpu`` on a CPU, or
``reference``, with one warning, where that cannot run. A backend that was asked for by name and cannot run is an error.

Modes say what the forward of an FP8 weight multiplies: ``w8a16`` the activations as they are, ``w8a8`` their values after
dynamic 1 x 128 quantisation. The adapters' input and the backward are the same in both; dense weights know no mode.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_xorl.errors import PlatformError, nearest
from megatron_xorl.fp8.weight import FrozenWeight

__all__ = [
    "BACKENDS",
    "MODES",
    "Backend",
    "Engine",
    "LowRank",
    "chosen",
    "engine",
    "forward_record",
    "use_fp8",
]

BACKENDS = ("auto", "reference", "cpu", "triton")
MODES = ("w8a16", "w8a8")
BACKEND_VARIABLE = "MEGATRON_XORL_FP8_BACKEND"
MODE_VARIABLE = "MEGATRON_XORL_FP8_MODE"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LowRank:
    """A rank-r product to add to a base product, in place and after its rounding ("separate" order).

    Forward: ``out[:, columns] += left right^T`` with ``left`` the scaled ``t`` ``[M, R]`` and ``right`` B ``[n, R]``.
    dX: ``out += left right`` with ``left`` ``u`` ``[M, R]`` and ``right`` A ``[R, K]``; ``columns`` is all.
    In a grouped product ``right`` has a leading expert axis, of size 1 where one factor serves all experts.
    All in the dtype of ``out``; the product is summed in fp32 (fp64 for fp64), added to ``out`` and rounded once.
    """

    left: Tensor
    right: Tensor
    columns: slice = slice(None)


class Backend(Protocol):
    """Products with frozen weights ``[N, K]`` or banks ``[E, N, K]``, written into ``out``.

    Activations are bf16 or fp32 ``[M, …]``, ``out`` has their dtype and may have strided rows. Rounding points: weight
    values are ``code x scale`` in fp32, rounded once to the activations' dtype; sums are fp32; the result is rounded once.
    Then each :class:`LowRank` is added. No method keeps what it was given, and none computes a weight gradient.
    """

    name: str

    def quantize_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[M, K]`` -> e4m3 codes uint8 ``[M, K]`` and fp32 scales ``[M, ceil(K/128)]`` (``format.quantize_activations``)."""
        ...

    def quantize_weight(self, w: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """``[..., N, K]`` -> e4m3 codes and fp32 block scales (``format.quantize_blocks``)."""
        ...

    def linear(
        self,
        x: Tensor,
        weight: FrozenWeight,
        out: Tensor,
        *,
        mode: str,
        lora: Sequence[LowRank] = (),
    ) -> None:
        """``out [M, N] = x [M, K] W^T``; in mode ``w8a8`` an FP8 weight multiplies the quantised ``x``."""
        ...

    def linear_dx(
        self, dy: Tensor, weight: FrozenWeight, out: Tensor, *, lora: Sequence[LowRank] = ()
    ) -> None:
        """``out [M, K] = dy [M, N] W``."""
        ...

    def grouped_linear(
        self, x: Tensor, weight: FrozenWeight, counts: Sequence[int], out: Tensor, *, mode: str, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out_e = x_e W_e^T`` for ``counts[e]`` consecutive rows each, bit for bit what :meth:`linear` gives per expert."""
        ...

    def grouped_dx(
        self, dy: Tensor, weight: FrozenWeight, counts: Sequence[int], out: Tensor, *, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out_e = dy_e W_e``."""
        ...

    def head_matmul(
        self, x: Tensor, weight: FrozenWeight, rows: slice, contract: str, out: Tensor
    ) -> None:
        """Each head's slice of ``x`` ``[T, H, D]`` with its own rows of ``[H * R, K]``; activations are never quantised.

        ``contract="rows"``: D = number of rows, out ``[T, H, K]``; ``"cols"``: D = K, out ``[T, H, rows]``.
        """
        ...

    def shrink(self, x: Tensor, a: Tensor, scale: float, out: Tensor) -> None:
        """``out [M, R] = scale x A^T`` with A ``[R, K]``: fp32 sums, scaled, one rounding."""
        ...

    def add(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """``out [M, n] += left [M, R] right [R, n]``: fp32 sums, one rounding."""
        ...

    def factor_gradient(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out [P, Q] = left^T right`` over the M rows of both: fp32 sums, one rounding; zeros for M = 0."""
        ...

    def grouped_shrink(
        self, x: Tensor, a: Tensor, scale: float, counts: Sequence[int], out: Tensor
    ) -> None:
        """``out_e [m, R] = scale x_e A_e^T`` with A ``[E or 1, R, K]``, bit for bit what :meth:`shrink` gives per expert."""
        ...

    def grouped_factor_gradient(
        self, left: Tensor, right: Tensor, counts: Sequence[int], out: Tensor
    ) -> None:
        """``out [E, P, Q]``: ``left_e^T right_e``; with one expert in ``out``, the sum over all rows."""
        ...


@dataclass(frozen=True)
class Engine:
    """The choice: a backend, a mode, and why."""

    backend: Backend
    mode: str
    why: str


@dataclass
class _Asked:
    backend: str | None = None
    mode: str | None = None


_asked = _Asked()


def use_fp8(*, backend: str | None = None, mode: str | None = None) -> Engine:
    """Choose backend and mode for this process; ``None`` (and ``"auto"``) leave the environment's choice or the default.

    Raises:
        PlatformError: an unknown name, or a backend that cannot run here.
    """
    before = (_asked.backend, _asked.mode)
    _asked.backend, _asked.mode = backend, mode
    engine_on.cache_clear()
    try:
        return chosen()
    except PlatformError:
        _asked.backend, _asked.mode = before
        engine_on.cache_clear()
        raise


def engine(x: Tensor) -> Engine:
    """The engine for this tensor: this process's choice, with ``reference`` for what only it computes (fp64, fp16)."""
    found = engine_on(x.device.type)
    if x.dtype in (torch.bfloat16, torch.float32) or found.backend.name == "reference":
        return found
    return Engine(_reference(), found.mode, f"{x.dtype} activations")


def chosen() -> Engine:
    """The engine of this process, for where its runs compute."""
    return engine_on("cuda" if torch.cuda.is_available() else "cpu")


def forward_record() -> dict[str, str]:
    """``{"mode": …, "backend": …}`` of this process, for checkpoints and adapters; a resume under another is refused."""
    found = chosen()
    return {"mode": found.mode, "backend": found.backend.name}


@functools.cache
def engine_on(device: str) -> Engine:
    """The engine for tensors of a device type; falling back warns, once, because the result is kept.

    Raises:
        PlatformError: an unknown name, or a backend that was asked for by name and cannot run.
    """
    name, source = _choice(_asked.backend, BACKEND_VARIABLE, BACKENDS, "auto")
    fastest = "cpu" if device in ("cpu", "meta") else "triton"
    wanted = fastest if name == "auto" else name
    try:
        backend = _load(wanted, device)
        why = "the fastest here" if name == "auto" else source
    except PlatformError as error:
        if name != "auto":
            raise PlatformError(f"FP8 backend {name} ({source}): {error}") from error
        logger.warning("FP8 products run on the slow reference backend: %s", error)
        backend, why = _reference(), f"fallback: {error}"
    default = "w8a8" if backend.name == "triton" else "w8a16"
    mode, _ = _choice(_asked.mode, MODE_VARIABLE, MODES, default)
    return Engine(backend, mode, why)


def _choice(asked: str | None, variable: str, known: tuple[str, ...], default: str) -> tuple[str, str]:  # fmt: skip
    """The value and where it came from: the call, the environment, or the default."""
    value, source = asked, "asked for"
    if value in (None, "auto"):
        value, source = os.environ.get(variable) or default, f"set by {variable}"
        source = source if os.environ.get(variable) else "default"
    if value not in known:
        close = nearest(value, known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise PlatformError(f"FP8 choice {value!r} ({source}): expected {', '.join(known)}{hint}")
    return value, source


@functools.cache
def _reference() -> Backend:
    from megatron_xorl.fp8.reference import ReferenceBackend

    return ReferenceBackend()


def _load(name: str, device: str) -> Backend:
    if name == "reference" or device == "meta":
        return _reference()  # on meta there are shapes only: nothing is computed
    return _triton(device) if name == "triton" else _cpu(device)


def _cpu(device: str) -> Backend:
    if device != "cpu":
        raise PlatformError(
            f"the cpu backend computes on a CPU, the tensors are on {device}; set {BACKEND_VARIABLE}=reference"
        )
    from megatron_xorl.fp8.cpu import CpuBackend

    return CpuBackend()


def _triton(device: str) -> Backend:
    from megatron_xorl.fp8.triton import TritonBackend

    return TritonBackend(device)
