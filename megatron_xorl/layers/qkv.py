"""A fused query-key-value linear of standard attention, with independent adapters for q, k and v.

One idea: Megatron keeps the three projections in one weight, interleaved by query group so that a tensor rank holds whole groups,

    [q heads of group 0 | k 0 | v 0 | q heads of group 1 | k 1 | v 1 | …]      ng * (np/ng + 2) * hn rows,

while ``q_proj``, ``k_proj`` and ``v_proj`` are what checkpoints and adapter files know. Group by group the rows of each stand in
their own order, so B of a projection is cut where its base is cut and never permuted: one frozen product, then for each adapted
projection one rank-r product and its B added to the groups' rows.

A stand-in for ``linear_qkv`` of Megatron's ``SelfAttention``, for models of one's own (GLM-5.2 has latent attention and no such
weight)::

    spec = SelfAttentionSubmodules(linear_qkv=partial(FusedQKVLinear, block=None), …)
    attention.linear_qkv.set_projections({"q_proj": wq, "k_proj": wk, "v_proj": wv})
    attention.linear_qkv.adapt("model.layers.0.self_attn", mx.AdapterConfig(rank=8, alpha=16), leaves=("q_proj", "v_proj"))

Refused: biases, gated attention, fewer query groups than tensor ranks, FP8 blocks that a head's rows do not fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_xorl.adapters.available import check_available
from megatron_xorl.adapters.inventory import projection_factors
from megatron_xorl.adapters.projections import Projection
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError, FormatError, LayoutError
from megatron_xorl.layers.attach import build_pair
from megatron_xorl.layers.host import Rows
from megatron_xorl.layers.linear import ColumnParallelLinear, divide
from megatron_xorl.layers.lora import FactorSlice

__all__ = ["LEAVES", "FusedQKVLinear"]

LEAVES = ("q_proj", "k_proj", "v_proj")


class FusedQKVLinear(ColumnParallelLinear):
    """Frozen ``linear_qkv``: ``[s/tp, b, h]`` -> ``([s, b, (np + 2 ng) hn / tp], None)`` in Megatron's row order.

    Args:
        input_size: h.
        output_size: ``(num_attention_heads + 2 * num_query_groups) * kv_channels`` of ``config``.
        config: Megatron's.
        block: FP8 block ``(rows, columns)``, or None for a dense base.
        tp_group: group that the query groups are cut over; the tensor group by default.
        bias: must be False.

    Raises:
        LayoutError: the sizes do not fit each other or the tensor group; a bias or an output gate is asked for.
        FormatError: ``kv_channels`` is not a multiple of the block's rows.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        block: tuple[int, int] | None,
        tp_group: dist.ProcessGroup | None = None,
        bias: bool = False,
        **_megatron: Any,
    ) -> None:
        group = (
            tp_group if tp_group is not None else parallel_state.get_tensor_model_parallel_group()
        )
        _check(config, output_size, block, bias)
        groups = divide(config.num_query_groups, group.size(), "query groups")
        super().__init__(input_size, output_size, config=config, block=block, tp_group=group)
        self.groups = groups
        head = config.kv_channels
        queries = config.num_attention_heads // config.num_query_groups * head
        self.heights = dict(zip(LEAVES, (queries, head, head), strict=True))

    @property
    def leaves(self) -> tuple[str, ...]:
        """``q_proj``, ``k_proj``, ``v_proj``."""
        return LEAVES

    def rows_of(self, leaf: str) -> Rows:
        """One range for each local query group."""
        stride = sum(self.heights.values())
        first = sum(self.heights[one] for one in LEAVES[: LEAVES.index(leaf)])
        starts = range(first, first + self.groups * stride, stride)
        return tuple(slice(start, start + self.heights[leaf]) for start in starts)

    def set_projections(
        self, weights: Mapping[str, Tensor], scales: Mapping[str, Tensor] | None = None
    ) -> None:
        """Hold this rank's groups of separate projections.

        Args:
            weights: by leaf, in full and in Hugging Face's row order: q ``[np * hn, h]``, k and v ``[ng * hn, h]``; with
                ``scales`` e4m3 codes, as float8 or uint8.
            scales: fp32 block scales of each, on block grids of their own.

        Raises:
            AdapterError: a projection is missing or has another shape.
            FormatError: the scales are not those of the block in use.
        """
        groups = self.groups * self.tp_group.size()
        for leaf, height in self.heights.items():
            wanted = (groups * height, self.base.shape[1])
            found = tuple(weights[leaf].shape) if leaf in weights else None
            if found != wanted:
                raise AdapterError(
                    f"{leaf} is {found or 'missing'}, the fused weight needs {wanted}; give all three, in full"
                )
        if scales is None:
            self.base.set_dense(self._interleaved(weights))
            return
        if self.base.block is None:
            raise FormatError(
                "block scales were given to a linear that was built with block=None; build it with the checkpoint's block"
            )
        codes = {leaf: weight.view(torch.uint8) for leaf, weight in weights.items()}
        self.base.set_quantized(self._interleaved(codes), self._interleaved(scales), self.base.block)  # fmt: skip

    def _interleaved(self, parts: Mapping[str, Tensor]) -> Tensor:
        """This rank's groups, from q, k and v whose rows (of weights or of block scales) are each cut evenly into groups."""
        groups, rank = self.groups * self.tp_group.size(), self.tp_group.rank()
        own = slice(rank * self.groups, (rank + 1) * self.groups)
        grouped = [parts[leaf].unflatten(0, (groups, -1))[own] for leaf in LEAVES]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def adapt(
        self,
        prefix: str,
        adapter: AdapterConfig,
        leaves: Iterable[str] = LEAVES,
        *,
        seed: int = 1234,
    ) -> None:
        """Attach fresh factors, all of which train, to some of the projections.

        Args:
            prefix: logical name of the attention, e.g. ``model.layers.3.self_attn``; A is drawn from ``{prefix}.q_proj.lora_A`` …
            adapter: rank and scale are those of its attention region; its targets and scope are not read.
            leaves: of :data:`LEAVES`.
            seed: of A.

        Raises:
            AdapterError: a leaf is not one of the three, or carries factors already; the configuration has a dropout.
        """
        check_available(adapter)
        if adapter.dropout:
            raise AdapterError(
                f"{prefix}: dropout is {adapter.dropout:g}, and a model of one's own tells its layers no samples; set dropout: 0"
            )
        rank, dtype = adapter.rank_for("attention"), str(self.base.dtype).removeprefix("torch.")
        groups = self.groups * self.tp_group.size()
        for leaf in leaves:
            if leaf not in LEAVES or leaf in self.adapters:
                reason = "carries factors already" if leaf in self.adapters else "is no projection of this weight"  # fmt: skip
                raise AdapterError(f"{prefix}.{leaf} {reason}; adapt each of {', '.join(LEAVES)} at most once")  # fmt: skip
            target = Projection(
                f"{prefix}.{leaf}", "attention", None, self.base.shape[1], groups * self.heights[leaf], 0, "column"
            )  # fmt: skip
            place = (self.tp_group.rank(), self.tp_group.size())
            a, b = (
                FactorSlice(factor, place, (0, 1))
                for factor in projection_factors(target, rank, dtype, True)
            )
            self.attach(leaf, build_pair(self, a, b, scale=adapter.scale_of(rank), seed=seed))


def _check(
    config: TransformerConfig, output_size: int, block: tuple[int, int] | None, bias: bool
) -> None:
    head = config.kv_channels
    wanted = (config.num_attention_heads + 2 * config.num_query_groups) * head
    if output_size != wanted or config.num_attention_heads % config.num_query_groups:
        raise LayoutError(
            f"a fused query-key-value weight of {config.num_attention_heads} heads in {config.num_query_groups} groups of {head} "
            f"channels has {wanted} rows, {output_size} were asked for; check num_query_groups and kv_channels"
        )
    if bias or config.attention_output_gate:
        what = "a bias" if bias else "attention_output_gate"
        raise LayoutError(f"{what} was asked for; this frozen linear has query, key and value rows and nothing else")  # fmt: skip
    if block is not None and head % block[0]:
        raise FormatError(
            f"FP8 blocks have {block[0]} rows and a head has {head}, so blocks would cross from q into k and v, unlike the "
            "checkpoint's; keep q, k and v in linears of their own, or use a BF16 base"
        )
