"""Process groups for Megatron-core: from torchrun's environment, or one process with no network at all.

:func:`initialize` starts torch.distributed (gloo on the CPU platform, nccl on GPUs), Megatron's tensor, pipeline, expert
and context parallel groups, and the random trackers; :func:`shutdown` ends them. Asking again for the same layout changes
nothing; asking for another one is refused until :func:`shutdown`.

Refuses a world size that the layout does not divide, and a machine without a GPU on which ``use_cpu()`` was not called.

CPU command: ``torchrun --nproc-per-node 2 SCRIPT.py``, where SCRIPT calls ``use_cpu()`` and ``initialize(ep=2)``
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_xorl.errors import LayoutError, PlatformError
from megatron_xorl.parallel.cpu import is_cpu_platform

__all__ = ["initialize", "shutdown"]


@dataclass(frozen=True)
class _Layout:
    tp: int
    pp: int
    ep: int
    etp: int
    cp: int
    vpp: int
    seed: int

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


_current: _Layout | None = None
_owns_process_group = False


def initialize(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
    *,
    vpp: int = 1,
    seed: int = 1234,
    timeout: float = 600.0,
) -> None:
    """Start process groups and random trackers for a layout; a second call with the same arguments changes nothing.

    Rank and world size come from a process group that exists already, else from torchrun's environment (``RANK``,
    ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``), else this is a world of one process, which needs no
    port. ``vpp`` is the number of virtual stages (model chunks) of each pipeline rank. ``seed`` (positive) is Megatron's
    ``--seed``: pipeline stage p draws from ``seed + 100 p``. ``timeout`` is the seconds after which a collective that a rank
    does not join fails.

    Raises:
        LayoutError: a size is below 1, the world size is not a multiple of tp*pp*cp or of etp*ep*pp, virtual stages without a
            pipeline, or another layout is active.
        PlatformError: there is no GPU and ``use_cpu()`` was not called.
    """
    global _current, _owns_process_group
    wanted = _Layout(tp, pp, ep, etp, cp, vpp, seed)
    if _current == wanted:
        return
    if _current is not None:
        raise LayoutError(
            f"initialize({wanted}) was called while ({_current}) is active; one layout is active at a time; "
            "call shutdown() first"
        )
    if not is_cpu_platform() and not torch.cuda.is_available():
        raise PlatformError(
            "initialize() found no GPU and no CPU platform; Megatron needs one of them; call use_cpu() first"
        )
    rank, world = _rank_and_world()
    _check_divides(wanted, world)
    if not dist.is_initialized():
        _start_process_group(rank, world, timeout)
        _owns_process_group = True
    _start_model_parallel(wanted, timeout)
    _current = wanted


def shutdown() -> None:
    """End Megatron's groups, and the process group if :func:`initialize` started it; without one, change nothing."""
    global _current, _owns_process_group
    if _current is None:
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if _owns_process_group:
        dist.destroy_process_group()
    _current, _owns_process_group = None, False


def _rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the world size."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _check_divides(layout: _Layout, world: int) -> None:
    """Raise LayoutError unless Megatron can cut ``world`` processes into ``layout``."""
    sizes = {name: value for name, value in asdict(layout).items() if name != "seed"}
    too_small = [f"{name}={value}" for name, value in sizes.items() if value < 1]
    if too_small:
        raise LayoutError(
            f"{', '.join(too_small)}: parallel sizes are 1 or more; correct the layout"
        )
    if layout.vpp > 1 and layout.pp == 1:
        raise LayoutError(
            f"vpp={layout.vpp} with pp=1: virtual stages are for two pipeline ranks or more; use vpp=1"
        )
    dense = layout.tp * layout.pp * layout.cp
    expert = layout.etp * layout.ep * layout.pp
    for formula, product in (("tp*pp*cp", dense), ("etp*ep*pp", expert)):
        if world % product:
            divisors = [n for n in range(1, world + 1) if world % n == 0]
            raise LayoutError(
                f"world size {world} is not a multiple of {formula} = {product} ({layout}); start a multiple of "
                f"{product} processes, or choose sizes whose product is one of {divisors}"
            )


def _start_process_group(rank: int, world: int, timeout: float) -> None:
    """Start torch.distributed from the environment, or for one process without it."""
    backend = "gloo" if is_cpu_platform() else "nccl"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    limit = timedelta(seconds=timeout)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=limit)
        return
    if world > 1:
        raise LayoutError(
            f"WORLD_SIZE={world} without MASTER_ADDR; a world of several processes is started by torchrun; "
            "use torchrun, or unset WORLD_SIZE"
        )
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)


def _start_model_parallel(layout: _Layout, timeout: float) -> None:
    """Start Megatron's groups and seed its random trackers."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout / 60,
    )
    stage_seed = layout.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
