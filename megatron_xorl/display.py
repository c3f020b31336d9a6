"""Tables for people: what the command line prints when ``--json`` is not asked for.

The one idea: each function prints one report that a library function returned, and computes nothing but layout.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from megatron_xorl.config.model import GlmConfig

__all__ = [
    "console",
    "print_adapter",
    "print_checkpoint",
    "print_doctor",
    "print_layout",
    "print_recall",
    "table",
]

PIPE_WIDTH = 120  # columns where stdout is not a terminal


def console() -> Console:
    """Return a console on stdout, wide enough for our tables in a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def table(title: str, *columns: str) -> Table:
    """Return an empty table whose first column is text and whose others are numbers."""
    result = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right")
    return result


def print_checkpoint(name: str, glm: GlmConfig, report: Mapping[str, Any]) -> None:
    """Print what ``plan.checkpoint_bytes`` says of the checkpoint ``name``."""
    parameters, size = report["parameters"], report["bytes"]
    scales = f" and {report['scale_tensors']:,} block scales" if report["scale_tensors"] else ""
    title = f"{name}: {report['hf_tensors']:,} tensors{scales}"
    rows = table(title, "region", "parameters", "bytes")
    for region, count in parameters["by_region"].items():
        rows.add_row(region, f"{count:,}", f"{size['by_region'][region]:,}")
    rows.add_section()
    rows.add_row("total", f"{parameters['total']:,}", f"{size['total']:,}")
    block = "none" if glm.weight_block_size is None else "{} x {}".format(*glm.weight_block_size)
    full, shared = glm.full_indexer_layers, glm.shared_indexer_layers
    out = console()
    out.print(rows)
    out.print(f"layers: {glm.num_hidden_layers}, the first {glm.first_k_dense_replace} dense")
    out.print(
        f"experts: {glm.n_routed_experts}, {glm.num_experts_per_tok} a token; FP8 block: {block}"
    )
    out.print(
        f"indexer: {len(full)} full, {len(shared)} shared; full at {', '.join(map(str, full))}"
    )
    if (mtp := report.get("mtp")) and mtp["layers"]:
        layers = f"layer{'s' if mtp['layers'][1:] else ''} {', '.join(map(str, mtp['layers']))}"
        out.print(
            f"MTP {layers}: {mtp['tensors']} tensors, carried through conversion, not built for training"
        )


def print_layout(report: Mapping[str, Any]) -> None:
    """Print the layout part of ``inspect``: the pipeline cut, what each rank holds by region, and whether it was built so."""
    out = console()
    sizes = ", ".join(f"{name} {size}" for name, size in report["layout"].items())
    out.print(f"layout: {sizes}")
    pipeline = report["pipeline"]
    if len(pipeline["starts"]) > 1:
        out.print(
            f"pipeline: stages begin on layers {', '.join(map(str, pipeline['starts']))}; "
            f"layers a stage: {', '.join(map(str, pipeline['layers']))}",
            soft_wrap=True,
        )
        out.print(
            f"--pipeline-model-parallel-layout '{pipeline['layout']}'", markup=False, soft_wrap=True
        )
    for entry in report["per_rank"]:
        out.print(_rank_table(entry))
    if "build" in report:
        built = report["build"]
        verdict = "equal" if built["equal"] else "DIFFERENT"
        out.print(
            f"built on meta in {built['seconds']:.1f} s (imports {built['import_seconds']:.1f} s, "
            f"peak {built['peak_bytes'] / 2**30:.1f} GiB): modules and arithmetic are {verdict}"
        )


