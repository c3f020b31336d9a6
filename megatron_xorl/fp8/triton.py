"""The ``triton`` backend: the kernels of :mod:`megatron_xorl.kernels`, on a GPU, or in Triton's interpreter.

One idea: this file only says which kernel a product of the engine is. bf16 activations on FP8 weights in blocks of 128 x 128 go
to the kernels; dense weights to torch's GEMM; the rest (fp32 activations, other blocks) to the reference backend, which is slow,
and said once a kind.

The kernels multiply the codes themselves, exact in bf16, and scale the fp32 sums, so a weight's value is never rounded: closer to
fp64 than the ``cpu`` backend, whose values are rounded once, and not its bits.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_xorl.errors import PlatformError
from megatron_xorl.fp8.engine import LowRank
from megatron_xorl.fp8.reference import ExpertLoops, ReferenceBackend, groups
from megatron_xorl.fp8.weight import FrozenWeight

__all__ = ["LEAST_CAPABILITY", "TritonBackend"]

LEAST_CAPABILITY = (9, 0)
"""Hopper: what the kernels are written and compiled for."""

BLOCK = (128, 128)
MOST_RANK = 128  # of an adapter in a product's epilogue; a larger one is added by a GEMM of its own

logger = logging.getLogger(__name__)


class TritonBackend(ExpertLoops):
    """See :class:`megatron_xorl.fp8.engine.Backend`, whose shapes hold here.

    Args:
        device: ``"cuda"``, or ``"cpu"`` in a process that interprets kernels (``TRITON_INTERPRET=1``).

    Raises:
        PlatformError: Triton is missing, or the device cannot run the kernels.
    """

    name = "triton"

    def __init__(self, device: str) -> None:
        _check_device(device)
        self._others = ReferenceBackend()

    def quantize_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[M, K]`` -> codes, scales."""
        from megatron_xorl.kernels.quantize_rows import quantize_rows

        codes, scales = quantize_rows(x)
        return codes.view(torch.uint8), scales

    def quantize_weight(self, w: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """``[..., N, K]`` -> codes, scales; checked for inf and NaN, so on the reference."""
        return self._others.quantize_weight(w, block)

    def linear(
        self, x: Tensor, weight: FrozenWeight, out: Tensor, *, mode: str, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out = x W^T``, then the adapters."""
        if weight.dense is not None:
            torch.mm(x, weight.dense.t(), out=out)
        elif self._reads(x, weight):
            return self._forward(x, weight, out, mode, lora)
        else:
            self._others.linear(x, weight, out, mode=mode)
        for term in lora:
            self.add(out[:, term.columns], term.left, term.right.t())

    def linear_dx(
        self, dy: Tensor, weight: FrozenWeight, out: Tensor, *, lora: Sequence[LowRank] = ()
    ) -> None:
        """``out = dY W``, then the adapters, all in one rounding where the kernel adds them."""
        if weight.dense is not None:
            torch.mm(dy, weight.dense, out=out)
        elif self._reads(dy, weight):
            from megatron_xorl.kernels.linear_dx import fp8_linear_dx

            one, lora = _joined(lora)
            fp8_linear_dx(
                dy, weight.codes, weight.scales, out=out, order="separate", **_named(one, "u", "a")
            )
        else:
            self._others.linear_dx(dy, weight, out)
        for term in lora:
            self.add(out, term.left, term.right)

    def grouped_linear(
        self, x: Tensor, weight: FrozenWeight, counts: Sequence[int], out: Tensor, *, mode: str, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out_e = x_e W_e^T``, then the adapters."""
        if self._reads(x, weight):
            return self._forward(x, weight, out, mode, lora, counts)
        self._others.grouped_linear(x, weight, counts, out, mode=mode, lora=lora)

    def grouped_dx(
        self, dy: Tensor, weight: FrozenWeight, counts: Sequence[int], out: Tensor, *, lora: Sequence[LowRank] = ()
    ) -> None:  # fmt: skip
        """``out_e = dY_e W_e``, then the adapters, all in one rounding where the kernel adds them."""
        if not self._reads(dy, weight):
            self._others.grouped_dx(dy, weight, counts, out, lora=lora)
            return
        from megatron_xorl.kernels.grouped_dx import grouped_fp8_dx

        one, rest = _joined(lora)
        bounds = _offsets(counts, dy.device)
        grouped_fp8_dx(
            dy,
            weight.codes,
            weight.scales,
            bounds,
            out=out,
            order="separate",
            **_named(one, "u", "a"),
        )
        for term in rest:
            self._add_term(out, term.left, term.right, counts)

    def head_matmul(
        self, x: Tensor, weight: FrozenWeight, rows: slice, contract: str, out: Tensor
    ) -> None:
        """Each head with its own rows."""
        from megatron_xorl.kernels.head_matmul import fits, head_matmul

        if self._reads(x, weight) and fits(weight.shape[0] // x.shape[1], rows.start):
            head_matmul(x, weight.codes, weight.scales, rows, contract, out=out)
        else:
            self._others.head_matmul(x, weight, rows, contract, out)

    def shrink(self, x: Tensor, a: Tensor, scale: float, out: Tensor) -> None:
        """``out = scale x A^T``."""
        if x.dtype != torch.bfloat16 or a.shape[0] > MOST_RANK or 1 not in a.stride():
            self._others.shrink(x, a, scale, out)
            return
        from megatron_xorl.kernels.lora_shrink import lora_shrink

        lora_shrink(x if x.stride(-1) == 1 else x.contiguous(), a, scale, out=out)

    def add(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """``out += left right``."""
        if out.dtype == torch.bfloat16:
            out.addmm_(left, right)
        else:
            self._others.add(out, left, right)

    def factor_gradient(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """``out = left^T right``."""
        self._gradient(left, right, out, None)

    def grouped_shrink(
        self, x: Tensor, a: Tensor, scale: float, counts: Sequence[int], out: Tensor
    ) -> None:
        """``out_e = scale x_e A_e^T``; a row's bits do not depend on its batch here, so a shared A takes one launch."""
        if a.shape[0] == 1 and x.dtype == torch.bfloat16:
            self.shrink(x, a[0], scale, out)
        else:
            super().grouped_shrink(x, a, scale, counts, out)

    def grouped_factor_gradient(
        self, left: Tensor, right: Tensor, counts: Sequence[int], out: Tensor
    ) -> None:
        """``out_e = left_e^T right_e``, or one sum over all rows where ``out`` has one expert."""
        if out.shape[0] == 1:
            self._gradient(left, right, out[0], None)
        else:
            self._gradient(left, right, out, counts)

    def _gradient(
        self, left: Tensor, right: Tensor, out: Tensor, counts: Sequence[int] | None
    ) -> None:
        rank_first = left.shape[1] <= right.shape[1]
        small, large = (left, right) if rank_first else (right, left)
        if left.dtype != torch.bfloat16 or small.shape[1] > MOST_RANK:
            if counts is None:
                self._others.factor_gradient(left, right, out)
            else:
                self._others.grouped_factor_gradient(left, right, counts, out)
            return
        from megatron_xorl.kernels.lora_gradient import grouped_lora_gradient, lora_gradient

        if counts is None:
            lora_gradient(large, small, rank_first=rank_first, out=out)
        else:
            bounds = _offsets(counts, left.device)
            grouped_lora_gradient(large, small, bounds, rank_first=rank_first, out=out)

    def _forward(
        self,
        x: Tensor,
        weight: FrozenWeight,
        out: Tensor,
        mode: str,
        lora: Sequence[LowRank],
        counts: Sequence[int] | None = None,
    ) -> None:
        """A forward by kernels: one launch for each range of output columns that has an adapter of its own."""
        operands = self.quantize_activations(x) if mode == "w8a8" else (x,)
        kernel = _forward_kernel(mode, counts is not None)
        bounds = () if counts is None else (_offsets(counts, x.device),)
        assert weight.codes is not None and weight.scales is not None
        pieces, rest = _pieces(lora, weight.shape[-2])
        for columns, term in pieces:
            blocks = slice(columns.start // BLOCK[0], -(-columns.stop // BLOCK[0]))
            codes, scales = weight.codes[..., columns, :], weight.scales[..., blocks, :]
            kernel(
                *operands,
                codes,
                scales,
                *bounds,
                out=out[:, columns],
                order="separate",
                **_named(term, "t", "b"),
            )
        for term in rest:
            self._add_term(out[:, term.columns], term.left, term.right.mT, counts)

    def _add_term(
        self, out: Tensor, left: Tensor, right: Tensor, counts: Sequence[int] | None
    ) -> None:
        if counts is None:
            self.add(out, left, right)
            return
        for expert, rows in enumerate(groups(counts)):
            self.add(out[rows], left[rows], right[expert % right.shape[0]])

    def _reads(self, x: Tensor, weight: FrozenWeight) -> bool:
        """Whether the kernels compute this product; if not, why is said once."""
        if weight.dense is not None:
            return False
        height = weight.shape[-2] // weight.parts
        if x.dtype != torch.bfloat16:
            reason = f"{x.dtype} activations"
        elif weight.block != BLOCK:
            reason = f"FP8 blocks of {weight.block}"
        elif weight.parts > 1 and height % BLOCK[0]:
            reason = f"projections of {height} rows stacked off the block grid"
        else:
            return True
        _say_once(reason)
        return False


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("%s have no Triton kernel: the slow reference backend computes them", reason)


def _forward_kernel(mode: str, grouped: bool) -> Callable[..., Tensor]:
    from megatron_xorl.kernels import grouped_dx, grouped_linear, linear, linear_dx

    if mode == "w8a8":
        return grouped_linear.grouped_fp8_linear if grouped else linear.fp8_linear
    return grouped_dx.grouped_fp8_w8a16 if grouped else linear_dx.fp8_linear_w8a16


def _named(term: LowRank | None, left: str, right: str) -> dict[str, Tensor]:
    """The adapter as the kernels call its two halves; nothing if there is none."""
    return {} if term is None else {left: term.left, right: term.right}


def _pieces(
    lora: Sequence[LowRank], width: int
) -> tuple[list[tuple[slice, LowRank | None]], list[LowRank]]:
    """Cut the output's columns where adapters begin and end: each range with its adapter, or with none; and the adapters that
    no launch can add: of a large rank, off the block grid, or over columns that another has."""
    pieces: list[tuple[slice, LowRank | None]] = []
    rest, done = [], 0
    for term in sorted(lora, key=lambda one: one.columns.indices(width)[0]):
        start, stop, _ = term.columns.indices(width)
        aligned = start % BLOCK[0] == 0 and (stop % BLOCK[0] == 0 or stop == width)
        if start < done or not aligned or term.left.shape[1] > MOST_RANK:
            rest.append(term)
            continue
        if start > done:
            pieces.append((slice(done, start), None))
        pieces.append((slice(start, stop), term))
        done = stop
    if done < width:
        pieces.append((slice(done, width), None))
    return pieces, rest


def _joined(lora: Sequence[LowRank]) -> tuple[LowRank | None, Sequence[LowRank]]:
    """One low-rank product that stands for all of them, side by side along the rank, and what it does not hold."""
    if not lora or sum(term.left.shape[1] for term in lora) > MOST_RANK:
        return None, lora
    if len({term.right.shape[:-2] for term in lora}) > 1:  # some shared by all experts, some not
        return lora[0], lora[1:]
    left = torch.cat([term.left for term in lora], 1) if len(lora) > 1 else lora[0].left
    right = torch.cat([term.right for term in lora], -2) if len(lora) > 1 else lora[0].right
    return LowRank(left, right.contiguous()), ()


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    """int32 ``[E + 1]``: where each expert's rows begin."""
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32).to(device)


def _check_device(device: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise PlatformError("Triton is not installed; it comes with torch's CUDA build")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise PlatformError("the triton backend needs a GPU, and torch sees none")
        found = torch.cuda.get_device_capability()
        if found < LEAST_CAPABILITY:
            name = f"{torch.cuda.get_device_name()} (compute capability {found[0]}.{found[1]})"
            raise PlatformError(f"the kernels need Hopper or newer (9.0); this GPU is {name}")
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise PlatformError(
            "the triton backend needs a GPU; TRITON_INTERPRET=1 runs its kernels, very slowly, on a CPU"
        )
