"""A checkpoint of the tiny model's structure and any size: what conversions are timed and killed on.

The one idea: the tiny configuration with wider layers and more experts until the size is reached, and weights that cost no more
than random bytes: FP8 codes are bytes with one exponent bit cleared (no NaN, below 2 in magnitude), bf16 values are random signs
and mantissas under one exponent. They are finite and of a usable size, but nothing can be learnt from such a model.

Each tensor is drawn from (seed, name), a shard is written at a time, and memory does not depend on the size.

    megatron-xorl make-tiny OUT --size 4GiB
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.convert.files import OutputFile
from megatron_xorl.convert.plan import Shard, header_bytes, index_bytes
from megatron_xorl.convert.values import OutputTensor
from megatron_xorl.errors import ConfigError
from megatron_xorl.weights.names import TensorRow, hf_tensors
from megatron_xorl.weights.shards import DTYPE_BYTES
from megatron_xorl.weights.writer import INDEX_NAME, plan_shards

__all__ = ["parse_size", "sized_config", "write_sized"]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)}

_WIDTHS = (4096, 2048, 1024, 512, 256)
_FEWEST_EXPERTS = 32
_SHARDS = 8
_LARGEST_SHARD = 5 * 10**9
_DTYPES = {"fp8": "F8_E4M3", "bf16": "BF16", "fp32": "F32"}
_PIECE = 2**23  # bytes drawn at a time; a multiple of every element


def parse_size(text: str) -> int:
    """Return bytes of ``4GiB``, ``500 MB`` or ``123456``.

    Raises:
        ConfigError: it is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if not found or found[2].lower() not in units or float(found[1]) <= 0:
        raise ConfigError(f"size {text!r} is not a number of bytes; write it as 4GiB or 500MB")
    return int(float(found[1]) * units[found[2].lower()])


def sized_config(raw: dict[str, Any], size: int) -> dict[str, Any]:
    """Return ``raw`` with wider layers and more experts, so that a checkpoint has ``size`` bytes or a little more.

    Raises:
        ConfigError: the smallest model of this structure is larger.
    """
    for width in _WIDTHS:
        wide = raw | {
            "hidden_size": width,
            "q_lora_rank": width // 2,
            "moe_intermediate_size": width // 2,
            "intermediate_size": width,
        }
        few, more = (_bytes(wide | {"n_routed_experts": n}) for n in (8, 16))
        experts = 8 + 8 * math.ceil(max(0, size - few) / (more - few))
        if few <= size and (experts >= _FEWEST_EXPERTS or width == _WIDTHS[-1]):
            return wide | {"n_routed_experts": experts}
    raise ConfigError(
        f"a size of {size} bytes is too small for this structure, which needs {few}; ask for more, or leave --size out"
    )


def write_sized(out: Path, config: GlmConfig, seed: int, max_bytes: int | None) -> None:
    """Write the shards and then the index of a checkpoint of ``config`` into ``out``."""
    tensors, rows = _tensors(config)
    total = sum(tensor.nbytes for tensor in tensors.values())
    limit = max_bytes or min(_LARGEST_SHARD, math.ceil(total / _SHARDS))
    groups = plan_shards({name: tensor.nbytes for name, tensor in tensors.items()}, limit)
    shards, planned = [], []
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        order = sorted(names, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
        held = [tensors[name] for name in order]
        with OutputFile(out / file, hashed=False) as output:
            output.write(header_bytes(held, {"format": "pt"}))
            for tensor in held:
                for piece in _draw(tensor, rows[tensor.source], seed):
                    output.write(piece)
            output.publish()
        shards.append(Shard(file, {"format": "pt"}, tuple(order)))
        planned.append(held)
    with OutputFile(out / INDEX_NAME, hashed=False) as output:
        output.write(index_bytes(shards, planned, {}))
        output.publish()


def _bytes(raw: dict[str, Any]) -> int:
    tensors, _ = _tensors(GlmConfig.from_dict(raw, "make-tiny"))
    return sum(tensor.nbytes for tensor in tensors.values())


def _tensors(config: GlmConfig) -> tuple[dict[str, OutputTensor], dict[str, TensorRow]]:
    tensors: dict[str, OutputTensor] = {}
    rows = {}
    for row in hf_tensors(config):
        rows[row.hf] = row
        tensors[row.hf] = OutputTensor(row.hf, _DTYPES[row.dtype], row.shape, "draw", row.hf)
        if row.scale_name is not None and row.scale_shape is not None:
            tensors[row.scale_name] = OutputTensor(
                row.scale_name, "F32", row.scale_shape, "draw", row.hf
            )
    return tensors, rows


def _draw(tensor: OutputTensor, row: TensorRow, seed: int) -> Iterator[memoryview]:
    digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
    generator = np.random.SFC64(int.from_bytes(digest[:16], "little"))
    size = 1.0 / math.sqrt(row.shape[1]) if len(row.shape) == 2 else 1.0
    left = tensor.nbytes
    while left:
        piece = min(left, _PIECE)
        words = generator.random_raw(-(-piece // 8)).astype(np.uint64, copy=False)
        yield memoryview(_values(tensor.dtype, words, size).view(np.uint8)[:piece])
        left -= piece


def _values(dtype: str, words: np.ndarray, size: float) -> np.ndarray:
    """Make finite values of random words; ``size`` is their magnitude, to a factor of two."""
    if dtype == "F8_E4M3":
        return words & np.uint64(0xBFBFBFBFBFBFBFBF)  # without the top exponent bit: never NaN
    if dtype == "BF16":
        exponent = (127 + round(math.log2(size))) << 7
        mantissa = words & np.uint64(0x807F807F807F807F if size < 1 else 0x007F007F007F007F)
        return mantissa | np.uint64(exponent * 0x0001000100010001)
    # fp32: scales of FP8 weights and the router's bias; between one and two times the magnitude
    uniform = words.view(np.uint32).astype(np.float32) / np.float32(2**32)
    return ((1 + uniform) * np.float32(size)).astype(np.float32)
