"""Verbs on adapter directories: ``adapter export``, ``import``, ``inspect`` and ``verify``.

megatron-xorl adapter export runs/job/checkpoints my-adapter
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_xorl.cli.root import JsonOption, app, print_json, stdout_to_stderr

__all__ = ["export", "import_", "inspect", "verify"]

group = typer.Typer(
    no_args_is_help=True, help="Export, convert, check and look at adapter directories."
)
app.add_typer(group, name="adapter")

FormatOption = Annotated[
    str | None,
    typer.Option("--format", help="sglang_shared_outer, hf_peft or hf_peft_fused."),
]
ExpandedOption = Annotated[
    bool,
    typer.Option("--allow-expanded", help="Write an expanded form far larger than the shared one."),
]


@group.command()
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="Training checkpoint, or their directory: the latest."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Adapter directory to make.")],
    format: FormatOption = None,
    allow_expanded: ExpandedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the adapter of a training checkpoint; the base is not needed."""
    with stdout_to_stderr():
        from megatron_xorl.training.checkpoint_export import export_checkpoint

        report = export_checkpoint(checkpoint, out, format, allow_expanded=allow_expanded)
    _tell(out, report, f", of iteration {report['iteration']}", as_json)


@group.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Adapter directory of any form, PEFT's or XoRL's.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Adapter directory to make.")],
    format: FormatOption = "sglang_shared_outer",
    base: Annotated[
        Path | None,
        typer.Option("--base", help="Base model: checks shapes and records its fingerprint."),
    ] = None,
    allow_expanded: ExpandedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write an adapter directory of any readable form in another one."""
    with stdout_to_stderr():
        from megatron_xorl.weights.adapter_import import import_adapter

        report = import_adapter(
            source,
            out,
            format or "sglang_shared_outer",
            base=None if base is None else _base(base),
            allow_expanded=allow_expanded,
        )
    _tell(out, report, f", from {report['source_format']}", as_json)


def _base(directory: Path) -> tuple[Any, str, str]:
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.weights.fingerprint import fingerprint
    from megatron_xorl.weights.opening import open_checkpoint

    config = load_glm_config(directory)
    return config, fingerprint(config, open_checkpoint(directory)), str(directory)


def _tell(out: Path, report: dict[str, Any], origin: str, as_json: bool) -> None:
    if as_json:
        print_json(report | {"path": str(out.resolve())})
        return
    from megatron_xorl.display import console

    shared = report["shared_bytes"]
    beside = "" if report["bytes"] == shared else f" ({shared:,} as sglang_shared_outer)"
    full = report.get("full_bytes")
    if full is not None and full != report["bytes"]:
        beside += f" ({full:,} with every factor of the adapter config)"
    print(
        f"{out}: {report['factors']} factors, {report['bytes']:,} bytes{beside}, {report['format']}{origin}"
    )
    _print_notes(console(), report["servers"])


def _print_notes(screen: Any, notes: list[dict[str, str]]) -> None:
    for note in notes:
        screen.print(
            f"{note['server']} {note['effect']} {note['text']}; {note['source']}",
            markup=False,
            soft_wrap=True,
        )


@group.command()
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Adapter directory.")],
    as_json: JsonOption = False,
) -> None:
    """Show what an adapter directory holds: format, scope, rank, factors by region, bytes, base, and what servers make of it."""
    from megatron_xorl.display import console, print_adapter
    from megatron_xorl.weights.adapter_files import AdapterFile
    from megatron_xorl.weights.adapter_report import adapter_report

    report = adapter_report(AdapterFile(directory))
    if as_json:
        print_json(report)
        return
    print_adapter(str(directory), report)
    _print_notes(console(), report["servers"])


@group.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Adapter directory.")],
    base: Annotated[
        Path, typer.Option("--base", metavar="HF_DIR", help="The base it was trained on.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Compare the adapted model with a merge by hand, region by region; exit 1 where one differs or changes nothing."""
    with stdout_to_stderr():
        report = _verify(directory, base)
    if as_json:
        print_json(report)
    else:
        for name, found in report["regions"].items():
            verdict = "passed" if found["passed"] else f"FAILED ({found['reason']})"
            print(f"{name}: max_abs {found['max_abs']:.2e}, {verdict}")
        if "peft" in report:
            verdict = (
                "passed" if report["peft"]["passed"] else f"FAILED ({report['peft']['reason']})"
            )
            print(f"transformers + PEFT: max_abs {report['peft']['max_abs']:.2e}, {verdict}")
        print("passed" if report["passed"] else "FAILED")
    if not report["passed"]:
        raise typer.Exit(1)


def _verify(directory: Path, base: Path) -> dict[str, Any]:
    """One process, on the CPU platform where there is no GPU."""
    import torch

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize, shutdown

    if not torch.cuda.is_available():
        use_cpu()
    from megatron_xorl.training.adapter_verify import verify_adapter

    initialize()
    try:
        return verify_adapter(directory, base)
    finally:
        shutdown()
