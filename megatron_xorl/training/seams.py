"""The one place where functions of ``megatron.training`` 0.19.2 are replaced.

Megatron has no hook for these; each entry says what it replaces and why, and a test sees what
happens without it.

* ``save_checkpoint``, ``load_checkpoint`` (``megatron.training.training``): adapter-only, complete or
  refused. Megatron's own walks the whole model and stops at the frozen head, and its loader falls
  back to a non-strict load with a print.
* ``training_log`` (``megatron.training.training``): one JSON line an iteration in ``metrics.jsonl``.
  Megatron prints interval means, in which a resumed run's second line is a mean over two iterations.
* ``build_train_valid_test_data_iterators`` (``megatron.training.training``): leaves the random state
  as it was. It runs after the checkpoint was loaded, and torch's data loader draws a seed each time it
  is started, so that a resumed run would go on with other random numbers than the uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megatron.training.training as megatron_training
import torch

__all__ = ["Seams", "install_seams"]


@dataclass(frozen=True)
class Seams:
    """Functions that stand behind Megatron's names for one run; None leaves Megatron's own."""

    save_checkpoint: Callable[..., None] | None = None
    load_checkpoint: Callable[..., tuple[int, float]] | None = None
    on_iteration: Callable[..., None] | None = None
    keep_random_state: bool = False


def install_seams(seams: Seams) -> None:
    """Put the given functions behind Megatron's names."""
    if seams.save_checkpoint is not None:
        megatron_training.save_checkpoint = seams.save_checkpoint
    if seams.load_checkpoint is not None:
        megatron_training.load_checkpoint = seams.load_checkpoint
    if seams.on_iteration is not None:
        megatron_training.training_log = _logged(megatron_training.training_log, seams.on_iteration)
    if seams.keep_random_state:
        megatron_training.build_train_valid_test_data_iterators = _drawing_nothing(
            megatron_training.build_train_valid_test_data_iterators
        )


def _drawing_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_train_valid_test_data_iterators(*args: Any, **named: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return original(*args, **named)

    return build_train_valid_test_data_iterators


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
