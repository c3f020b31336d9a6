"""The program itself: errors to exit codes, and what all verbs share.

The one idea: stdout belongs to the answer. Megatron, torch and gloo print as they please, gloo from
C++, so a verb that works with them does so under :func:`stdout_to_stderr`, which also silences
their warnings about packages and devices that a verb does not need.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from megatron_xorl.errors import MegatronXorlError

__all__ = ["JsonOption", "app", "main", "print_json", "stdout_to_stderr"]

app = typer.Typer(
    name="megatron-xorl",
    help="LoRA fine-tuning of GLM-5.2 on Megatron-core, on the checkpoint's own block-FP8 bytes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: an error is one line on stderr and exit code 2; ``--debug`` anywhere adds its traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app(args=[argument for argument in given if argument != "--debug"])
    except MegatronXorlError as error:
        if debug:
            traceback.print_exc()
        print(f"megatron-xorl: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (OSError, RecursionError) as error:
        if debug:
            traceback.print_exc()
        print(f"megatron-xorl: {_outside(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _outside(error: OSError | RecursionError) -> str:
    """One line for what the file system, not this package, refused."""
    if isinstance(error, RecursionError):
        return "an input is nested too deeply to be read; expected a few levels, flatten it (--debug shows where)"
    named = "" if error.filename is None else f"{error.filename}: "
    reason = " ".join(str(error.strerror or error).split()) or type(error).__name__
    return f"{named}{reason}; check the path, its permissions and free space (--debug shows where)"


@app.callback()
def _root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (accepted anywhere).")
    ] = False,
) -> None:
    """LoRA fine-tuning of GLM-5.2 on Megatron-core, on the checkpoint's own block-FP8 bytes."""


def print_json(document: Mapping[str, Any]) -> None:
    """Print ``document`` as the one JSON document on stdout."""
    json.dump(document, sys.stdout)
    sys.stdout.write("\n")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send whatever this process and its children write to stdout to stderr meanwhile, prints from C++ included."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.")
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