def _rank_table(entry: Mapping[str, Any]) -> Table:
    """Return what one rank holds, by arithmetic; a column more where it was built too."""
    layers, experts = entry["layers"], entry["experts"]
    title = (
        f"rank {entry['rank']}: stage {entry['stage']}, layers {layers[0]}-{layers[-1]}, "
        f"experts {experts[0]}-{experts[-1]}; {entry['ranks_alike']} ranks of the stage hold as much"
    )
    forms = ("fp8_codes", "fp8_scales", "bf16", "fp32")
    built = entry.get("built")
    columns = ("region", "parameters", *(f"{form} bytes" for form in forms))
    rows = table(title, *columns, *(("built",) if built else ()))
    for region, sizes in entry["bytes"]["by_region"].items():
        cells = [entry["parameters"]["by_region"][region], *(sizes[form] for form in forms)]
        if built:
            cells.append(built["parameters"]["by_region"].get(region, 0))
        rows.add_row(region, *(f"{cell:,}" for cell in cells))
    rows.add_section()
    total = [entry["parameters"]["total"], *(entry["bytes"][form] for form in forms)]
    if built:
        total.append(built["parameters"]["total"])
    rows.add_row("total", *(f"{cell:,}" for cell in total))
    return rows


def print_doctor(report: Mapping[str, Any]) -> None:
    """Print the report of ``doctor.examine``."""
    out = console()
    installed = table("installed", "package", "version")
    for name, version in report["versions"].items():
        installed.add_row(name, version or "-")
    used = table("will be used", "what", "which")
    for name, value in report["backends"].items():
        used.add_row(name, ", ".join(value) or "none" if isinstance(value, list) else str(value))
    out.print(installed, used)
    for item in report["missing"]:
        kind = "MISSING" if item["required"] else "not here"
        line = f"{kind}: {item['name']} (for {item['needed_for']}): {item['how']}"
        out.print(line, markup=False, soft_wrap=True)
    if "kernels" in report:
        out.print(_kernels(report["kernels"]))


def _kernels(reports: Sequence[Mapping[str, Any]]) -> Table:
    """What the compiler made of each kernel."""
    rows = table("kernels", "kernel", "sm", "instruction", "registers", "shared", "gates")
    for one in reports:
        instruction = f"{one['opcode']} {one['mma']}" if one["opcode"] else "-"
        numbers = (f"{one['registers']:,}", f"{one['shared']:,}")
        rows.add_row(
            one["variant"],
            str(one["target"]),
            instruction,
            *numbers,
            "; ".join(one["faults"]) or "ok",
        )
    return rows


def print_adapter(name: str, report: Mapping[str, Any]) -> None:
    """Print what ``weights.adapter_report`` says of the adapter directory ``name``."""
    rows = table(f"{name}: {report['format']}", "region", "factors", "parameters", "bytes")
    for region, count in report["factors"]["by_region"].items():
        rest = (f"{report[key]['by_region'][region]:,}" for key in ("parameters", "bytes"))
        rows.add_row(region, f"{count:,}", *rest)
    rows.add_section()
    rows.add_row(
        "total", *(f"{report[key]['total']:,}" for key in ("factors", "parameters", "bytes"))
    )
    out = console()
    out.print(rows)
    dtypes = ", ".join(report["dtype"])
    out.print(
        f"scope {report['scope']}, rank {report['rank']}, alpha {report['alpha']:g}, {dtypes}",
        markup=False,
    )
    if frozen := report["frozen"]:
        out.print(
            f"{len(frozen)} targets are frozen and contribute, first {frozen[0]}", soft_wrap=True
        )
    out.print(f"trained on {report['base_model']}", markup=False, soft_wrap=True)
    out.print(f"base fingerprint {report['base_fingerprint']}", soft_wrap=True)


def print_recall(report: Mapping[str, Any]) -> None:
    """Print what ``training.recall`` returned: a line a pair, then the score."""
    out = console()
    for pair in report["pairs"]:
        lines = [
            f"{'exact' if pair['exact'] else 'MISS '} {pair['prompt']}",
            f"      got      {pair['got']!r}",
        ]
        if not pair["exact"]:
            lines.append(f"      expected {pair['expected']!r}")
        out.print("\n".join(lines), markup=False, soft_wrap=True)
    out.print(f"recall {report['exact']}/{report['total']} exact")
