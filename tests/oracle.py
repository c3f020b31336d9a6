"""The oracle of the base model: transformers' GlmMoeDsaForCausalLM on the dequantised weights, fp32, on CPU.

transformers cannot dequantise ragged block grids itself (it infers the block from the grid), so the
weights are dequantised here by plain indexing, written independently of ``megatron_xorl.fp8``, and
loaded strictly: nothing missing, nothing left over.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def hf_tensors_fp32(directory: Path, *, apply_scales: bool = True) -> dict[str, Tensor]:
    """Return every tensor as fp32 under its Hugging Face name, scales applied (or ignored, to see it matter)."""
    raw = json.loads((directory / "config.json").read_text())
    files: dict[str, Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(str(shard), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                files[name] = file.get_tensor(name)
    block = raw.get("quantization_config", {}).get("weight_block_size")
    result = {}
    for name, tensor in files.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.float()
        scale = files.get(name + "_scale_inv")
        if scale is not None and apply_scales:
            rows = torch.arange(value.shape[0]) // block[0]
            columns = torch.arange(value.shape[1]) // block[1]
            value = value * scale[rows][:, columns]
        result[name] = value
    return result


def raw_config(directory: Path) -> dict[str, object]:
    """Return config.json without its quantization_config, in fp32: what transformers is built from."""
    raw = json.loads((directory / "config.json").read_text())
    raw.pop("quantization_config", None)
    return raw | {"dtype": "float32"}


def hf_oracle(directory: Path, *, apply_scales: bool = True) -> torch.nn.Module:
    """Build GlmMoeDsaForCausalLM from config.json, fp32, eval mode, eager attention, with the dequantised weights."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    raw = raw_config(directory)
    config = GlmMoeDsaConfig(**raw)
    config._attn_implementation = "eager"
    model = GlmMoeDsaForCausalLM(config).float().eval()
    tensors = hf_tensors_fp32(directory, apply_scales=apply_scales)
    layers, experts = config.num_hidden_layers, config.n_routed_experts
    mtp = tuple(
        f"model.layers.{layer}."
        for layer in range(layers, layers + raw.get("num_nextn_predict_layers", 0))
    )
    state = {name: value for name, value in tensors.items() if not (mtp and name.startswith(mtp))}
    for layer in range(raw["first_k_dense_replace"], layers):
        _fuse_experts(state, f"model.layers.{layer}.mlp.experts", experts)
    model.load_state_dict(state, strict=True)
    return model


def _fuse_experts(state: dict[str, Tensor], bank: str, experts: int) -> None:
    """transformers holds a bank as gate_up_proj [E, 2I, H] (gate first) and down_proj [E, H, I]."""
    pairs = [
        torch.cat(
            [state.pop(f"{bank}.{e}.gate_proj.weight"), state.pop(f"{bank}.{e}.up_proj.weight")]
        )
        for e in range(experts)
    ]
    state[f"{bank}.gate_up_proj"] = torch.stack(pairs)
    state[f"{bank}.down_proj"] = torch.stack(
        [state.pop(f"{bank}.{e}.down_proj.weight") for e in range(experts)]
    )
