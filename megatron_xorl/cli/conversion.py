"""Verbs on whole checkpoints: ``import``, ``export``, ``verify``.

megatron-xorl import HF_DIR OUT
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from megatron_xorl.cli.root import JsonOption, app, print_json

__all__ = ["export", "import_", "verify"]

OutArgument = Annotated[
    str, typer.Argument(metavar="OUT", help="New directory, or that of an interrupted run.")
]
DtypeOption = Annotated[
    str, typer.Option(help="keep (every byte as it is), bf16 or fp32 (FP8 is dequantised).")
]
QuantizeOption = Annotated[
    bool, typer.Option("--quantize", help="Make block FP8 (e4m3, 128 x 128) of bf16 weights.")
]
WorkersOption = Annotated[int, typer.Option(min=1, help="Files converted at the same time.")]
HashOption = Annotated[
    bool, typer.Option("--no-hash", help="Neither check nor write SHA-256 hashes; sizes stay.")
]


@app.command(name="import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="HF_DIR", help="Hugging Face directory, FP8 or BF16.")
    ],
    out: OutArgument,
    dtype: DtypeOption = "keep",
    quantize: QuantizeOption = False,
    workers: WorkersOption = 1,
    no_hash: HashOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a Hugging Face directory into a Megatron distributed checkpoint; an interrupted run continues."""
    from megatron_xorl.convert.importer import import_checkpoint

    _convert(import_checkpoint, source, out, (dtype, quantize), workers, not no_hash, as_json)


@app.command()
def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="Megatron checkpoint made by import.")
    ],
    out: OutArgument,
    dtype: DtypeOption = "keep",
    quantize: QuantizeOption = False,
    workers: WorkersOption = 1,
    no_hash: HashOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a Megatron distributed checkpoint back into Hugging Face shards; an interrupted run continues."""
    from megatron_xorl.convert.exporter import export_checkpoint

    _convert(export_checkpoint, checkpoint, out, (dtype, quantize), workers, not no_hash, as_json)


@app.command()
def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint of either form.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Checkpoint of either form.")],
    values: Annotated[
        bool, typer.Option("--values", help="Compare values across dtypes instead of bytes.")
    ] = False,
    no_hash: HashOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit 1 if they differ."""
    from megatron_xorl.weights.opening import refuse_unreadable

    refuse_unreadable(a, b)  # in a moment; what follows imports torch
    from megatron_xorl.convert.verify import verify as compare

    report = compare(a, b, values=values, hashed=not no_hash)
    if as_json:
        print_json(report)
    else:
        print("\n".join(_verdict(report)))
    if not report["equal"]:
        raise typer.Exit(1)


def _convert(
    direction: Callable[..., Mapping[str, Any]],
    source: str,
    out: str,
    options: tuple[str, bool],
    workers: int,
    hashed: bool,
    as_json: bool,
) -> None:
    """Run one direction and print its report."""
    from megatron_xorl.convert.plan import Options

    with _sigterm_as_interrupt(out):
        report = direction(source, out, Options(*options), workers=workers, hashed=hashed)
    if as_json:
        print_json(report)
        return
    earlier = f", {report['resumed']} files of an earlier run" if report["resumed"] else ""
    print(
        f"{report['path']}: {report['tensors']:,} tensors, {report['bytes']:,} bytes in {report['seconds']:.1f} s "
        f"({report['bytes_per_s'] / 2**20:,.0f} MiB/s){earlier}"
    )


@contextlib.contextmanager
def _sigterm_as_interrupt(out: str) -> Iterator[None]:
    """Let SIGTERM, which schedulers send before they kill, stop a conversion as Ctrl-C does: with a line that says how to go on.

    Raises:
        WeightsError: the signal came before or after the files were written.
    """
    from megatron_xorl.convert.stream import Terminated
    from megatron_xorl.errors import WeightsError

    def stop(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # Python has no handlers there
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Terminated:
        raise WeightsError(
            f"ended by SIGTERM; the same command begins {out}, or continues it"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _verdict(report: Mapping[str, Any]) -> list[str]:
    """Lines for people: the verdict, then all that differs."""
    metrics = report["metrics"]
    head = (
        f"{'equal' if report['equal'] else 'DIFFERENT'} in {report['compared_as']}: {metrics['compared']:,} tensors compared "
        f"({metrics['tensors_a']:,} and {metrics['tensors_b']:,}), {metrics['different']:,} differ, "
        f"{metrics['missing']:,} missing in B, {metrics['extra']:,} extra in B"
    )
    lines = [head]
    lines += [f"  missing in B: {name}" for name in report["missing"]]
    lines += [f"  extra in B: {name}" for name in report["extra"]]
    lines += [f"  {problem}" for problem in report["problems"]]
    for item in report["differences"]:
        first = (
            f", first at {item['index']}: {item['a']} and {item['b']}" if "index" in item else ""
        )
        lines.append(f"  {item['tensor']}: {item['what']}{first}")
    lines += [f"  config {field}: {a} and {b}" for field, (a, b) in report["config"].items()]
    return lines
