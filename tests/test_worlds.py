"""The worlds that distributed tests run in: results, errors, hangs and kills are reported as they happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.worlds import RankError, WorldTimeoutError, run_world, start_world


class NotPicklable(Exception):
    """An exception whose constructor arguments are not its pickle arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} then {second}")


def _sum_of_ranks(offset: int, *, scale: int = 1) -> float:
    value = torch.tensor(float(scale * (dist.get_rank() + offset)))
    dist.all_reduce(value)
    return value.item()


def _raise_on_rank_one(pickles: bool) -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven") if pickles else NotPicklable(3, 4)
    dist.barrier()


def _sleep_on_rank_one() -> int:
    if dist.get_rank() == 1:
        time.sleep(600)
    return dist.get_rank()


def _wait_for_everybody() -> None:
    dist.barrier()
    Path(f"{os.environ['READY_FILE']}.{dist.get_rank()}").touch()
    time.sleep(600)


def _surroundings() -> tuple[int, int, str, bool]:
    return (
        torch.get_num_threads(),
        threading.active_count(),
        os.environ["OMP_NUM_THREADS"],
        dist.is_initialized(),
    )


def _exit() -> None:
    raise SystemExit(3)


def _leave_quietly() -> None:
    os._exit(0)


def test_results_come_back_in_rank_order_with_arguments_passed_on() -> None:
    assert run_world(_sum_of_ranks, 3, 10, scale=2) == [66.0, 66.0, 66.0]


def test_an_exception_is_raised_in_the_parent_with_its_rank_and_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="seven") as caught:
        run_world(_raise_on_rank_one, 2, True)
    assert time.monotonic() - start < 30  # the other rank, waiting in a barrier, was killed
    assert "rank 1 of 2" in caught.value.__notes__[-1]
    assert "_raise_on_rank_one" in caught.value.__notes__[-1]


def test_an_exception_that_does_not_pickle_is_told_as_text() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 raised:(.|\n)*NotPicklable: 3 then 4"):
        run_world(_raise_on_rank_one, 2, False)


def test_a_hang_is_killed_at_the_timeout_and_its_stack_is_shown() -> None:
    start = time.monotonic()
    with pytest.raises(WorldTimeoutError, match=r"ranks \[1\] of 2(.|\n)*in _sleep_on_rank_one"):
        run_world(_sleep_on_rank_one, 2, timeout=3)
    assert time.monotonic() - start < 30  # not the 600 s it wanted


def test_a_killed_rank_is_reported_with_its_signal(tmp_path: Path) -> None:
    ready = str(tmp_path / "ready")
    with start_world(_wait_for_everybody, 2, env={"READY_FILE": ready}) as world:
        while not all(os.path.exists(f"{ready}.{rank}") for rank in (0, 1)):
            time.sleep(0.01)
        world.kill(1)
        with pytest.raises(RankError, match=r"1: -9"):
            world.results(timeout=20)
    assert [process.exitcode for process in world.processes] == [-signal.SIGKILL, -signal.SIGKILL]


def test_a_rank_that_leaves_without_a_result_is_an_error() -> None:
    with pytest.raises(RankError, match=r"exit codes \{0: 0\}"):
        run_world(_leave_quietly, 1)


def test_an_exit_in_a_rank_does_not_end_the_parent() -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_world(_exit, 1)


def test_each_rank_has_one_thread_and_the_group_only_if_asked() -> None:
    assert run_world(_surroundings, 1, process_group=False) == [(1, 1, "1", False)]
    assert run_world(_surroundings, 1)[0][3]


def test_a_function_inside_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="module-level"):
        run_world(lambda: None, 1)


def test_eight_ranks_start_and_sum_within_seconds() -> None:
    run_world(_sum_of_ranks, 1, 0)  # the server is up
    start = time.monotonic()
    assert run_world(_sum_of_ranks, 8, 0) == [28.0] * 8
    assert time.monotonic() - start < 30  # 1 s on two idle cores
