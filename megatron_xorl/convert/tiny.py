"""Write a tiny GLM-5.2-FP8 checkpoint, laid out as Z.ai ships the real one.

config.json, tokenizer, sharded safetensors with index, one key per expert, e4m3 codes with fp32
``weight_scale_inv``, bf16 for the rest, an fp32 router bias, indexer tensors on ``full`` layers
alone, and an MTP layer. What a miniature usually loses is kept on purpose: the head geometry of
GLM-5.2 in units of the block (nope 1.5, rope 0.5, v 2, latent 4 blocks), so that ``kv_a_proj`` ends
in half a block, a ``kv_b_proj`` head is 3.5 blocks and its K half 1.5; neighbouring block scales
differ by 4 or more; ``index_topk`` is below a training sequence; experts differ.

Weights are random but trainable: N(0, 1/fan_in) for every projection, the head included (a 0.02-std
head caps the logits, and no loss below 0.01 exists when it is frozen), N(0, 1) for the embedding, 1
+ N(0, 0.2) for norms. Each tensor has a generator seeded by (seed, name), so the bytes do not
depend on the order of writing.

Refuses an output directory that is not empty and a block that the geometry cannot be built from.

    megatron-xorl make-tiny OUT [--seed N] [--block 128] [--size 4GiB]
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from megatron_xorl.config.model import GlmConfig, preset_dict
from megatron_xorl.convert.sized import sized_config, write_sized
from megatron_xorl.convert.tiny_tokenizer import END_TOKENS, PAD_TOKEN, special_ids, write_tokenizer
from megatron_xorl.errors import WeightsError
from megatron_xorl.fp8.format import quantize_blocks
from megatron_xorl.weights.names import TensorRow, hf_tensors
from megatron_xorl.weights.writer import write_checkpoint

__all__ = ["make_tiny", "tiny_config"]

BLOCKS = (16, 32, 64, 128)
DEFAULT_BLOCK = 32

CHECKER_RATIO = 8.0
"""Size ratio of neighbouring blocks before quantising; maxima of normals differ by 1.5 themselves, so scales by > 4."""

_AS_SHIPPED = {
    "index_topk_freq": 4,
    "index_skip_topk_offset": 2,  # with freq 4 the same schedule as indexer_types: full, full, shared, shared
    "index_topk_pattern": None,
    "ep_size": 1,
    "pretraining_tp": 1,
}
"""Keys of the shipped config.json that a reader must survive: the schedule said a second time, and two that mean nothing."""

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_tiny(
    out: Path,
    *,
    seed: int = 0,
    block: int | None = DEFAULT_BLOCK,
    shard_bytes: int | None = None,
    size: int | None = None,
) -> Path:
    """Write the checkpoint into ``out`` and return it; the same arguments write the same bytes.

    Args:
        out: new or empty directory.
        seed: of the weights.
        block: ``weight_block_size`` (square), 16, 32, 64 or 128; None writes a bf16 checkpoint of the default geometry.
        shard_bytes: largest shard; None gives about four shards, or eight with ``size``.
        size: bytes of a larger model of the same structure, with weights that are random bytes (``convert.sized``).

    Raises:
        WeightsError: ``out`` is not empty, or ``block`` is not one of the four.
        ConfigError: ``size`` is too small for the structure.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WeightsError(
            f"{out} exists and is not an empty directory; make-tiny writes into a new one"
        )
    raw = tiny_config(block)
    if size is not None:
        raw = sized_config(raw, size)
    config = GlmConfig.from_dict(raw, "make-tiny")
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(out)
    _write_json(out / "config.json", raw)
    generation = {
        "do_sample": False,
        "eos_token_id": raw["eos_token_id"],
        "pad_token_id": raw["pad_token_id"],
    }
    _write_json(out / "generation_config.json", generation)
    if size is not None:
        write_sized(out, config, seed, shard_bytes)
        return out
    tensors = tiny_tensors(config, seed)
    if shard_bytes is None:
        shard_bytes = math.ceil(sum(t.numel() * t.element_size() for t in tensors.values()) / 3.5)
    write_checkpoint(out, tensors, max_bytes=shard_bytes)
    return out


