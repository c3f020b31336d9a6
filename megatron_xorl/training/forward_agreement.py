"""All ranks of a job compute FP8 products alike, or none starts.

One idea: a backend is chosen by each process for itself, and ``auto`` falls back where one cannot be built, so a node without a
compiler would train with other roundings than its neighbours and only a warning would say so. Ranks therefore tell each other
what they chose before anything is built. Refused: any two ranks with another backend or mode, and a rank that could not choose.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron_xorl.errors import PlatformError
from megatron_xorl.fp8.engine import Engine, use_fp8

__all__ = ["use_fp8_everywhere"]


def use_fp8_everywhere(*, backend: str | None = None, mode: str | None = None) -> Engine:
    """:func:`~megatron_xorl.fp8.engine.use_fp8` on every rank; collective where there is a process group.

    Raises:
        PlatformError: on every rank, if ranks chose differently or one could not choose; names ranks, backends and reasons.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone:
        return use_fp8(backend=backend, mode=mode)
    try:
        found = use_fp8(backend=backend, mode=mode)
        mine = (found.backend.name, found.mode, found.why)
    except PlatformError as error:  # told to the others first: they would wait for this rank
        mine = ("none", "none", str(error))
    told: list[tuple[str, str, str]] = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    if len({(name, chosen) for name, chosen, _ in told}) > 1 or mine[0] == "none":
        raise PlatformError(
            f"ranks compute FP8 products differently: {_listed(told)}; make every node alike, or choose one backend for all "
            "(--fp8-backend reference runs everywhere)"
        )
    return found


def _listed(told: list[tuple[str, str, str]]) -> str:
    """``backend cpu, mode w8a16 (why) on ranks 0, 2``, the choices in the order of their first ranks."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, (name, mode, _) in enumerate(told):
        ranks.setdefault((name, mode), []).append(rank)
    return "; ".join(
        f"backend {name}, mode {mode} on rank{'s' if len(own) > 1 else ''} {_ranges(own)} ({told[own[0]][2]})"
        for (name, mode), own in ranks.items()
    )


def _ranges(ranks: list[int]) -> str:
    """``0-6, 8`` for ascending ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
