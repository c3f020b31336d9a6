"""Verbs that read configurations alone, on any machine: ``inspect``, ``targets``, ``doctor``.

megatron-xorl targets glm-5.2 --scope routed_experts
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_xorl.cli.root import JsonOption, app, print_json, stdout_to_stderr
from megatron_xorl.errors import ConfigError

if TYPE_CHECKING:
    from megatron_xorl.adapters.inventory import Inventory
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.plan.adapter_bytes import AdapterBytes

__all__ = ["doctor", "inspect", "targets"]

DEFAULT_RANK = 64

ConfigArgument = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="config.json, a directory that holds one, or a preset."),
]
TensorOption = Annotated[int, typer.Option(help="Tensor parallel size.")]
PipelineOption = Annotated[int, typer.Option(help="Pipeline parallel size.")]
ExpertOption = Annotated[int, typer.Option(help="Expert parallel size.")]
ExpertTensorOption = Annotated[int, typer.Option(help="Expert tensor parallel size.")]
ContextOption = Annotated[int, typer.Option(help="Context parallel size.")]
WorldOption = Annotated[
    int | None, typer.Option(help="Processes (default: the fewest the sizes need).")
]


@app.command()
def inspect(
    config: ConfigArgument,
    tp: TensorOption = 1,
    pp: PipelineOption = 1,
    ep: ExpertOption = 1,
    etp: ExpertTensorOption = 1,
    cp: ContextOption = 1,
    world: WorldOption = None,
    rank: Annotated[
        int | None, typer.Option(help="Show this process (default: one of every stage).")
    ] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Build the real modules on meta tensors and compare.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint of CONFIG holds, and what each rank of a layout holds of it; exit 1 if --build finds otherwise."""
    from megatron_xorl.cli.inspection import (
        add_built,
        layout_for,
        layout_report,
        mtp_report,
        warn_of_unmatched,
    )
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.display import print_checkpoint, print_layout
    from megatron_xorl.plan.checkpoint_bytes import checkpoint_bytes
    from megatron_xorl.weights.names import hf_tensors

    glm = load_glm_config(config)
    layout = layout_for(glm, tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, world=world)
    report = checkpoint_bytes(hf_tensors(glm))
    warn_of_unmatched(glm)
    report["indexer"] = {
        "full": list(glm.full_indexer_layers),
        "shared": list(glm.shared_indexer_layers),
    }
    report["mtp"] = mtp_report(glm)
    report |= layout_report(glm, layout, rank)
    faults: tuple[str, ...] = ()
    if build:
        with stdout_to_stderr():
            faults = add_built(glm, layout, report)
    if as_json:
        print_json(report)
    else:
        print_checkpoint(config, glm, report)
        print_layout(report)
    for fault in faults:
        print(f"megatron-xorl: {fault}", file=sys.stderr)
    if faults:
        raise typer.Exit(1)


@app.command()
def targets(
    config: ConfigArgument,
    adapter: Annotated[str | None, typer.Option(help="Adapter configuration, a YAML file.")] = None,
    scope: Annotated[
        str | None, typer.Option(help="What trains: all, moe, shared_experts, routed_experts.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="A name or a quoted pattern; repeat for more.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help=f"Rank of every factor (default {DEFAULT_RANK}).")
    ] = None,
    tp: TensorOption = 1,
    pp: PipelineOption = 1,
    ep: ExpertOption = 1,
    etp: ExpertTensorOption = 1,
    cp: ContextOption = 1,
    world: WorldOption = None,
    ownership: Annotated[
        bool,
        typer.Option(
            "--ownership", help="Show instead who holds and who sums every factor, by axis."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the factors an adapter configuration builds on CONFIG, what training them costs, and what a rank holds of them."""
    from megatron_xorl.adapters.inventory import build_inventory
    from megatron_xorl.adapters.report import target_report
    from megatron_xorl.cli.inspection import layout_for
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.plan.adapter_bytes import adapter_bytes

    glm = load_glm_config(config)
    layout = layout_for(glm, tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, world=world)
    chosen = _adapter_config(adapter, scope, target, rank)
    inventory = build_inventory(glm, chosen)
    if ownership:
        from megatron_xorl.cli.ownership_tables import ownership_report, print_ownership

        owners = ownership_report(inventory, layout)
        return print_json(owners) if as_json else print_ownership(config, owners)
    cost = adapter_bytes(inventory)
    report = target_report(glm, chosen, inventory, layout, scaled=adapter is not None)
    if as_json:
        print_json(_targets_report(inventory, cost) | report)
    else:
        from megatron_xorl.cli.target_tables import print_targets

        print_targets(config, inventory, cost, report)


@app.command()
def doctor(
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Also compile every Triton kernel for sm_90 and sm_100 (minutes the first time) and show the gates.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show versions, what will be used, and what is missing; exit 1 if something required is missing or a kernel fails a gate."""
    from megatron_xorl.display import print_doctor
    from megatron_xorl.doctor import examine

    report = examine()
    if kernels:
        from megatron_xorl.fp8.compiled import examine_kernels

        report["kernels"] = examine_kernels()
    if as_json:
        print_json(report)
    else:
        print_doctor(report)
    failed = any(one["faults"] for one in report.get("kernels", ()))
    if failed or any(item["required"] for item in report["missing"]):
        raise typer.Exit(1)


def _adapter_config(
    adapter: str | None, scope: str | None, target: list[str] | None, rank: int | None
) -> AdapterConfig:
    from megatron_xorl.config.adapter import AdapterConfig, load_adapter_config

    chosen = {"glm52_lora_scope": scope, "lora_target_modules": target or None, "rank": rank}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    if adapter is None:
        # Of the listing only the scale depends on alpha, and it is left out.
        return AdapterConfig(**{"rank": DEFAULT_RANK, "alpha": DEFAULT_RANK, **chosen})
    if chosen:
        raise ConfigError(
            "--adapter says everything; it cannot be combined with --scope, --target or --rank"
        )
    return load_adapter_config(adapter)


def _targets_report(inventory: Inventory, cost: Mapping[str, AdapterBytes]) -> dict[str, Any]:
    keys = ("name", "target", "region", "shape", "dtype", "trainable")
    return {
        "factors": [{key: getattr(factor, key) for key in keys} for factor in inventory.factors],
        "totals": inventory.totals(),
        "bytes": {
            name: {"factors": item.factors, "masters": item.masters, "moments": item.moments}
            for name, item in cost.items()
        },
    }
