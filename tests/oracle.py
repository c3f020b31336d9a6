"""The oracle of the base model: transformers' GlmMoeDsaForCausalLM on the dequantised weights, fp32, on CPU.

transformers cannot dequantise ragged block grids itself (it infers the block from the grid), so the
weights are dequantised here by plain indexing, written independently of ``megatron_xorl.fp8``, and
loaded strictly: nothing missing, nothing left over.

transformers computes norms, softmax, index scores and routes in fp32 whatever the dtype of its weights, so a model
cast to fp64 still rounds as fp32. :class:`InFp64` widens every such cast while transformers' own code is built and
run: what fp32 implementations, transformers' included, are to be judged by.
"""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode


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


def hf_oracle(directory: Path, *, apply_scales: bool = True, wide: bool = False) -> torch.nn.Module:
    """Build GlmMoeDsaForCausalLM from config.json, fp32, eval mode, eager attention, with the dequantised weights.

    ``wide`` builds and runs it in fp64 throughout, rope frequencies included.
    """
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    raw = raw_config(directory)
    config = GlmMoeDsaConfig(**raw)
    config._attn_implementation = "eager"
    if wide:
        config._experts_implementation = "eager"  # the grouped product has no fp64
    with InFp64() if wide else nullcontext():
        model = GlmMoeDsaForCausalLM(config).float().eval()
    tensors = hf_tensors_fp32(directory, apply_scales=apply_scales)
    layers, experts = config.num_hidden_layers, config.n_routed_experts
    mtp = tuple(
        f"model.layers.{layer}."
        for layer in range(layers, layers + (raw.get("num_nextn_predict_layers") or 0))
    )
    state = {name: value for name, value in tensors.items() if not (mtp and name.startswith(mtp))}
    for layer, kind in enumerate(config.mlp_layer_types):
        if kind == "sparse":
            _fuse_experts(state, f"model.layers.{layer}.mlp.experts", experts)
    model.load_state_dict(state, strict=True)
    if wide:
        model.forward = _under_fp64(model.forward)
    return model


def _under_fp64(forward: Any) -> Any:
    def wide(*given: Any, **named: Any) -> Any:
        with InFp64():
            return forward(*given, **named)

    return wide


class InFp64(TorchFunctionMode):
    """Within it, what asks for fp32 gets fp64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Widen ``.float()`` and every fp32 dtype argument."""
        del types
        if func is Tensor.float:
            return args[0].double()
        widened = [torch.float64 if item is torch.float32 else item for item in args]
        named = {
            key: torch.float64 if item is torch.float32 else item
            for key, item in (kwargs or {}).items()
        }
        return func(*widened, **named)


def hf_oracle_bf16(oracle: torch.nn.Module) -> torch.nn.Module:
    """Copy an fp32 oracle to bf16 as ``from_pretrained`` would load it: buffers (rope frequencies, router bias) stay fp32."""
    model = copy.deepcopy(oracle)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.bfloat16()
    for name, buffer in kept.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, buffer)
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
