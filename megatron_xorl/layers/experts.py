"""A bank of routed experts: frozen FP8 weights with an expert axis, and shared-outer LoRA on them.

One idea (shared outer): the factor on the hidden side is one for all experts (gate/up A, down B), the factor on the
intermediate side is per expert (gate/up B, down A). The shared halves act once per token, outside the dispatch
(``layers.shared_outer``); the per-expert halves run group by group on the dispatched rows. ``once_per_token = False`` selects the
plain form, every factor on every row, which also serves where rows cannot carry further columns.

Under expert-tensor parallelism the intermediate dimension is cut: gate/up B and down A are cut with it, and the bank's output
is a partial sum that the dispatcher reduces, the adapter's part included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.fp8.linear import frozen_grouped_linear
from megatron_xorl.fp8.weight import FrozenWeight
from megatron_xorl.layers.dropout import dropped_shrink, expert_drop
from megatron_xorl.layers.host import AdapterHost
from megatron_xorl.layers.linear import buffer_device, divide
from megatron_xorl.layers.lora import LoraPair
from megatron_xorl.layers.recompute import freed, recomputed_modules
from megatron_xorl.layers.shared_outer import Outer, outer_of

__all__ = ["BankLinear", "ExpertBank"]


class BankLinear(AdapterHost):
    """Frozen grouped linear ``[E_local, out_local, in_local]`` with LoRA pairs on its output slots."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        config: TransformerConfig,
        block: tuple[int, int] | None,
        parts: int = 1,
    ) -> None:
        super().__init__(
            FrozenWeight(
                shape,
                block=block,
                dtype=config.params_dtype,
                device=buffer_device(config),
                parts=parts,
            )
        )

    def forward(
        self,
        x: Tensor,
        tokens_per_expert: list[int],
        given: Mapping[LoraPair, Tensor] | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """``[T, in]`` -> ``[T, out]``, tokens grouped by local expert.

        Args:
            x: the rows.
            tokens_per_expert: rows of each local expert.
            given: the ``x A^T`` that are known already.
            keys: int64 ``[T]``, keys of the rows' tokens; needed where a pair has a dropout.
        """
        known = given or {}

        def delta(pair: LoraPair) -> Tensor:
            t = known[pair] if pair in known else self.inner(x, pair, tokens_per_expert, keys)
            return _half(t, pair.lora_B, tokens_per_expert) * pair.scale

        return self.add_deltas(self.frozen(x, tokens_per_expert), delta)

    def inner(
        self, x: Tensor, pair: LoraPair, tokens_per_expert: list[int], keys: Tensor | None
    ) -> Tensor:
        """``x A^T`` ``[T, r]`` of what the pair's dropout leaves of x."""
        drop = expert_drop(pair, self.training, keys, tokens_per_expert)
        if drop is None:
            return _half(x, pair.lora_A, tokens_per_expert)
        return dropped_shrink(x, pair.lora_A, 1.0, drop, tokens_per_expert)

    def frozen(self, x: Tensor, tokens_per_expert: list[int]) -> Tensor:
        """``[T, in]`` -> ``[T, out]`` without any adapter."""
        return frozen_grouped_linear(x, self.base, tokens_per_expert)


def _half(x: Tensor, factor: Tensor, tokens_per_expert: list[int]) -> Tensor:
    """Apply a factor ``[1 or E, out, in]``: one product if shared, one a group if per expert."""
    if factor.shape[0] == 1 and len(tokens_per_expert) != 1:
        return F.linear(x, factor[0])
    # unbind keeps one backward node for the whole factor: experts without tokens get zeros, never None.
    return torch.cat(
        [
            F.linear(part, w)
            for part, w in zip(x.split(tokens_per_expert), factor.unbind(), strict=True)
        ]
    )


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 I]``, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class ExpertBank(nn.Module):
    """The local experts of one MoE layer, in Megatron's experts interface.

    ``linear_fc1`` holds gate|up ``[E_local, 2 I/etp, H]`` (gate rows first), ``linear_fc2`` holds down ``[E_local, H, I/etp]``.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: Any,
        glm: GlmConfig,
        name: str | None = None,
    ) -> None:
        super().__init__()
        del name
        self.config = config
        self.num_local_experts = num_local_experts
        self.once_per_token = True
        width = divide(
            glm.moe_intermediate_size,
            pg_collection.expt_tp.size(),
            "columns of the expert intermediate size",
        )
        block = glm.weight_block_size
        self.recompute_activation = "moe_act" in recomputed_modules(config)
        self.linear_fc1 = BankLinear(
            (num_local_experts, 2 * width, glm.hidden_size), config=config, block=block, parts=2
        )
        self.linear_fc2 = BankLinear(
            (num_local_experts, glm.hidden_size, width), config=config, block=block
        )

    @property
    def outer(self) -> Outer | None:
        """The shared factors that act outside the dispatch and what goes with the rows; ``None``: nothing, the plain form."""
        return outer_of(self.linear_fc1, self.linear_fc2, once_per_token=self.once_per_token)

    def forward(
        self, dispatched_input: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """``[T, H]`` -> ``[T, H]``: tokens grouped by local expert, each output weighted by its fp32 probability.

        With :attr:`outer`, rows are ``[T, H + outer.columns]`` in and out.
        """
        counts = tokens_per_expert.tolist()
        outer = self.outer
        x, given, keys = (
            (dispatched_input, None, None) if outer is None else outer.split(dispatched_input)
        )
        gate_up = self.linear_fc1(x, counts, given, keys)
        del x, given
        if self.recompute_activation and self.training:
            with freed(swiglu, gate_up) as activated:
                outputs = self._down(activated, counts, outer, keys)
        else:
            outputs = self._down(swiglu(gate_up), counts, outer, keys)
        weight = permuted_probs.unsqueeze(-1)
        y, *products = ((part * weight).to(part.dtype) for part in outputs)
        return (y if outer is None else outer.join(y, products)), None

    def _down(
        self, activated: Tensor, counts: list[int], outer: Outer | None, keys: Tensor | None
    ) -> list[Tensor]:
        """Outputs ``[T, H]``, then ``activated A_e^T`` ``[T, r]`` of every pair whose B comes after the combine."""
        if outer is None or not outer.after:
            return [self.linear_fc2(activated, counts, keys=keys)]
        products = [self.linear_fc2.inner(activated, pair, counts, keys) for pair in outer.after]
        return [self.linear_fc2.frozen(activated, counts), *products]

    def backward_dw(self) -> None:
        """Nothing: a frozen bank has no weight gradient."""
