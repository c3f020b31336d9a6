"""What ``inspect`` says of a layout: the cut of the pipeline, what each stage holds, and whether the real modules agree.

The one idea: every rank of a stage holds the same amount (legal cuts are even), so one rank a stage is reported, unless a rank
is asked for. Arithmetic answers in a second without torch; :func:`add_built` builds the real specs and compares.
"""

from __future__ import annotations

import dataclasses
import logging
import resource
import time
from typing import TYPE_CHECKING, Any

from megatron_xorl.config.indexer import shown
from megatron_xorl.config.layout import (
    ParallelLayout,
    check_layout,
    rank_coordinates,
    smallest_world,
)
from megatron_xorl.config.stages import megatron_layout, pipeline_stages
from megatron_xorl.plan.rank_bytes import Held, differences, held_by, held_report
from megatron_xorl.weights.names import hf_tensors, unmatched_entries
from megatron_xorl.weights.placement import owned_experts, owned_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_xorl.config.model import GlmConfig

__all__ = [
    "add_built",
    "compare",
    "layout_for",
    "layout_report",
    "mtp_report",
    "warn_of_unmatched",
]

log = logging.getLogger(__name__)


def layout_for(
    config: GlmConfig, *, tp: int, pp: int, ep: int, etp: int, cp: int, world: int | None
) -> ParallelLayout:
    """Return a checked layout; without ``world`` the smallest that the sizes allow.

    Raises:
        LayoutError: every reason why it is not legal, with the nearest legal values.
    """
    sizes = {"tp": tp, "pp": pp, "ep": ep, "etp": etp, "cp": cp}
    if world is None:
        world = smallest_world(**{name: max(size, 1) for name, size in sizes.items()})
    layout = ParallelLayout(**sizes, world=world)
    check_layout(config, layout)
    return layout


def warn_of_unmatched(config: GlmConfig) -> None:
    """Log one warning if entries of ``modules_to_not_convert`` leave no module of the model out."""
    if entries := unmatched_entries(config):
        log.warning(
            "quantization_config.modules_to_not_convert: %d of %d entries name no module with a weight and change nothing "
            "(first: %s); a name counts from its first component or to its last",
            len(entries),
            len(config.modules_to_not_convert),
            shown(entries[0]),
        )


def mtp_report(config: GlmConfig) -> dict[str, Any]:
    """Return the MTP layers and how many tensors of the checkpoint they are."""
    first, number = config.num_hidden_layers, config.num_nextn_predict_layers
    return {
        "layers": list(range(first, first + number)),
        "tensors": sum(row.region == "mtp" for row in hf_tensors(config)),
        "trained": False,
    }


def layout_report(config: GlmConfig, layout: ParallelLayout, rank: int | None) -> dict[str, Any]:
    """Return ``layout``, ``pipeline`` (the cut) and ``per_rank``: the first rank of every stage, or ``rank`` alone.

    Raises:
        LayoutError: there is no such rank.
    """
    stages = pipeline_stages(config, layout.pp)
    alike = layout.world // layout.pp
    ranks = range(0, layout.world, alike) if rank is None else (rank,)
    return {
        "layout": dataclasses.asdict(layout) | {"dp": layout.dp, "edp": layout.edp},
        "pipeline": {
            "starts": [stage.start for stage in stages],
            "layers": [len(stage) for stage in stages],
            "layout": megatron_layout(stages),
        },
        "per_rank": [_rank_report(config, layout, one, stages, alike) for one in ranks],
    }


def _rank_report(
    config: GlmConfig, layout: ParallelLayout, rank: int, stages: tuple[range, ...], alike: int
) -> dict[str, Any]:
    where = rank_coordinates(layout, rank)
    by_region = held_by(owned_tensors(config, layout, rank), lambda owned: owned.region)
    return {
        "rank": rank,
        "stage": where.pp,
        "ranks_alike": alike,
        "coordinates": {k: v for k, v in dataclasses.asdict(where).items() if k != "rank"},
        "layers": list(stages[where.pp]),
        "experts": list(owned_experts(config, layout, where)),
        **held_report(by_region),
    }


def add_built(config: GlmConfig, layout: ParallelLayout, report: dict[str, Any]) -> tuple[str, ...]:
    """Build every rank of ``report["per_rank"]`` on meta tensors; add what its modules hold, and return what differs.

    Adds ``built`` (parameters and bytes) and ``differences`` to each rank, and ``build`` (equal or not, times, peak memory).
    """
    start = time.perf_counter()
    import torch

    from megatron_xorl.parallel.cpu import use_cpu

    if not torch.cuda.is_available():
        use_cpu()  # before Megatron is imported, which takes half as long then
    from megatron_xorl.training.meta_model import build_on_meta, model_tensors

    imported = time.perf_counter()
    faults: list[str] = []
    wide = not config.quantized and config.dtype == "float32"
    dtype = torch.float32 if wide else torch.bfloat16
    for entry in report["per_rank"]:
        model = build_on_meta(config, layout, entry["rank"], dtype=dtype)
        by_region, differ = compare(config, layout, entry["rank"], model_tensors(model))
        entry["built"], entry["differences"] = held_report(by_region), list(differ)
        faults += [f"rank {entry['rank']}: {fault}" for fault in differ]
    report["build"] = {
        "equal": not faults,
        "import_seconds": round(imported - start, 3),
        "seconds": round(time.perf_counter() - imported, 3),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    return tuple(faults)


def compare(
    config: GlmConfig, layout: ParallelLayout, rank: int, tensors: dict[str, dict[str, Tensor]]
) -> tuple[dict[str, Held], tuple[str, ...]]:
    """Return what the modules of ``rank`` hold by region, and every parameter of which arithmetic says otherwise.

    ``tensors`` is what ``training.meta_model.model_tensors`` returns.
    """
    found = {name: _held(forms) for name, forms in tensors.items()}
    owned = list(owned_tensors(config, layout, rank))
    regions = {item.megatron: item.region for item in owned}
    by_region: dict[str, Held] = {}
    for name, item in found.items():
        region = regions.get(name, "not in the name table")
        by_region[region] = by_region.get(region, Held()) + item
    return by_region, differences(held_by(owned, lambda item: item.megatron), found)


def _held(forms: dict[str, Tensor]) -> Held:
    """What one parameter of a built model holds; see ``training.meta_model.model_tensors`` for the forms."""
    weights = forms["codes"] if "codes" in forms else forms["dense"]
    size = {form: tensor.numel() * tensor.element_size() for form, tensor in forms.items()}
    if "codes" in forms:
        return Held(weights.numel(), fp8_codes=size["codes"], fp8_scales=size.get("scales", 0))
    kind = {2: "bf16", 4: "fp32"}[weights.element_size()]
    return Held(weights.numel(), **{kind: size["dense"]})
