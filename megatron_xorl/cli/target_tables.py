"""Tables of ``megatron-xorl targets`` for people.

The one idea: 850 targets are of a few kinds, so a line is a kind (region, projection, rank, shapes); the list of all of them is
``--json``. Prints what ``adapters.report`` found, and computes nothing but counts and layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_xorl.display import console, table

if TYPE_CHECKING:
    from megatron_xorl.adapters.inventory import Inventory
    from megatron_xorl.plan.adapter_bytes import AdapterBytes

__all__ = ["print_targets"]


def print_targets(
    name: str, inventory: Inventory, cost: Mapping[str, AdapterBytes], report: Mapping[str, Any]
) -> None:
    """Print what an adapter is on the model ``name``: by region, by kind of target, by entry, and what is left out.

    ``report`` is what ``adapters.report.target_report`` returned for ``inventory``.
    """
    out = console()
    _print_regions(name, inventory, cost)
    _print_kinds(report)
    if report["entries"]:
        rows = table("entries", "entry", "targets", "count", "rank")
        for entry in report["entries"]:
            rows.add_row(*(_cell(entry[key]) for key in ("entry", "targets", "count", "rank")))
        out.print(rows, markup=False)
    if report["layout"]["world"] > 1:
        _print_ranks(report)
    for key, title in (("left_out", "not adapted"), ("out_of_scope", "do not train")):
        if (part := report[key])["targets"]:
            regions = ", ".join(f"{region} {n}" for region, n in part["by_region"].items() if n)
            out.print(
                f"{title}: {part['targets']} ({regions}): {part['why']}",
                markup=False,
                soft_wrap=True,
            )
    never = "; ".join(report["never_adapted"].values())
    out.print(f"never adapted: {never}", markup=False, soft_wrap=True)


def _print_regions(name: str, inventory: Inventory, cost: Mapping[str, AdapterBytes]) -> None:
    totals = inventory.totals()
    counts = ("targets", "factors", "trainable_factors", "parameters")
    rows = table(
        f"adapter on {name}",
        "region",
        "targets",
        "factors",
        "train",
        "parameters",
        "share",
        "factor MB",
        "optimizer MB",
    )
    for region, count in [*totals["by_region"].items(), ("total", totals)]:
        spent = cost[region]
        if region == "total":
            rows.add_section()
        rows.add_row(
            region,
            *(f"{count[key]:,}" for key in counts),
            f"{count['parameters'] / totals['parameters']:.1%}",
            f"{spent.factors / 1e6:,.1f}",
            f"{(spent.masters + spent.moments) / 1e6:,.1f}",
        )
    console().print(rows)


def _print_kinds(report: Mapping[str, Any]) -> None:
    rows = table("targets", "region", "projection", "targets", "train", "rank", "scale", "A", "B")
    for (region, leaf, *rest), number in _kinds(report, "shapes").items():
        rows.add_row(region, leaf, str(number), *rest)
    console().print(rows, markup=False)
    if report["layout"]["world"] > 1:
        cut = table("what a rank holds of a target", "region", "projection", "rank", "A", "B")
        for region, leaf, _, rank, _, *shapes in _kinds(report, "per_rank_shapes"):
            cut.add_row(region, leaf, rank, *shapes)
        console().print(cut, markup=False)


def _kinds(report: Mapping[str, Any], shapes: str) -> Counter[tuple[str, ...]]:
    """Return how many targets share region, projection, trainability, rank, scale and both ``shapes``."""
    kinds: Counter[tuple[str, ...]] = Counter()
    for row in report["targets"]:
        leaf = row["name"].rpartition(".")[2]
        scale = "-" if row["scale"] is None else f"{row['scale']:g}"
        train = "yes" if row["trainable"] else "no"
        pair = map(str, row[shapes].values())
        kinds[(row["region"], leaf, train, str(row["rank"]), scale, *pair)] += 1
    return kinds


def _print_ranks(report: Mapping[str, Any]) -> None:
    sizes = ", ".join(f"{name} {size}" for name, size in report["layout"].items())
    rows = table(
        f"a rank of each stage ({sizes})",
        "rank",
        "layers",
        "ranks alike",
        "factors",
        "train",
        "parameters",
        "bytes",
    )
    for entry in report["per_rank"]:
        counts = ("ranks_alike", "factors", "trainable_factors", "parameters", "bytes")
        rows.add_row(
            str(entry["rank"]),
            f"{entry['layers'][0]}-{entry['layers'][-1]}",
            *(f"{entry[key]:,}" for key in counts),
        )
    console().print(rows)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)
