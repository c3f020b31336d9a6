"""Megatron's backend spec provider with our linears, norms and expert bank.

One place decides which class stands for "column-parallel linear", "norm" or "experts". A provider
is bound to one GLM config, so that the classes it returns know the FP8 block size; a module that
must stay unquantised passes ``block=None`` itself. No norm is ever fused into a linear: LoRA must
see the normalised input, and names must not depend on the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import LayoutError
from megatron_xorl.layers.experts import ExpertBank
from megatron_xorl.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron_xorl.layers.norms import LayerNorm, RMSNorm

__all__ = ["FrozenSpecProvider"]


class FrozenSpecProvider(BackendSpecProvider):
    """Provider of frozen, LoRA-aware modules for one GLM config."""

    def __init__(self, glm: GlmConfig) -> None:
        self.glm = glm

    def linear(self) -> Callable[..., ReplicatedLinear]:
        """Linear whose weight every tensor rank holds in full."""
        return partial(ReplicatedLinear, block=self.glm.weight_block_size)

    def column_parallel_linear(self) -> Callable[..., ColumnParallelLinear]:
        """Linear cut by outputs."""
        return partial(ColumnParallelLinear, block=self.glm.weight_block_size)

    def row_parallel_linear(self) -> Callable[..., RowParallelLinear]:
        """Linear cut by inputs."""
        return partial(RowParallelLinear, block=self.glm.weight_block_size)

    def fuse_layernorm_and_linear(self) -> bool:
        """Never."""
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        """No such module here."""
        return None

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type:
        """Norm that knows sequence parallelism and takes its epsilon from the call site."""
        return RMSNorm if rms_norm else LayerNorm

    def core_attention(self) -> type:
        """Refused: the sparse latent attention is one module, see ``layers.attention``."""
        raise LayoutError(
            "GLM-5.2 specs have no separate core attention; build the layer with megatron_xorl.specs"
        )

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Callable[..., ExpertBank]:
        """Bank of experts; grouped or sequential GEMM is the FP8 engine's choice, not the spec's."""
        return partial(ExpertBank, glm=self.glm)

    def activation_func(self) -> Any:
        """No separate activation module."""
        return None
