"""Subjects of the quantising kernels, the frozen linears and the LoRA factors; see :mod:`megatron_xorl.kernels.subjects`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megatron_xorl.kernels import (
    grouped_dx,
    grouped_linear,
    head_matmul,
    linear,
    linear_dx,
    lora_gradient,
    lora_shrink,
    quantize_blocks,
    quantize_rows,
)
from megatron_xorl.kernels.launch import BLOCK, cdiv
from megatron_xorl.kernels.subjects import EXACT, Dims, Inputs, Limit, Outputs, Subject

__all__ = ["SUBJECTS", "offsets", "random_codes", "random_weight"]

FP8 = Limit(2e-7, 2.5e-3, ("diff", 1e-3))
BF16 = Limit(2e-7, 2.5e-3, ("relative", 3e-3))
SUM = Limit(2e-7, 2.5e-3, ("relative", 3e-3))
SCALE = 0.5
"""alpha / R of the shrink's subject."""


def random_codes(*shape: int, device: str) -> Tensor:
    """e4m3 codes of a normal distribution that uses most of the range."""
    return (torch.randn(shape, device=device) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)


def random_scales(*shape: int, device: str) -> Tensor:
    """Scales over two orders of magnitude, so that one taken from a neighbour shows."""
    return 10 ** (torch.rand(shape, device=device) * 2 - 4)


def random_weight(dims: Dims, device: str) -> tuple[Tensor, Tensor]:
    """A weight ``[N, K]`` or bank ``[E, N, K]`` with its scales; the experts of a bank are rotations of one."""
    codes = random_codes(dims["N"], dims["K"], device=device)
    grid = (cdiv(dims["N"], BLOCK), cdiv(dims["K"], BLOCK))
    if "E" not in dims:
        return codes, random_scales(*grid, device=device)
    turned = [codes.view(torch.uint8).roll(expert, 0) for expert in range(dims["E"])]
    bank = torch.stack(turned).view(torch.float8_e4m3fn)
    return bank, random_scales(dims["E"], *grid, device=device)


def offsets(dims: Dims, device: str) -> Tensor:
    """Uneven groups of M rows; expert 0 and every third after it has none."""
    rows, experts = dims["M"], dims["E"]
    weights = torch.tensor([0.0 if e % 3 == 0 else 1.0 + e % 5 for e in range(experts)])
    ends = (weights.cumsum(0) / weights.sum() * rows).round().int()
    return torch.cat([torch.zeros(1, dtype=torch.int32), ends]).to(device)


def bf16(*shape: int, device: str) -> Tensor:
    """Normal bf16 values."""
    return torch.randn(shape, device=device).bfloat16()


def _linear_inputs(dims: Dims, device: str) -> Inputs:
    codes, scales = quantize_rows.reference(bf16(dims["M"], dims["K"], device=device))
    weight, weight_scales = random_weight(dims, device)
    found: Inputs = {
        "codes": codes,
        "scales": scales,
        "x": bf16(dims["M"], dims["K"], device=device),
        "dy": bf16(dims["M"], dims["N"], device=device),
        "weight": (weight, weight_scales),
        "order": "separate" if dims.get("separate") else "fused",
        "rank": dims["R"],
    }
    if "E" in dims:
        found["offsets"] = offsets(dims, device)
    if dims["R"]:
        lead = () if "E" not in dims else (1 if dims["shared"] else dims["E"],)
        found["t"] = bf16(dims["M"], dims["R"], device=device)
        found["b"] = bf16(*lead, dims["N"], dims["R"], device=device)
        found["a"] = bf16(*lead, dims["R"], dims["K"], device=device)
    return found


def _low_rank(x: Inputs, left: str, right: str) -> dict[str, Tensor]:
    """The adapter's operands under the names a call has for them."""
    return {left: x["t"], right: x[right]} if x["rank"] else {}


def _run_linear(x: Inputs, dtype: torch.dtype) -> Outputs:
    extra = _low_rank(x, "t", "b")
    y = linear.fp8_linear(
        x["codes"], x["scales"], *x["weight"], **extra, order=x["order"], dtype=dtype
    )
    return {"y": y}


def _expect_linear(x: Inputs) -> Outputs:
    return {"y": linear.reference(x["codes"], x["scales"], *x["weight"], **_low_rank(x, "t", "b"))}


def _run_dx(x: Inputs, dtype: torch.dtype) -> Outputs:
    extra = _low_rank(x, "u", "a")
    dx = linear_dx.fp8_linear_dx(x["dy"], *x["weight"], **extra, order=x["order"], dtype=dtype)
    return {"y": dx}


