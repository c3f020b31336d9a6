"""What stands in for a CUDA stream, event and random generator where there is no GPU.

On a CPU every operation has finished when its call returns, so a stream has nothing to order and an event has always
happened. Megatron's "CUDA" random state becomes the state of torch's one CPU generator.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

__all__ = [
    "CPU",
    "CpuEvent",
    "CpuStream",
    "DropSharedGeneratorWarning",
    "get_rng_state",
    "manual_seed",
    "set_rng_state",
    "stream_context",
    "tensor_cuda",
]

CPU = torch.device("cpu")


class CpuEvent:
    """An event that has always happened already."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Accept and ignore what ``torch.cuda.Event`` takes."""

    def record(self, stream: CpuStream | None = None) -> None:
        """Do nothing: the work before this call is done."""

    def wait(self, stream: CpuStream | None = None) -> None:
        """Do nothing: the event has happened."""

    def synchronize(self) -> None:
        """Do nothing: the event has happened."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True


class CpuStream:
    """A stream on which every operation has finished when its call returns."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Accept and ignore what ``torch.cuda.Stream`` takes."""

    def wait_stream(self, stream: CpuStream) -> None:
        """Do nothing: the other stream's work is done."""

    def wait_event(self, event: CpuEvent) -> None:
        """Do nothing: the event has happened."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Return an event that has happened."""
        return event or CpuEvent()

    def synchronize(self) -> None:
        """Do nothing: the stream's work is done."""


def stream_context(_stream: CpuStream | None = None) -> contextlib.AbstractContextManager[None]:
    """Stand in for ``torch.cuda.stream``."""
    return contextlib.nullcontext()


def tensor_cuda(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """Stand in for ``Tensor.cuda``: the tensor itself, which is where this run's tensors live."""
    return tensor


def get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    """Return the CPU generator's state, whatever device was asked for."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    """Set the CPU generator's state, whatever device was named."""
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.manual_seed(seed)


class DropSharedGeneratorWarning(logging.Filter):
    """Drop "CPU RNG state changed within GPU RNG context": with one generator it is true of every draw."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record but that one."""
        return "CPU RNG state changed" not in record.getMessage()