def tiny_config(block: int | None = DEFAULT_BLOCK) -> dict[str, object]:
    """Return config.json of the tiny model: the ``tiny`` preset with its head geometry in units of ``block``.

    Raises:
        WeightsError: ``block`` is not 16, 32, 64, 128 or None.
    """
    if block is not None and block not in BLOCKS:
        raise WeightsError(
            f"block {block} is not one of {list(BLOCKS)}; head sizes are whole halves of a block"
        )
    raw = dict(preset_dict("tiny"))
    raw.pop("quantization_config", None)
    raw.update(_geometry(DEFAULT_BLOCK if block is None else block))
    ids = special_ids()
    raw["eos_token_id"] = [ids[token] for token in END_TOKENS]
    raw["pad_token_id"] = ids[PAD_TOKEN]
    raw.update(_AS_SHIPPED)
    if block is not None:
        raw["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [block, block],
            "modules_to_not_convert": _unconverted(GlmConfig.from_dict(raw, "make-tiny")),
        }
    return raw


def tiny_tensors(config: GlmConfig, seed: int) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint in model order; FP8 weights as ``float8_e4m3fn`` followed by their scales."""
    tensors: dict[str, Tensor] = {}
    block = config.weight_block_size
    for row in hf_tensors(config):
        value = _draw(row, seed)
        if row.scale_name is None or block is None:
            tensors[row.hf] = value.to(_TORCH_DTYPES[row.dtype])
            continue
        codes, scales = quantize_blocks(value * _checkerboard(row.shape, block), block, name=row.hf)
        tensors[row.hf] = codes.view(torch.float8_e4m3fn)
        tensors[row.scale_name] = scales
    return tensors


def _draw(row: TensorRow, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{row.hf}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    noise = torch.randn(row.shape, generator=generator)
    if row.hf.endswith("embed_tokens.weight"):
        return noise
    if row.hf.endswith("e_score_correction_bias"):
        return 0.1 * noise  # moves choices between neighbours without shutting an expert out
    if len(row.shape) == 2:
        return noise / math.sqrt(row.shape[1])
    return 0.2 * noise + (0.0 if row.hf.endswith(".bias") else 1.0)


def _checkerboard(shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """Large and small blocks in alternation, with mean square 1 so that N(0, 1/fan_in) keeps its variance."""
    small = math.sqrt(2.0 / (1.0 + CHECKER_RATIO**2))
    rows = torch.arange(shape[0])[:, None] // block[0]
    columns = torch.arange(shape[1])[None, :] // block[1]
    return torch.where((rows + columns) % 2 == 0, CHECKER_RATIO * small, small)


def _geometry(block: int) -> dict[str, int]:
    """Sizes that keep GLM-5.2's ragged edges at this block: at 128 the real head, at 32 a quarter of it."""
    return {
        "qk_nope_head_dim": 3 * block // 2,
        "qk_rope_head_dim": block // 2,
        "qk_head_dim": 2 * block,
        "head_dim": 3 * block // 2,
        "v_head_dim": 2 * block,
        "kv_lora_rank": 4 * block,
        "index_head_dim": block,
        "hidden_size": max(128, 2 * block),
        "q_lora_rank": max(128, 2 * block),
        "moe_intermediate_size": max(128, 2 * block),
        "intermediate_size": max(256, 4 * block),
    }


def _unconverted(config: GlmConfig) -> list[str]:
    """The shipped list, its misspelt ``indexers_proj`` included: a reader must survive entries that name nothing."""
    gates = [
        row.hf.removesuffix(".weight")
        for row in hf_tensors(config)
        if row.hf.endswith("mlp.gate.weight")
    ]
    indexers = [
        f"model.layers.{layer}.self_attn.indexers_proj" for layer in config.full_indexer_layers
    ]
    return ["lm_head", "model.embed_tokens", *indexers, *gates]


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