def _expect_dx(x: Inputs) -> Outputs:
    return {"y": linear_dx.reference_dx(x["dy"], *x["weight"], **_low_rank(x, "u", "a"))}


def _run_w8a16(x: Inputs, dtype: torch.dtype) -> Outputs:
    extra = _low_rank(x, "t", "b")
    y = linear_dx.fp8_linear_w8a16(x["x"], *x["weight"], **extra, order=x["order"], dtype=dtype)
    return {"y": y}


def _expect_w8a16(x: Inputs) -> Outputs:
    return {"y": linear_dx.reference_w8a16(x["x"], *x["weight"], **_low_rank(x, "t", "b"))}


def _run_grouped(x: Inputs, dtype: torch.dtype) -> Outputs:
    call = grouped_linear.grouped_fp8_linear
    extra = _low_rank(x, "t", "b")
    return {"y": call(x["codes"], x["scales"], *x["weight"], x["offsets"], **extra, dtype=dtype)}


def _expect_grouped(x: Inputs) -> Outputs:
    extra = _low_rank(x, "t", "b")
    return {
        "y": grouped_linear.reference(x["codes"], x["scales"], *x["weight"], x["offsets"], **extra)
    }


def _run_grouped_dx(x: Inputs, dtype: torch.dtype) -> Outputs:
    extra = _low_rank(x, "u", "a")
    return {
        "y": grouped_dx.grouped_fp8_dx(x["dy"], *x["weight"], x["offsets"], **extra, dtype=dtype)
    }


def _run_grouped_w8a16(x: Inputs, dtype: torch.dtype) -> Outputs:
    extra = _low_rank(x, "t", "b")
    return {
        "y": grouped_dx.grouped_fp8_w8a16(x["x"], *x["weight"], x["offsets"], **extra, dtype=dtype)
    }


def _expect_grouped_bf16(x: Inputs, operand: str, right: str, forward: bool) -> Outputs:
    extra = {"left": x["t"], "right": x[right]} if x["rank"] else {}
    return {
        "y": grouped_dx.reference(x[operand], *x["weight"], x["offsets"], **extra, forward=forward)
    }


def _run_shrink(x: Inputs, dtype: torch.dtype) -> Outputs:
    return {
        "t": lora_shrink.lora_shrink(x["x"], x["a"], SCALE, dtype=dtype),
        "u": lora_shrink.lora_shrink(x["dy"], x["b"].t(), SCALE, dtype=dtype),
    }


def _expect_shrink(x: Inputs) -> Outputs:
    return {
        "t": lora_shrink.reference(x["x"], x["a"], SCALE),
        "u": lora_shrink.reference(x["dy"], x["b"].t(), SCALE),
    }


def _run_gradient(x: Inputs, dtype: torch.dtype) -> Outputs:
    call = lora_gradient.lora_gradient
    return {
        "da": call(x["x"], x["t"], rank_first=True, dtype=dtype),
        "db": call(x["dy"], x["t"], rank_first=False, dtype=dtype),
    }


def _expect_gradient(x: Inputs) -> Outputs:
    call = lora_gradient.reference
    return {
        "da": call(x["x"], x["t"], rank_first=True),
        "db": call(x["dy"], x["t"], rank_first=False),
    }


def _run_grouped_gradient(x: Inputs, dtype: torch.dtype) -> Outputs:
    call = lora_gradient.grouped_lora_gradient
    return {
        "da": call(x["x"], x["t"], x["offsets"], rank_first=True, dtype=dtype),
        "db": call(x["dy"], x["t"], x["offsets"], rank_first=False, dtype=dtype),
    }


def _expect_grouped_gradient(x: Inputs) -> Outputs:
    bounds = x["offsets"].tolist()
    groups = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    call = lora_gradient.reference
    return {
        "da": torch.stack([call(x["x"][g], x["t"][g], rank_first=True) for g in groups]),
        "db": torch.stack([call(x["dy"][g], x["t"][g], rank_first=False) for g in groups]),
    }


def _head_inputs(dims: Dims, device: str) -> Inputs:
    weight = random_weight({"N": dims["H"] * dims["R"], "K": dims["K"]}, device)
    contract = "rows" if dims["rows"] else "cols"
    depth = dims["P"] if dims["rows"] else dims["K"]
    # Part of a wider activation, as the queries are that carry their rotary part behind.
    x = bf16(dims["T"], dims["H"], depth + 64, device=device)[..., :depth]
    rows = slice(dims["first"], dims["first"] + dims["P"])
    return {"x": x, "weight": weight, "rows": rows, "contract": contract}


def _run_heads(x: Inputs, dtype: torch.dtype) -> Outputs:
    call = head_matmul.head_matmul
    return {"y": call(x["x"], *x["weight"], x["rows"], x["contract"], dtype=dtype)}


