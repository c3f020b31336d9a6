"""Which tensors a conversion writes, in which files and in which order, decided before a byte is read.

The one idea: an output file has the tensors of one Hugging Face shard, in both forms, so that the two directions undo each other
and an interrupted run repeats one file. A plan is arithmetic on names, dtypes and shapes.

Rules of dtype: ``keep`` copies everything. ``bf16`` and ``fp32`` dequantise FP8 weights and drop their scales, and cast the other
floating tensors. ``quantize`` makes FP8 weights and scales of the weights that the format quantises. ``e_score_correction_bias``
stays fp32 whatever is asked for.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.convert.values import OutputTensor
from megatron_xorl.errors import ConfigError
from megatron_xorl.weights.checkpoint import Checkpoint
from megatron_xorl.weights.names import SCALE_SUFFIX, hf_tensors
from megatron_xorl.weights.shards import DTYPE_BYTES

__all__ = [
    "BLOCK",
    "DTYPES",
    "Options",
    "Shard",
    "header_bytes",
    "header_entries",
    "index_bytes",
    "output_config",
    "output_config_of",
    "plan_tensors",
]

DTYPES = ("keep", "bf16", "fp32")
BLOCK = (128, 128)
"""Block of a quantised output."""

_TARGETS = {"bf16": "BF16", "fp32": "F32"}
_ALWAYS_FP32 = "e_score_correction_bias"


class Options(NamedTuple):
    """What a conversion does to values: ``dtype`` keep, bf16 or fp32, or ``quantize`` to block FP8."""

    dtype: str = "keep"
    quantize: bool = False

    def check(self, config: GlmConfig) -> None:
        """Check the options against each other and the source.

        Raises:
            ConfigError: unknown dtype, both options at once, or quantising what is FP8 already.
        """
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype is {self.dtype}, expected one of {', '.join(DTYPES)}")
        if self.quantize and self.dtype != "keep":
            raise ConfigError(
                f"--quantize writes FP8 weights and cannot be combined with --dtype {self.dtype}; choose one"
            )
        if self.quantize and config.quantized:
            raise ConfigError(
                "--quantize makes FP8 of a bf16 or fp32 checkpoint, and this one is FP8 already; leave it out"
            )


class Shard(NamedTuple):
    """One Hugging Face shard: its file name, the ``__metadata__`` of its header, and names in file order.

    ``header`` is the header's text where it is not laid out as safetensors itself does, so that it can be written again.
    """

    file: str
    metadata: dict[str, str] | None
    names: tuple[str, ...]
    header: str | None = None


def plan_tensors(
    shards: list[Shard], checkpoint: Checkpoint, config: GlmConfig, options: Options
) -> tuple[list[Shard], list[list[OutputTensor]]]:
    """Return the shards of the output and the tensors of each, in file order.

    The order is the source's, or safetensors' own where dtypes change. A shard that keeps no tensor (it held scales alone, and
    they are dropped) is left out: a file without tensors is in no index.
    """
    quantizable = (
        {row.hf for row in hf_tensors(output_config_of(config, options)) if row.quantized}
        if options.quantize
        else set()
    )
    planned = [
        [
            tensor
            for name in shard.names
            for tensor in _outputs(name, checkpoint, options, quantizable)
        ]
        for shard in shards
    ]
    if options != Options():
        planned = [_file_order(tensors) for tensors in planned]
    kept = [(shard, tensors) for shard, tensors in zip(shards, planned, strict=True) if tensors]
    return [shard for shard, _ in kept], [tensors for _, tensors in kept]


def output_config_of(config: GlmConfig, options: Options) -> GlmConfig:
    """Return the configuration of the output."""
    if options.quantize:
        return dataclasses.replace(config, weight_block_size=BLOCK)
    return (
        config if options.dtype == "keep" else dataclasses.replace(config, weight_block_size=None)
    )


def output_config(raw: dict[str, Any], config: GlmConfig, options: Options) -> dict[str, Any]:
    """Return config.json of the output: the source's, with what it says of dtypes and quantisation made true."""
    result = dict(raw)
    if options.quantize:
        kept = sorted(
            row.hf.removesuffix(".weight")
            for row in hf_tensors(output_config_of(config, options))
            if not row.quantized and len(row.shape) == 2
        )
        result["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": kept,
        }
    elif options.dtype != "keep":
        result.pop("quantization_config", None)
        name = {"bf16": "bfloat16", "fp32": "float32"}[options.dtype]
        for key in ("dtype", "torch_dtype"):
            if key in result:
                result[key] = name
    return result


def _file_order(tensors: list[OutputTensor]) -> list[OutputTensor]:
    """Return tensors in the order in which safetensors lays them out: wide dtypes first, so that all are aligned."""
    return sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))


def header_bytes(tensors: list[OutputTensor], metadata: dict[str, str] | None) -> bytes:
    """Return the length and header of a safetensors file of these tensors in this order."""
    document = header_entries(tensors, metadata)
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_entries(tensors: list[OutputTensor], metadata: dict[str, str] | None) -> dict[str, Any]:
    """Return what the header of a safetensors file of these tensors in this order says."""
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end := end + tensor.nbytes],
        }
    return document


def index_bytes(
    shards: list[Shard], planned: list[list[OutputTensor]], metadata: dict[str, Any]
) -> bytes:
    """Return a safetensors index: the source's metadata with the true total, names sorted."""
    total = sum(tensor.nbytes for tensors in planned for tensor in tensors)
    weight_map = {
        tensor.name: shard.file
        for shard, tensors in zip(shards, planned, strict=True)
        for tensor in tensors
    }
    document = {
        "metadata": {**metadata, "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def _outputs(
    name: str, checkpoint: Checkpoint, options: Options, quantizable: set[str]
) -> list[OutputTensor]:
    entry = checkpoint.entry(name)
    if name in quantizable:
        from megatron_xorl.fp8.format import block_grid  # takes torch, which copying needs not

        grid = block_grid(entry.shape, BLOCK)
        return [
            OutputTensor(name, "F8_E4M3", entry.shape, "codes", name),
            OutputTensor(name + SCALE_SUFFIX, "F32", grid, "scales", name),
        ]
    target = _TARGETS.get(options.dtype, entry.dtype)
    if options.dtype == "keep" or options.quantize:
        return [OutputTensor(name, entry.dtype, entry.shape, "copy", name)]
    if name.endswith(SCALE_SUFFIX):
        return []
    if name.endswith(_ALWAYS_FP32):
        target = "F32"
    if entry.dtype == "F8_E4M3":
        return [OutputTensor(name, target, entry.shape, "dequantize", name)]
    recipe = "copy" if target == entry.dtype else "cast"
    return [OutputTensor(name, target, entry.shape, recipe, name)]
