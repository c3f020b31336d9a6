"""What Megatron's ``--recompute-granularity selective --recompute-modules …`` means in our layers.

One idea: a module's name says what is computed again in backward. ``core_attn``, ``mla_up_proj`` (``layers.attention``),
``layernorm`` (``layers.block``) and ``moe_act`` (``layers.experts``) are ours; ``mlp``, ``moe`` and ``shared_experts`` are
Megatron's, which wrap our modules whole. Every form gives the gradients of a run without it, to the bit in fp32.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

__all__ = ["one_edge", "output_discarding_checkpoint", "recomputed_modules"]


def recomputed_modules(config: TransformerConfig) -> frozenset[str]:
    """Names of the modules that are computed again in backward; none unless the granularity is selective."""
    if config.recompute_granularity != "selective":
        return frozenset()
    return frozenset(config.recompute_modules or ())


def output_discarding_checkpoint() -> CheckpointWithoutOutput:
    """Megatron's checkpoint that frees its output until backward.

    Megatron-core 0.19.2's own default, ``fp8=False``, reads as "FP8 is on" and asks Transformer Engine, which may be absent.
    """
    return CheckpointWithoutOutput(fp8=None)


def one_edge(x: Tensor) -> Tensor:
    """``x`` behind a node of its own, which sums the gradients of what follows before they go on.

    A module that uses its input several times and is sometimes a checkpoint needs this: floating-point sums depend on their
    order, and inside a checkpoint the module's terms are summed first.
    """
    return x.view_as(x)