def _expect_heads(x: Inputs) -> Outputs:
    return {"y": head_matmul.reference(x["x"], *x["weight"], x["rows"], x["contract"])}


def _head_bytes(d: Dims) -> float:
    return 2.0 * d["T"] * d["H"] * (d["P"] + d["K"]) + d["H"] * d["P"] * d["K"]


def _matrix(dims: Dims, device: str) -> Inputs:
    size = torch.logspace(-3, 3, dims["M"], device=device)[:, None]
    return {"x": (torch.randn(dims["M"], dims["K"], device=device) * size).bfloat16()}


def _bytes(pair: tuple[Tensor, Tensor]) -> Outputs:
    return {"codes": pair[0].view(torch.uint8), "scales": pair[1]}


def _flop(d: Dims) -> float:
    return 2.0 * d["M"] * (d["N"] * d["K"] + d["R"] * d["N"])


def _weight_bytes(d: Dims) -> float:
    return float(d.get("E", 1) * d["N"] * d["K"])


def _forward_bytes(d: Dims) -> float:
    return d["M"] * d["K"] * (1 + 4 / BLOCK) + _weight_bytes(d) + 2 * d["M"] * (d["N"] + d["R"])


def _wide_bytes(d: Dims) -> float:
    return 2.0 * d["M"] * (d["N"] + d["K"] + d["R"]) + _weight_bytes(d)


def _pair_flop(d: Dims) -> float:
    return 2.0 * d["M"] * d["R"] * (d["N"] + d["K"])


def _pair_bytes(d: Dims) -> float:
    return 2.0 * d["M"] * (d["N"] + d["K"] + 2 * d["R"])


ONE = (torch.bfloat16,)
WIDE_FIRST = (torch.float32, torch.bfloat16)
SUBJECTS = {
    "quantize_rows": Subject(
        _matrix,
        lambda x, _: _bytes(quantize_rows.quantize_rows(x["x"])),
        lambda x: _bytes(quantize_rows.reference(x["x"])),
        {"codes": EXACT, "scales": EXACT}, lambda d: 0.0,
        lambda d: d["M"] * d["K"] * (3 + 4 / BLOCK), "none", ONE,
    ),
    "quantize_blocks": Subject(
        _matrix,
        lambda x, _: _bytes(quantize_blocks.quantize_blocks(x["x"])),
        lambda x: _bytes(quantize_blocks.reference(x["x"])),
        {"codes": EXACT, "scales": EXACT}, lambda d: 0.0, lambda d: 3.0 * d["M"] * d["K"], "none", ONE,
    ),
    "linear": Subject(_linear_inputs, _run_linear, _expect_linear, {"y": FP8}, _flop, _forward_bytes, "fp8"),
    "linear_dx": Subject(_linear_inputs, _run_dx, _expect_dx, {"y": BF16}, _flop, _wide_bytes),
    "linear_w8a16": Subject(_linear_inputs, _run_w8a16, _expect_w8a16, {"y": BF16}, _flop, _wide_bytes),
    "grouped_linear": Subject(
        _linear_inputs, _run_grouped, _expect_grouped, {"y": FP8}, _flop, _forward_bytes, "fp8",
    ),
    "grouped_dx": Subject(
        _linear_inputs, _run_grouped_dx,
        lambda x: _expect_grouped_bf16(x, "dy", "a", False), {"y": BF16}, _flop, _wide_bytes,
    ),
    "grouped_w8a16": Subject(
        _linear_inputs, _run_grouped_w8a16,
        lambda x: _expect_grouped_bf16(x, "x", "b", True), {"y": BF16}, _flop, _wide_bytes,
    ),
    "head_matmul": Subject(
        _head_inputs, _run_heads, _expect_heads, {"y": BF16},
        lambda d: 2.0 * d["T"] * d["H"] * d["P"] * d["K"], _head_bytes,
    ),
    "lora_shrink": Subject(_linear_inputs, _run_shrink, _expect_shrink, {"t": SUM, "u": SUM}, _pair_flop, _pair_bytes),
    "lora_gradient": Subject(
        _linear_inputs, _run_gradient, _expect_gradient, {"da": SUM, "db": SUM}, _pair_flop, _pair_bytes,
        dtypes=WIDE_FIRST,
    ),
    "grouped_lora_gradient": Subject(
        _linear_inputs, _run_grouped_gradient, _expect_grouped_gradient, {"da": SUM, "db": SUM},
        _pair_flop, _pair_bytes, dtypes=WIDE_FIRST,
    ),
}  # fmt: skip
