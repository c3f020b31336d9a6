"""Who reduces which gradient: one table for every kind of factor.

Each reduction axis of each factor has exactly one owner, and every owner is Megatron's: the data-parallel reduction of DDP
(dense or expert buffers, chosen by ``allreduce``) and the tensor-group sum of ``finalize_model_grads`` (chosen by
``sequence_parallel``). No autograd hook and no extra all-reduce exists.

| factor | allreduce | sequence_parallel | cut |
|---|---|---|---|
| ordinary, cut over the tensor group | yes (DP x CP) | no: its gradient is complete | tp axis |
| ordinary, replicated | yes (DP x CP) | yes at TP > 1: each rank saw other tokens or rows | none |
| bank, shared by all experts | yes (DP x CP) | yes at TP > 1: with it DP x CP covers every rank once | none |
| bank, per expert | no when EP > 1 or ETP != TP (expert-DP), else yes | no | experts over EP, width over ETP |

What follows from it for every axis of a layout: ``parallel.ownership_table``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_xorl.adapters.inventory import Factor

if TYPE_CHECKING:
    from torch import nn

__all__ = ["mark_ownership", "ownership"]


def ownership(factor: Factor, *, tp: int, ep: int, etp: int) -> dict[str, Any]:
    """Megatron parameter attributes that give every reduction axis of ``factor`` its one owner."""
    per_expert = factor.ep_axis is not None
    cut = factor.tp_axis is not None and (etp if per_expert else tp) > 1
    return {
        "allreduce": not (per_expert and (ep > 1 or etp != tp)),
        "sequence_parallel": tp > 1 and not per_expert and not cut,
        "tensor_model_parallel": per_expert or cut,
        "partition_dim": factor.tp_axis if cut else -1,
        "partition_stride": 1,
    }


def mark_ownership(parameter: nn.Parameter, factor: Factor, *, tp: int, ep: int, etp: int) -> None:
    """Write the attributes of :func:`ownership` on a parameter."""
    for name, value in ownership(factor, tp=tp, ep=ep, etp=etp).items():
        setattr(parameter, name, value)
