"""RMSNorm and LayerNorm with GLM's numerics, aware of sequence parallelism.

Megatron's torch norm refuses sequence parallelism and takes its epsilon from the config; GLM uses two epsilons (1e-5 in the
decoder, 1e-6 on the MLA latents and the indexer key), so here the call site states it. RMSNorm computes in fp32, casts back,
then multiplies by the weight, as transformers' ``GlmMoeDsaRMSNorm`` does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_xorl.layers.recompute import one_edge

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """``weight * (x / sqrt(mean(x^2) + eps))``, statistics in fp32, ``[..., hidden_size]``."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, torch.ones, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; dtype of ``x`` is kept."""
        wide = one_edge(x).float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias over the last dimension (the indexer's key norm)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(config, torch.ones, hidden_size)
        self.bias = _parameter(config, torch.zeros, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; dtype of ``x`` is kept."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def _parameter(config: TransformerConfig, fill: type, hidden_size: int) -> nn.Parameter:
    parameter = nn.Parameter(fill(hidden_size, dtype=config.params_dtype))
    # Megatron sums gradients of parameters that each tensor rank applied to its own part of the sequence.
    parameter.sequence_parallel = config.sequence_parallel
    return parameter
