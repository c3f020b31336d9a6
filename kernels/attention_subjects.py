"""Subjects of the indexer and of sparse attention; see :mod:`megatron_xorl.kernels.subjects`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_xorl.kernels import (
    indexer_backward,
    indexer_kl,
    indexer_logits,
    sparse_mla,
    sparse_mla_backward,
    sparse_mla_probs,
    topk,
)
from megatron_xorl.kernels.linear_subjects import bf16, random_codes
from megatron_xorl.kernels.subjects import EXACT, Dims, Inputs, Limit, Outputs, Subject

__all__ = ["SUBJECTS", "ranges", "selection"]

OUT = Limit(4e-3, 4e-3, ("diff", 7e-6))
LSE = Limit(2e-6, 2e-6, ("relative", 1e-5))
DQ = Limit(6e-3, 6e-3, ("diff", 1e-4))
DKV = Limit(4e-3, 4e-3, ("diff", 1e-4))
PROBS = Limit(1e-6, 1e-6, ("relative", 1e-4))
LOGITS = Limit(3e-7, 3e-7, ("diff", 5e-6))
KL = Limit(1e-6, 1e-6, ("relative", 1e-5))
INDEXER = Limit(4e-3, 4e-3, ("diff", 1e-4))
HEADS = Limit(1e-6, 1e-6, ("relative", 1e-5))


def selection(dims: Dims, device: str) -> Tensor:
    """Distinct random keys up to each query's own place, -1 for the rest; one query in the middle has none."""
    queries, keys, wanted = dims["S"], dims["T"], dims["topk"]
    picked = torch.rand(queries, keys, device=device).topk(min(wanted, keys)).indices
    reach = torch.arange(queries, device=device) * keys // queries + keys // queries
    picked = picked.masked_fill(picked >= reach[:, None], -1)
    picked = torch.nn.functional.pad(picked, (0, wanted - picked.shape[1]), value=-1).int()
    picked[queries // 2] = -1
    return picked.contiguous()


def ranges(dims: Dims, device: str) -> tuple[Tensor, Tensor]:
    """Causal ranges of two packed documents; the first query of the second sees nothing."""
    queries, keys = dims["S"], dims["T"]
    place = torch.arange(queries, device=device)
    hi = (place + 1) * keys // queries
    lo = torch.where(place >= queries // 2, keys // 2, 0)
    lo = torch.where(place == queries // 2, hi, lo)
    return lo.int(), hi.int()


def _attention_inputs(dims: Dims, device: str) -> Inputs:
    width = dims["D"] + dims["DR"]
    found: Inputs = {
        "q": bf16(dims["S"], dims["H"], width, device=device),
        "kv": bf16(dims["T"], width, device=device),
        "grad": bf16(dims["S"], dims["H"], dims["D"], device=device),
        "index": selection(dims, device),
        "scale": width**-0.5,
        "dim": dims["D"],
    }
    call = _operands(found)
    found["out"], found["lse"] = sparse_mla.sparse_mla(*call)
    return found


def _operands(x: Inputs) -> tuple[Tensor, Tensor, Tensor, float, int]:
    return x["q"], x["kv"], x["index"], x["scale"], x["dim"]


def _run_attention(x: Inputs, dtype: torch.dtype) -> Outputs:
    out, lse = sparse_mla.sparse_mla(*_operands(x), dtype=dtype)
    return {"out": out, "lse": lse}


def _expect_attention(x: Inputs) -> Outputs:
    out, lse, _ = sparse_mla.reference(*_operands(x))
    return {"out": out, "lse": lse}


def _run_attention_backward(x: Inputs, dtype: torch.dtype) -> Outputs:
    operands = (x["grad"], x["q"], x["kv"], x["index"], x["out"], x["lse"], x["scale"])
    call = sparse_mla_backward.sparse_mla_backward
    dq, dkv = call(*operands, dtype=dtype)
    ordered = call(*operands, dtype=dtype, deterministic=True)[1]
    return {"dq": dq, "dkv": dkv, "ordered dkv": ordered}


def _expect_attention_backward(x: Inputs) -> Outputs:
    call = sparse_mla_backward.reference
    dq, dkv = call(x["grad"], x["q"], x["kv"], x["index"], x["scale"])
    return {"dq": dq, "dkv": dkv, "ordered dkv": dkv}


def _run_probs(x: Inputs, _: torch.dtype) -> Outputs:
    q, kv, index, scale, dim = _operands(x)
    return {"probs": sparse_mla_probs.sparse_mla_probs(q, kv, index, x["lse"], scale, dim)}


def _indexer_inputs(dims: Dims, device: str) -> Inputs:
    queries, keys, heads, dim = (dims[name] for name in ("S", "T", "H", "D"))
    lo, hi = ranges(dims, device)
    index = selection(dims, device)
    selected = torch.randn(index.shape, device=device).masked_fill(index < 0, float("-inf"))
    return {
        "codes": (
            random_codes(queries, heads, dim, device=device),
            random_codes(keys, dim, device=device),
            torch.rand(keys, device=device),
            torch.randn(queries, heads, device=device),
            lo,
            hi,
        ),
        "scores": torch.randn(queries, keys, device=device).bfloat16().float(),
        "topk": dims["topk"],
        "q": bf16(queries, heads, dim, device=device),
        "k": bf16(keys, dim, device=device),
        "w": torch.randn(queries, heads, device=device),
        "index": index,
        "selected": selected,
        "probs": torch.rand(index.shape, device=device),
        "dsel": torch.randn(index.shape, device=device),
        "scale": dim**-0.5,
    }


def _ranges_of(x: Inputs) -> tuple[Tensor, Tensor]:
    return x["codes"][4], x["codes"][5]


def _run_topk(x: Inputs, _: torch.dtype) -> Outputs:
    picked = topk.topk_select(x["scores"], *_ranges_of(x), x["topk"])
    # As a set: sorted by index, unused places last.
    end = x["scores"].shape[1]
    picked = torch.where(picked < 0, end, picked).sort(1).values
    return {"index": torch.where(picked == end, -1, picked)}


def _expect_topk(x: Inputs) -> Outputs:
    return {"index": topk.reference(x["scores"], *_ranges_of(x), x["topk"])}


def _run_kl(x: Inputs, _: torch.dtype) -> Outputs:
    loss, slope = indexer_kl.indexer_kl(x["selected"], x["probs"], 0.7)
    return {"loss": loss, "dsel": slope}


def _expect_kl(x: Inputs) -> Outputs:
    selected = x["selected"].double().requires_grad_()
    loss = indexer_kl.reference(selected, x["probs"], 0.7)
    return {"loss": loss.detach(), "dsel": torch.autograd.grad(loss.sum(), selected)[0]}


def _indexer_operands(x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    return x["q"], x["k"], x["w"], x["index"], x["dsel"], x["scale"]


def _run_indexer_backward(x: Inputs, dtype: torch.dtype) -> Outputs:
    call = indexer_backward.indexer_backward
    dq, dk, dw = call(*_indexer_operands(x), dtype=dtype)
    ordered = call(*_indexer_operands(x), dtype=dtype, deterministic=True)[1]
    return {"dq": dq, "dk": dk, "dw": dw, "ordered dk": ordered}


def _expect_indexer_backward(x: Inputs) -> Outputs:
    dq, dk, dw = indexer_backward.reference(*_indexer_operands(x))
    return {"dq": dq, "dk": dk, "dw": dw, "ordered dk": dk}


def _pairs(d: Dims) -> float:
    return d["S"] * d["T"] / 2


def _latent_bytes(d: Dims) -> float:
    return 2.0 * d["S"] * d["topk"] * (d["D"] + d["DR"])


ONE = (torch.bfloat16,)
SUBJECTS = {
    "indexer_logits": Subject(
        _indexer_inputs,
        lambda x, _: {"logits": indexer_logits.indexer_logits(*x["codes"])},
        lambda x: {"logits": indexer_logits.reference(*x["codes"])},
        {"logits": LOGITS},
        lambda d: 2.0 * d["D"] * d["H"] * _pairs(d),
        lambda d: 4.0 * d["S"] * d["T"] + d["S"] * d["H"] * d["D"], "fp8", ONE,
    ),
    "topk": Subject(
        _indexer_inputs, _run_topk, _expect_topk, {"index": EXACT},
        lambda d: 0.0, lambda d: 5 * 4.0 * _pairs(d), "none", ONE,
    ),
    "indexer_kl": Subject(
        _indexer_inputs, _run_kl, _expect_kl, {"loss": KL, "dsel": KL},
        lambda d: 0.0, lambda d: 12.0 * d["topk"] * d["S"], "none", ONE,
    ),
    "indexer_backward": Subject(
        _indexer_inputs, _run_indexer_backward, _expect_indexer_backward,
        {"dq": INDEXER, "dk": INDEXER, "dw": HEADS, "ordered dk": INDEXER},
        lambda d: 2 * 6.0 * d["D"] * d["H"] * d["topk"] * d["S"],
        lambda d: 2 * 6.0 * d["D"] * d["topk"] * d["S"],
    ),
    "sparse_mla": Subject(
        _attention_inputs, _run_attention, _expect_attention, {"out": OUT, "lse": LSE},
        lambda d: 2.0 * d["H"] * d["topk"] * (2 * d["D"] + d["DR"]) * d["S"], _latent_bytes,
    ),
    "sparse_mla_backward": Subject(
        _attention_inputs, _run_attention_backward, _expect_attention_backward,
        {"dq": DQ, "dkv": DKV, "ordered dkv": DKV},
        lambda d: 2 * 2.0 * d["H"] * d["topk"] * (5 * d["D"] + 3 * d["DR"]) * d["S"],
        lambda d: 2 * 4 * _latent_bytes(d),
    ),
    "sparse_mla_probs": Subject(
        _attention_inputs, _run_probs,
        lambda x: {"probs": sparse_mla_probs.reference(*_operands(x))}, {"probs": PROBS},
        lambda d: 2.0 * d["H"] * d["topk"] * (d["D"] + d["DR"]) * d["S"], _latent_bytes, "bf16", ONE,
    ),
}  # fmt: skip
