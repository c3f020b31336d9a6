"""Process groups: from torchrun's environment, in one process, twice the same, and layouts that cannot be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_xorl.errors import LayoutError, PlatformError
from tests.worlds import run_world


def _initialized(layout: dict[str, int], *, cpu: bool = True) -> dict[str, int]:
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    if cpu:
        use_cpu()
    initialize(**layout)
    from megatron.core import parallel_state as state

    return {
        "world": dist.get_world_size(),
        "rank": dist.get_rank(),
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
        "etp": state.get_expert_tensor_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
    }


def _draws(layout: dict[str, int]) -> tuple[float, float, float]:
    """Return a draw of the plain, the tensor-parallel and the expert-parallel random state."""
    _initialized(layout)
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    plain = torch.rand(()).item()
    with tracker.fork():
        tensor = torch.rand(()).item()
    with tracker.fork(tensor_parallel.get_expert_parallel_rng_tracker_name()):
        expert = torch.rand(()).item()
    return plain, tensor, expert


def _twice_and_again() -> tuple[bool, str, int, bool]:
    from megatron_xorl.parallel.groups import initialize, shutdown

    _initialized({})
    group = dist.group.WORLD
    initialize()
    same = dist.group.WORLD is group
    with pytest.raises(LayoutError) as refused:
        initialize(seed=5)
    shutdown()
    shutdown()
    gone = not dist.is_initialized()
    initialize(seed=5)
    return same, str(refused.value), dist.get_world_size(), gone


def _refusal(layout: dict[str, int], cpu: bool = True) -> str:
    with pytest.raises((LayoutError, PlatformError)) as refused:
        _initialized(layout, cpu=cpu)
    return f"{type(refused.value).__name__}: {refused.value}"


def _one_process(function_name: str, *args):
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return globals()[function_name](*args)


def test_one_process_needs_no_environment() -> None:
    (seen,) = run_world(_one_process, 1, "_initialized", {}, process_group=False)
    assert seen == {"world": 1, "rank": 0, "tp": 1, "pp": 1, "ep": 1, "etp": 1, "cp": 1, "dp": 1}


def test_torchruns_environment_is_enough() -> None:
    seen = run_world(_initialized, 2, {"ep": 2}, process_group=False)
    assert [rank["rank"] for rank in seen] == [0, 1]
    assert all((rank["world"], rank["ep"], rank["dp"]) == (2, 2, 2) for rank in seen)


def test_expert_tensor_parallelism_is_one_unless_asked_for() -> None:
    (first, _) = run_world(_initialized, 2, {"tp": 2, "ep": 2})
    assert (first["tp"], first["ep"], first["etp"], first["dp"]) == (2, 2, 1, 1)
    (first, _) = run_world(_initialized, 2, {"tp": 2, "etp": 2})
    assert (first["tp"], first["ep"], first["etp"]) == (2, 1, 2)


def test_random_states_differ_exactly_where_megatron_wants_them_to() -> None:
    (plain0, tensor0, expert0), (plain1, tensor1, expert1) = run_world(_draws, 2, {"ep": 2})
    assert (plain0, tensor0) == (plain1, tensor1)
    assert expert0 != expert1
    (plain0, tensor0, _), (plain1, tensor1, _) = run_world(_draws, 2, {"tp": 2})
    assert plain0 == plain1
    assert tensor0 != tensor1


def test_the_same_layout_twice_changes_nothing_and_another_is_refused_until_shutdown() -> None:
    ((same, refusal, world, gone),) = run_world(
        _one_process, 1, "_twice_and_again", process_group=False
    )
    assert same
    assert "shutdown()" in refusal
    assert "seed=5" in refusal
    assert gone
    assert world == 1


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"ep": 3}, "world size 2 is not a multiple of etp*ep*pp = 3"),
        ({"tp": 2, "pp": 2}, "world size 2 is not a multiple of tp*pp*cp = 4"),
        ({"tp": 0}, "tp=0: parallel sizes are 1 or more"),
    ],
)
def test_an_impossible_layout_names_what_was_found_and_what_is_legal(layout, expected) -> None:
    for message in run_world(_refusal, 2, layout):
        assert message.startswith("LayoutError: ")
        assert expected in message
    if "0" not in expected.split(":")[0]:
        assert "[1, 2]" in message


def test_without_a_gpu_the_cpu_platform_must_be_asked_for() -> None:
    (message,) = run_world(_refusal, 1, {}, False)
    assert message.startswith("PlatformError")
    assert "use_cpu()" in message
