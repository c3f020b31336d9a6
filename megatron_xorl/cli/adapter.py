"""Verbs on adapter directories: ``adapter export``, ``adapter inspect``.

megatron-xorl adapter export runs/job/checkpoints my-adapter
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_xorl.cli.root import JsonOption, app, print_json, stdout_to_stderr

__all__ = ["export", "inspect"]

group = typer.Typer(no_args_is_help=True, help="Export and look at adapter directories.")
app.add_typer(group, name="adapter")


@group.command()
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="Training checkpoint, or their directory: the latest."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Adapter directory to make.")],
    as_json: JsonOption = False,
) -> None:
    """Write the adapter of a training checkpoint in sglang_shared_outer form; the base is not needed."""
    with stdout_to_stderr():
        from megatron_xorl.training.checkpoint_export import export_checkpoint

        report = export_checkpoint(checkpoint, out)
    if as_json:
        print_json(report | {"path": str(out.resolve())})
    else:
        print(
            f"{out}: {report['factors']} factors, {report['bytes']:,} bytes, of iteration {report['iteration']}"
        )


@group.command()
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Adapter directory.")],
    as_json: JsonOption = False,
) -> None:
    """Show what an adapter directory holds: format, scope, rank, factors by region, bytes, base."""
    from megatron_xorl.display import print_adapter
    from megatron_xorl.weights.adapter_files import AdapterFile
    from megatron_xorl.weights.adapter_report import adapter_report

    report = adapter_report(AdapterFile(directory))
    if as_json:
        print_json(report)
    else:
        print_adapter(str(directory), report)
