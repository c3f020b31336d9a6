"""For every factor and every axis of a layout: cut, copied, and who sums the copies' gradients.

The one idea: nothing is said twice. Which part a rank holds comes from the inventory's cuts, who sums from the marks of
:func:`~megatron_xorl.parallel.ownership.ownership`; this file walks from rank 0 along each axis, looks at the ranks it meets, and
reads off what the marks do to them. A copy that no reduction reaches shows as such, and so does a sum over other ranks than the
copies (:attr:`FactorOwners.sound`).

An axis of the dense grid (tp, cp, dp) and one of the expert grid (etp, ep, edp) run over the same ranks, so a factor has an
owner on both: a bank's shared factor is copied along ep, and the copies are data or tensor ranks of the dense grid.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_xorl.adapters.cuts import owned_ranges
from megatron_xorl.adapters.inventory import Factor
from megatron_xorl.config.layout import ParallelLayout, RankCoordinates, rank_coordinates
from megatron_xorl.parallel.ownership import ownership

__all__ = ["AXES", "AxisOwner", "FactorOwners", "factor_owners", "factors_by_kind"]

AXES = ("tp", "cp", "dp", "ep", "etp", "edp", "pp")
"""Axes of both grids; ``pp`` is in both."""

DENSE_SUM = "DDP"
"""Reduce-scatter (distributed optimizer) of DDP's dense buffers over the data x context group."""
EXPERT_SUM = "expert DDP"
"""The same of DDP's expert buffers over the expert-data group."""
TENSOR_SUM = "tensor sum"
"""Megatron's all-reduce over the tensor group in ``finalize_model_grads``."""


@dataclass(frozen=True, slots=True)
class AxisOwner:
    """What lies along one axis (``alone`` where it has one rank, ``cut``, ``copies``, ``both``, ``one stage``), and who sums."""

    holds: str
    by: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Table cell: ``cut``, ``DDP + tensor sum``, ``-``."""
        if self.holds == "alone":
            return "-"
        if self.holds == "copies":
            return " + ".join(self.by) or "copies"
        return f"cut; {' + '.join(self.by)}" if self.holds == "both" else self.holds


@dataclass(frozen=True, slots=True)
class FactorOwners:
    """One factor in one layout.

    Attributes:
        marks: what :func:`~megatron_xorl.parallel.ownership.ownership` writes on the parameter.
        axes: owner along each of :data:`AXES`.
        copies: ranks of a stage that hold the same part.
        summed: gradients that are summed into each of them; equal to ``copies``, or the factor's owners are wrong.
    """

    marks: dict[str, object]
    axes: dict[str, AxisOwner]
    copies: int
    summed: int

    @property
    def sound(self) -> bool:
        """Whether a trainable factor's copies are all reached and nothing else is."""
        reached = all(owner.by for owner in self.axes.values() if owner.holds in ("copies", "both"))
        return reached and self.summed == self.copies


def factor_owners(factor: Factor, layout: ParallelLayout) -> FactorOwners:
    """Return who holds and who sums ``factor`` in ``layout``; a factor that does not train is summed by nobody.

    Args:
        factor: of an inventory.
        layout: a checked layout.
    """
    marks = ownership(factor, tp=layout.tp, ep=layout.ep, etp=layout.etp)
    per_expert = factor.ep_axis is not None
    cut = 1 if factor.tp_axis is None else layout.etp if len(factor.shape) == 3 else layout.tp
    parts = cut * (layout.ep if per_expert else 1)
    reach = layout.dp * layout.cp if marks["allreduce"] else layout.edp
    summed = reach * (layout.tp if marks["sequence_parallel"] else 1) if factor.trainable else 0
    axes = {axis: _along(axis, factor, layout, marks) for axis in AXES}
    return FactorOwners(marks, axes, layout.world // layout.pp // parts, summed)


def _along(
    axis: str, factor: Factor, layout: ParallelLayout, marks: dict[str, object]
) -> AxisOwner:
    """What the ranks hold that differ from rank 0 in ``axis`` alone, and what sums the gradients of those that hold the same."""
    size = getattr(layout, axis)
    if size == 1:
        return AxisOwner("alone")
    if axis == "pp":
        return AxisOwner("one stage")
    own = rank_coordinates(layout, 0)
    peers = [rank_coordinates(layout, rank) for rank in _ranks_along(axis, layout)]
    part = owned_ranges(factor, layout, own)
    same = [peer for peer in peers if owned_ranges(factor, layout, peer) == part]
    if not same:
        return AxisOwner("cut")
    found = {step for peer in same for step in _path(peer, own, marks)} if factor.trainable else set()  # fmt: skip
    by = tuple(step for step in (DENSE_SUM, EXPERT_SUM, TENSOR_SUM) if step in found)
    return AxisOwner("copies" if len(same) == len(peers) else "both", by)


def _ranks_along(axis: str, layout: ParallelLayout) -> Iterable[int]:
    """Global ranks of stage 0 on the line through rank 0, rank 0 left out, in Megatron's order (see ``rank_coordinates``)."""
    order = ("tp", "cp", "dp") if axis in ("tp", "cp", "dp") else ("etp", "ep", "edp")
    inner = order[: order.index(axis)]
    stride = math.prod(getattr(layout, name) for name in inner)
    return range(stride, stride * getattr(layout, axis), stride)


def _path(peer: RankCoordinates, own: RankCoordinates, marks: dict[str, object]) -> Iterable[str]:
    """Reductions that a gradient passes on its way from ``peer`` to ``own``; nothing where it does not arrive."""
    across = [TENSOR_SUM] if peer.tp != own.tp else []
    if marks["allreduce"]:
        along = [DENSE_SUM] if (peer.cp, peer.dp) != (own.cp, own.dp) else []
        arrives = not across or bool(marks["sequence_parallel"])
        return along + across if arrives else ()
    return [EXPERT_SUM] if (peer.etp, peer.ep) == (own.etp, own.ep) else ()


def factors_by_kind(factors: Iterable[Factor]) -> dict[tuple[str, str, str, bool], list[Factor]]:
    """Group factors by (region, projection, side, trainable), in model order: the factors of a kind have the same owners."""
    kinds: dict[tuple[str, str, str, bool], list[Factor]] = {}
    for factor in factors:
        leaf = factor.target.rpartition(".")[2]
        kinds.setdefault((factor.region, leaf, factor.side, factor.trainable), []).append(factor)
    return kinds
