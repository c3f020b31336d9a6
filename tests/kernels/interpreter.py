"""Triton's CPU interpreter, corrected where it computes something else than a GPU.

Stock Triton 3.8 interprets bf16 as its bit pattern: ``tl.dot`` of bf16 multiplies 16-bit integers and nobody hears of it; casts
to bf16 truncate, casts to fp8 round ties away, lose carries and overflow to NaN. :func:`install` replaces the methods of the
interpreter's builder by ones that convert through torch (whose casts round to nearest even) and compute bf16 and fp8 in fp32 with
one rounding per operation, as the hardware does. Casts to fp8 saturate, as ``cvt.rn.satfinite.e4m3x2.f32`` does; NaN stays NaN.

It also refuses what the interpreter would let pass: a ``tl.dot`` of fp32 operands that is not ``input_precision="ieee"``, because
a GPU would silently take TF32 for it.

The replaced methods are internals of one Triton version. :data:`TRITON_VERSION` names it; under another, :func:`install` fails
until the bit-for-bit tests (test_interpreter.py) have been read again and the number is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock

__all__ = ["TRITON_VERSION", "convert", "install"]

TRITON_VERSION = "3.8.0"

Handle = stock.TensorHandle
Builder = stock.InterpreterBuilder

_TORCH = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_NARROW = (tl.bfloat16, *_LARGEST)
"""What the interpreter holds as unsigned integers of the same width."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARISONS = (np.less, np.greater, np.less_equal, np.greater_equal, np.equal, np.not_equal)


def convert(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Convert between floating types as the GPU does; bf16 and fp8 stand for themselves as unsigned integers."""
    if source == target:
        return data
    bits = np.ascontiguousarray(data).reshape(np.shape(data))
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[bits.itemsize]
    value = torch.from_numpy(bits.view(signed).copy()).view(_TORCH[source])
    if target in _LARGEST:
        wide = value if source in (tl.float64, tl.float32) else value.float()
        limit = _LARGEST[target]
        value = torch.where(wide.isnan(), wide, wide.clamp(-limit, limit))
    result = value.to(_TORCH[target])
    return result.view(_BITS[result.element_size()]).numpy().view(stock._get_np_dtype(target))


def _wide(handle: Any) -> np.ndarray:
    """A handle's data, bf16 and fp8 as fp32."""
    kind = handle.dtype.scalar
    return convert(handle.data, kind, tl.float32) if kind in _NARROW else handle.data


def _narrow(data: Any, kind: Any) -> Any:
    return Handle(convert(np.asarray(data, np.float32), tl.float32, kind), kind)


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        kind, target = source.dtype.scalar, target_type.scalar
        if kind in _TORCH and target in _TORCH:
            return Handle(convert(source.data, kind, target), target)
        if kind in _NARROW:
            return original(self, Handle(_wide(source), tl.float32), target_type)
        if target in _NARROW:
            return _narrow(source.data, target)
        return original(self, source, target_type)

    return cast_impl


def _rounding_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fp_to_fp(self: Any, source: Any, target_type: Any, rounding: Any) -> Any:
        kind, target = source.dtype.scalar, target_type.scalar
        if rounding not in (None, stock._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"cast with {rounding}: only nearest-even is corrected")
        if kind in _TORCH and target in _TORCH:
            return Handle(convert(source.data, kind, target), target)
        return original(self, source, target_type, rounding)

    return create_fp_to_fp


def _dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, _imprecise: Any) -> Any:
    """``acc + a b`` in the accumulator's type."""
    if a.dtype.scalar == tl.float32 and precision != stock._ir.INPUT_PRECISION.IEEE:
        raise ValueError("tl.dot of fp32 operands takes TF32 on a GPU; say input_precision='ieee'")
    product = np.matmul(_wide(a), _wide(b), dtype=acc.data.dtype)
    return Handle(product + acc.data, acc.dtype.scalar)


def _binary(original: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        kind = lhs.dtype.scalar
        if (
            op in _COMPARISONS
        ):  # stock keeps the operands' type, and a scalar condition broadcasts to floats
            return Handle(op(_wide(lhs), _wide(rhs)), tl.int1)
        if kind not in _NARROW:
            return original(self, lhs, rhs, op)
        return _narrow(op(_wide(lhs), _wide(rhs)), kind)

    return binary_op


def _unary(original: Callable[..., Any]) -> Callable[..., Any]:
    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        kind = arg.dtype.scalar
        return _narrow(op(_wide(arg)), kind) if kind in _NARROW else original(self, arg, op)

    return unary_op


def _fma(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        kind = z.dtype.scalar
        if kind not in _NARROW:
            return original(self, x, y, z)
        # The product of two bf16 values is exact in fp64, so the sum is rounded once to fp32 and once to bf16.
        exact = _wide(x).astype(np.float64) * _wide(y) + _wide(z)
        return _narrow(exact, kind)

    return create_fma


def _narrow_tensor(tensor: Any, kind: Any) -> Any:
    shape = tl.block_type(kind, list(tensor.shape)) if tensor.type.is_block() else kind
    return tl.core.tensor(_narrow(tensor.handle.data, kind), shape)


def _reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_impl(self: Any, operands: Any) -> Any:
        kind = operands[0].dtype.scalar
        if kind not in _NARROW:
            return original(self, operands)
        wide = tuple(self.to_tensor(_wide(one.handle), tl.float32) for one in operands)
        found = original(self, wide)
        found = found if isinstance(found, list | tuple) else (found,)
        return tuple(_narrow_tensor(one, kind) if one.dtype == tl.float32 else one for one in found)

    return apply_impl


_installed = False


def install() -> None:
    """Correct the interpreter of this process, once.

    Raises:
        RuntimeError: another Triton version, or Triton was imported before ``TRITON_INTERPRET=1`` was set.
    """
    global _installed
    if _installed:
        return
    if triton.__version__ != TRITON_VERSION:
        raise RuntimeError(
            f"Triton is {triton.__version__}, this layer corrects {TRITON_VERSION}; read its runtime/interpreter.py again, "
            "run tests/kernels/interpreted/test_interpreter.py, then raise TRITON_VERSION"
        )
    if isinstance(tl.standard.sum, triton.JITFunction):
        raise RuntimeError(
            "Triton was imported before TRITON_INTERPRET=1 was set; its own library is compiled"
        )
    Builder.cast_impl = _cast(Builder.cast_impl)
    Builder.create_fp_to_fp = _rounding_cast(Builder.create_fp_to_fp)
    Builder.create_dot = _dot
    Builder.binary_op = _binary(Builder.binary_op)
    Builder.unary_op = _unary(Builder.unary_op)
    Builder.create_fma = _fma(Builder.create_fma)
    stock.ReduceOps.apply_impl = _reduction(stock.ReduceOps.apply_impl)
    _installed = True
