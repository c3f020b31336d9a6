"""``megatron-xorl targets CONFIG --ownership``: who holds and who sums every factor, as a document and as a table.

The one idea: a line is a kind of factor (region, projection, side), since all layers of a kind have the same owners; the document
names the factors of each. Computes nothing but that grouping; the owners come from ``parallel.ownership_table``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_xorl.display import console, table
from megatron_xorl.parallel.ownership_table import (
    AXES,
    DENSE_SUM,
    EXPERT_SUM,
    TENSOR_SUM,
    AxisOwner,
    factor_owners,
    factors_by_kind,
)

if TYPE_CHECKING:
    from megatron_xorl.adapters.inventory import Inventory
    from megatron_xorl.config.layout import ParallelLayout

__all__ = ["ownership_report", "print_ownership"]

_LEGEND = (
    f"{DENSE_SUM}: Megatron's reduction of the dense buffers over data x context; {EXPERT_SUM}: of the expert buffers over "
    f"expert data; {TENSOR_SUM}: finalize_model_grads over the tensor group",
    "cut: each rank along the axis holds another part, nothing is summed; -: the axis has one rank; one stage: no other has it",
    "copies: ranks that hold the same part; summed: gradients in the sum that each of them gets",
)


def ownership_report(inventory: Inventory, layout: ParallelLayout) -> dict[str, Any]:
    """Return ``layout`` and ``kinds``: for each kind its marks, its owner along every axis, and the names of its factors."""
    kinds = []
    for (region, leaf, side, trainable), factors in factors_by_kind(inventory.factors).items():
        owners = factor_owners(factors[0], layout)
        kinds.append(
            {
                "region": region,
                "projection": leaf,
                "side": side,
                "trainable": trainable,
                "marks": owners.marks,
                "axes": {
                    axis: {"holds": owner.holds, "by": owner.by}
                    for axis, owner in owners.axes.items()
                },
                "copies": owners.copies,
                "summed": owners.summed,
                "factors": [factor.name for factor in factors],
            }
        )
    return {
        "layout": dataclasses.asdict(layout) | {"dp": layout.dp, "edp": layout.edp},
        "kinds": kinds,
    }


def print_ownership(name: str, report: Mapping[str, Any]) -> None:
    """Print what :func:`ownership_report` returned for the model ``name``, a table a region, and what the words mean."""
    out = console()
    sizes = ", ".join(f"{axis} {size}" for axis, size in report["layout"].items())
    out.print(f"{name}: {sizes}", markup=False)
    for region in dict.fromkeys(kind["region"] for kind in report["kinds"]):
        rows = table(region, "factor", "number", *AXES, "copies", "summed")
        for kind in report["kinds"]:
            if kind["region"] == region:
                rows.add_row(
                    f"{kind['projection']} {kind['side']}",
                    str(len(kind["factors"])),
                    *(str(AxisOwner(**kind["axes"][axis])) for axis in AXES),
                    str(kind["copies"]),
                    str(kind["summed"]) if kind["trainable"] else "frozen",
                )
        out.print(rows, markup=False)
    for line in _LEGEND:
        out.print(line, markup=False, soft_wrap=True)
