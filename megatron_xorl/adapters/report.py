"""What ``megatron-xorl targets`` says of an adapter configuration beside its factors.

The one idea: for each target, who asked for it (the entry), at which rank and scale, whether it trains, and what a rank of a
layout holds of both factors; and for each projection that is missing from the list, why. Every rank of a stage holds equal shapes
(legal cuts are even), so a target has one local shape and a stage one count. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron_xorl.adapters.cuts import owned_ranges, range_lengths
from megatron_xorl.adapters.inventory import DTYPE_BYTES, Factor, Inventory
from megatron_xorl.adapters.projections import Projection, projections
from megatron_xorl.adapters.scopes import REGIONS, scope_regions
from megatron_xorl.adapters.suggest import NEVER_ADAPTED
from megatron_xorl.adapters.targets import Selection, match_targets
from megatron_xorl.config.adapter import AdapterConfig, TargetEntry
from megatron_xorl.config.layout import ParallelLayout, check_layout, rank_coordinates
from megatron_xorl.config.model import GlmConfig
from megatron_xorl.config.stages import pipeline_stages

__all__ = ["target_report"]


def target_report(
    config: GlmConfig,
    adapter: AdapterConfig,
    inventory: Inventory,
    layout: ParallelLayout | None = None,
    *,
    scaled: bool = True,
) -> dict[str, Any]:
    """Describe what ``adapter`` builds on ``config``, target by target.

    Args:
        config: the model.
        adapter: the adapter configuration.
        inventory: what ``build_inventory`` made of the two.
        layout: what the factors are cut for; one process if not given.
        scaled: whether ``adapter.alpha`` means anything; ``scale`` is None if not.

    Returns:
        JSON values: ``targets`` (a row a target), ``entries`` (what each list entry took), ``layout``, ``per_rank`` (the first
        rank of every stage), ``left_out``, ``out_of_scope`` and ``never_adapted``.

    Raises:
        LayoutError: the layout is not legal for the model.
        TargetError: a target entry is wrong.
    """
    layout = layout or ParallelLayout()
    check_layout(config, layout)
    listed = projections(config)
    chosen = match_targets(listed, adapter.lora_target_modules)
    local = _local_shapes(inventory, layout)
    stage_of = _stage_finder(config, layout)
    rows = [
        _row(adapter, chosen, projection, pair, local, stage_of, scaled)
        for projection, pair in _pairs(chosen.targets, inventory)
    ]
    return {
        "targets": rows,
        "entries": _entries(adapter, chosen),
        "layout": dataclasses.asdict(layout) | {"dp": layout.dp, "edp": layout.edp},
        "per_rank": _per_rank(config, inventory, layout, local, rows),
        "left_out": _left_out(listed, chosen),
        "out_of_scope": _out_of_scope(adapter, chosen),
        "never_adapted": dict(NEVER_ADAPTED),
    }


def _local_shapes(inventory: Inventory, layout: ParallelLayout) -> dict[str, tuple[int, ...]]:
    where = rank_coordinates(layout, 0)
    return {
        factor.name: range_lengths(owned_ranges(factor, layout, where))
        for factor in inventory.factors
    }


def _stage_finder(config: GlmConfig, layout: ParallelLayout) -> Callable[[int | None], int]:
    """Return the function from a layer (None: the head) to its pipeline stage."""
    stages = pipeline_stages(config, layout.pp)
    by_layer = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    return lambda layer: len(stages) - 1 if layer is None else by_layer[layer]


def _pairs(
    targets: Sequence[Projection], inventory: Inventory
) -> Iterable[tuple[Projection, tuple[Factor, Factor]]]:
    """Yield each target that is built, with its two factors."""
    for target in targets:
        a = inventory.by_name.get(f"{target.name}.lora_A")
        if a is not None:
            yield target, (a, inventory.by_name[f"{target.name}.lora_B"])


def _row(
    adapter: AdapterConfig,
    chosen: Selection,
    target: Projection,
    pair: tuple[Factor, Factor],
    local: dict[str, tuple[int, ...]],
    stage_of: Callable[[int | None], int],
    scaled: bool,
) -> dict[str, Any]:
    rank = pair[0].rank
    return {
        "name": target.name,
        "region": target.region,
        "layer": target.layer,
        "parallel": target.parallel,
        "experts": target.num_experts,
        "entry": chosen.matched_by.get(target.name),
        "rank": rank,
        "rank_from": "entry" if target.name in chosen.ranks else "region",
        "scale": adapter.scale_of(rank) if scaled else None,
        "trainable": pair[0].trainable,
        "stage": stage_of(target.layer),
        "shapes": {factor.side: list(factor.shape) for factor in pair},
        "per_rank_shapes": {factor.side: list(local[factor.name]) for factor in pair},
    }


def _entries(adapter: AdapterConfig, chosen: Selection) -> list[dict[str, Any]]:
    promised = {
        entry.pattern: entry
        for entry in adapter.lora_target_modules or ()
        if isinstance(entry, TargetEntry)
    }
    return [
        {
            "entry": pattern,
            "targets": taken,
            "count": promised[pattern].count if pattern in promised else None,
            "rank": promised[pattern].rank if pattern in promised else None,
        }
        for pattern, taken in chosen.counts.items()
    ]


def _per_rank(
    config: GlmConfig,
    inventory: Inventory,
    layout: ParallelLayout,
    local: dict[str, tuple[int, ...]],
    rows: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """What the first rank of every stage holds of the factors; the other ranks of the stage hold as much."""
    stages = pipeline_stages(config, layout.pp)
    alike = layout.world // layout.pp
    held = [
        {
            "rank": stage * alike,
            "stage": stage,
            "ranks_alike": alike,
            "layers": list(layers),
            "factors": 0,
            "trainable_factors": 0,
            "parameters": 0,
            "bytes": 0,
        }
        for stage, layers in enumerate(stages)
    ]
    stage_of = {row["name"]: row["stage"] for row in rows}
    for factor in inventory.factors:
        entry = held[stage_of[factor.target]]
        size = math.prod(local[factor.name])
        entry["factors"] += 1
        entry["trainable_factors"] += factor.trainable
        entry["parameters"] += size
        entry["bytes"] += size * DTYPE_BYTES[factor.dtype]
    return held


def _left_out(listed: Sequence[Projection], chosen: Selection) -> dict[str, Any]:
    taken = {target.name for target in chosen.targets}
    missing = [item for item in listed if item.name not in taken]
    return {
        "targets": len(missing),
        "by_region": _by_region(missing),
        "names": [item.name for item in missing],
        "why": "no entry of lora_target_modules takes them" if missing else None,
    }


def _out_of_scope(adapter: AdapterConfig, chosen: Selection) -> dict[str, Any]:
    training = scope_regions(adapter.glm52_lora_scope)
    outside = [target for target in chosen.targets if target.region not in training]
    built = adapter.frozen_factors == "keep"
    form = (
        "frozen_factors: keep builds them with B zero"
        if built
        else "frozen_factors: drop does not build them"
    )
    return {
        "targets": len(outside),
        "by_region": _by_region(outside),
        "built": built,
        "why": f"scope {adapter.glm52_lora_scope} trains {', '.join(training)} alone; {form}"
        if outside
        else None,
    }


def _by_region(found: Sequence[Projection]) -> dict[str, int]:
    return {region: sum(item.region == region for item in found) for region in REGIONS}
