"""The one place where functions of ``megatron.training`` 0.19.2 are replaced.

Megatron has no hook for these; each entry says what it replaces and why, and a test sees what
happens without it.

* ``save_checkpoint``, ``load_checkpoint`` (``megatron.training.training``): adapter-only, complete or
  refused. Megatron's own would save the base's frozen bytes, and its loader falls back to a
  non-strict load with a print.
* ``training_log`` (``megatron.training.training``): one JSON line an iteration in ``metrics.jsonl``.
  Megatron prints interval means, in which a resumed run's second line is a mean over two iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megatron.training.training as megatron_training

__all__ = ["Seams", "install_seams"]


@dataclass(frozen=True)
class Seams:
    """Functions that stand behind Megatron's names for one run; None leaves Megatron's own."""

    save_checkpoint: Callable[..., None] | None = None
    load_checkpoint: Callable[..., tuple[int, float]] | None = None
    on_iteration: Callable[..., None] | None = None


def install_seams(seams: Seams) -> None:
    """Put the given functions behind Megatron's names."""
    if seams.save_checkpoint is not None:
        megatron_training.save_checkpoint = seams.save_checkpoint
    if seams.load_checkpoint is not None:
        megatron_training.load_checkpoint = seams.load_checkpoint
    if seams.on_iteration is not None:
        megatron_training.training_log = _logged(megatron_training.training_log, seams.on_iteration)


def _logged(original: Callable[..., Any], on_iteration: Callable[..., None]) -> Callable[..., Any]:
    def training_log(
        loss_dict: dict[str, Any],
        total_loss_dict: Any,
        learning_rate: Any,
        iteration: int,
        *rest: Any,
        **named: Any,
    ) -> Any:
        report = original(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **named)
        # rest: loss_scale, report_memory_flag, skipped_iter, grad_norm, ... (0.19.2's positional order)
        on_iteration(
            iteration=iteration, losses=loss_dict, learning_rate=learning_rate, grad_norm=rest[3]
        )
        return report

    return training_log
