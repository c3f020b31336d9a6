"""What import and export share: from a planned conversion to its report.

The one idea: a direction decides which tensors go into which file; running it, what a continued run must agree with, and what is
printed in the end are the same for both.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.convert.origin import Origin
from megatron_xorl.convert.plan import Options, output_config_of
from megatron_xorl.convert.stream import Conversion, Job, run
from megatron_xorl.convert.values import Block, OutputTensor
from megatron_xorl.errors import WeightsError
from megatron_xorl.weights.checkpoint import Checkpoint

__all__ = ["Task", "asked", "carry_out", "refuse_nested"]


class Task(NamedTuple):
    """One conversion as it was asked for: the opened ``source``, and its ``origin`` when it was first looked at."""

    source: Checkpoint
    origin: Origin
    config: GlmConfig
    options: Options
    workers: int
    hashed: bool

    @property
    def block(self) -> Block | None:
        """The FP8 block that values are computed with."""
        output = output_config_of(self.config, self.options)
        return output.weight_block_size or self.config.weight_block_size


def asked(verb: str, options: Options, hashed: bool) -> dict[str, Any]:
    """Return the options that a continued run must agree with."""
    return {"verb": verb, "dtype": options.dtype, "quantize": options.quantize, "hashed": hashed}


def carry_out(
    task: Task,
    out: Path,
    planned: list[list[OutputTensor]],
    jobs: list[Job],
    small: dict[str, bytes | Path],
    start: float,
) -> dict[str, Any]:
    """Run a conversion and return what the command prints.

    Args:
        task: what was asked for.
        out: directory of the output.
        planned: output tensors of every file.
        jobs: the files of weights.
        small: the files that follow them, in order.
        start: ``time.perf_counter()`` when the conversion was asked for.

    Raises:
        WeightsError: see :func:`~megatron_xorl.convert.stream.run`.
    """
    listed = task.source.listed if task.hashed else {}
    conversion = Conversion(
        label=f"{task.origin.options['verb']} {task.source.directory.name}",
        out=out,
        source=task.source,
        hashes={name: file["sha256"] for name, file in listed.items() if "sha256" in file},
        block=task.block,
        jobs=jobs,
        small=small,
        origin=task.origin,
        workers=task.workers,
        hashed=task.hashed,
    )
    task.source.close()
    done = run(conversion)
    seconds = time.perf_counter() - start
    return {
        "path": str(out.resolve()),
        "tensors": sum(map(len, planned)),
        **done,
        "seconds": round(seconds, 3),
        "bytes_per_s": round(done["bytes"] / seconds),
    }


def refuse_nested(source: Path | str, out: Path | str) -> tuple[Path, Path]:
    """Return both as paths; check that writing ``out`` cannot change ``source``.

    Raises:
        WeightsError: one lies in the other, or is an empty text.
    """
    for what, given in (("source", source), ("output", out)):
        if not str(given):
            raise WeightsError(f"the path of the {what} is empty, expected a directory")
    source, out = Path(source), Path(out)
    first, second = source.resolve(), out.resolve()
    if first == second or first in second.parents or second in first.parents:
        raise WeightsError(
            f"the output {out} and the source {source} lie in each other; choose a directory apart from the source"
        )
    return source, out
