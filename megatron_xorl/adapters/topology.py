"""The projection topology as a page: per projection its base in Megatron, its logical factors, its keys in each file format.

The one idea: the page is computed from the inventory and the formats' own tables, on the shipped GLM-5.2 configuration, so that
it cannot say anything else than the code does; a test compares it with ``docs/projection-topology.md``.

CPU command, which writes the page::

    python -m megatron_xorl.adapters.topology > docs/projection-topology.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from megatron_xorl.adapters.formats import FORMATS, Entry, file_entries, file_size
from megatron_xorl.adapters.inventory import Factor, Inventory, build_inventory
from megatron_xorl.adapters.projections import Projection, projections
from megatron_xorl.adapters.scopes import REGIONS, SCOPES
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import GlmConfig, load_glm_config

__all__ = ["topology_page"]

MODEL, RANK = "glm-5.2", 64

_CUTS = {
    "replicated": "replicated: every tensor rank holds it",
    "column": "column: output rows cut over the tensor ranks",
    "row": "row: input columns cut over the tensor ranks",
    "vocab": "vocabulary rows cut over the tensor ranks",
}
_FUSED_LEAVES = ("gate_proj", "up_proj")

_HEAD = """# Projection topology

Which projections an adapter can stand on, how Megatron holds their base, which logical factors they have, how each file format
spells those, and what each scope takes. This page is printed by `python -m megatron_xorl.adapters.topology` from the code that
trains and writes adapters, for GLM-5.2 at rank 64; a test compares the two. {L} is a layer, {e} an expert."""


def topology_page() -> str:
    """Return the page, Markdown."""
    config = load_glm_config(MODEL)
    inventory = build_inventory(config, AdapterConfig(rank=RANK, alpha=RANK))
    parts = [_HEAD, *_bases(config), *_factors(config, inventory), *_keys(inventory)]
    parts += [*_scopes(config), *_sizes(inventory)]
    return "\n".join(parts).rstrip() + "\n"


def _examples(config: GlmConfig) -> list[Projection]:
    """One projection of each kind, in model order."""
    found: dict[tuple[str, str], Projection] = {}
    for projection in projections(config):
        found.setdefault((projection.region, projection.leaf), projection)
    return sorted(found.values(), key=lambda item: REGIONS.index(item.region))


def _general(name: str) -> str:
    """A name with its layer and expert left open."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            parts[place] = "{e}" if parts[place - 1] == "experts" else "{L}"
    return ".".join(parts)


def _bases(config: GlmConfig) -> Iterator[str]:
    counts: dict[tuple[str, str], int] = {}
    for projection in projections(config):
        key = (projection.region, projection.leaf)
        counts[key] = counts.get(key, 0) + 1
    yield "\n## The base of each projection\n"
    yield "| region | projection | in Megatron | tensor parallel | how many |"
    yield "|---|---|---|---|---:|"
    for item in _examples(config):
        held = "a matrix of its own"
        if item.leaf in _FUSED_LEAVES:
            held = "fused: gate above up in one matrix"
        if item.num_experts:
            held = f"banked: {item.num_experts} experts" + (
                ", gate above up in each" if item.leaf in _FUSED_LEAVES else ""
            )
        cut = _CUTS[item.parallel].replace(
            "tensor", "expert tensor" if item.num_experts else "tensor"
        )
        if item.num_experts:
            cut += "; experts over the expert ranks"
        yield f"| {item.region} | `{_general(item.name)}` | {held} | {cut} | {counts[item.region, item.leaf]} |"


def _factors(config: GlmConfig, inventory: Inventory) -> Iterator[str]:
    yield "\n## The logical factors\n"
    yield "The delta of a projection is scale · B(A x). A bank has an expert axis first, of size 1 where all share a factor.\n"
    yield "| projection | A | B | shared by the experts |"
    yield "|---|---|---|---|"
    for item in _examples(config):
        pair = [inventory.by_name[f"{item.name}.lora_{side}"] for side in "AB"]
        shared = " and ".join(factor.side for factor in pair if factor.shared) or "-"
        shapes = " | ".join(f"`{list(factor.shape)}`" for factor in pair)
        yield f"| `{_general(item.name)}` | {shapes} | {shared} |"


def _keys(inventory: Inventory) -> Iterator[str]:
    tables = {format: _by_source(inventory.factors, format) for format in FORMATS}
    kinds: dict[str, Factor] = {}
    for factor in inventory.factors:
        kinds.setdefault(_kind(factor), factor)  # A comes before B
    shown = sorted(kinds.values(), key=lambda item: REGIONS.index(item.region))
    yield "\n## The keys in each file format\n"
    yield "All begin with `base_model.model.` and end in `.lora_A.weight` or `.lora_B.weight`.\n"
    yield f"| projection | {' | '.join(f'`{format}`' for format in FORMATS)} |"
    yield f"|---|{'---|' * len(FORMATS)}"
    for item in shown:
        keys = [f"`{_general(_module(tables[format][item.name].key))}`" for format in FORMATS]
        own = f"`{_general(item.target)}`"
        yield f"| {own} | {' | '.join('its own name' if key == own else key for key in keys)} |"
    yield "\nThe tensors of a bank, A and B:\n"
    yield f"| projection | {' | '.join(f'`{format}`' for format in FORMATS)} |"
    yield f"|---|{'---|' * len(FORMATS)}"
    for item in shown:
        if item.region == "routed_experts":
            cells = [_shapes(tables[format], item) for format in FORMATS]
            yield f"| `{_general(item.target)}` | {' | '.join(cells)} |"


def _module(key: str) -> str:
    return key.removeprefix("base_model.model.").rpartition(".lora_")[0]


def _shapes(table: dict[str, Entry], a: Factor) -> str:
    pair = (table[a.name], table[a.name.removesuffix("A") + "B"])
    return ", ".join(f"`{list(entry.shape)}`" for entry in pair)


def _by_source(factors: Sequence[Factor], format: str) -> dict[str, Entry]:
    """The first tensor of a file that holds each factor."""
    found: dict[str, Entry] = {}
    for entry in file_entries(factors, format):
        for name in entry.sources:
            found.setdefault(name, entry)
    return found


def _kind(factor: Factor) -> str:
    return f"{factor.region} {factor.target.rpartition('.')[2]}"


def _scopes(config: GlmConfig) -> Iterator[str]:
    yield "\n## What each scope takes\n"
    yield f"| scope | {' | '.join(REGIONS)} | factors | parameters |"
    yield f"|---|{'---|' * len(REGIONS)}---:|---:|"
    for scope, regions in SCOPES.items():
        adapter = AdapterConfig(rank=RANK, alpha=RANK, glm52_lora_scope=scope)
        trained = build_inventory(config, adapter).trainable
        marks = " | ".join("yes" if region in regions else "-" for region in REGIONS)
        yield f"| `{scope}` | {marks} | {len(trained):,} | {sum(item.numel for item in trained):,} |"


def _sizes(inventory: Inventory) -> Iterator[str]:
    yield "\n## What the files weigh\n"
    yield "All factors at rank 64 in bfloat16, by arithmetic.\n"
    yield "| format | tensors | GB |"
    yield "|---|---:|---:|"
    for format in FORMATS:
        count = len(file_entries(inventory.factors, format))
        yield f"| `{format}` | {count:,} | {file_size(inventory.factors, format) / 1e9:,.1f} |"


if __name__ == "__main__":
    sys.stdout.write(topology_page())
