"""The CPU platform: stock Megatron trains, saves and loads on it, and every substitution prevents a failure."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_xorl.errors import PlatformError
from megatron_xorl.parallel import cpu
from tests.workers import megatron_core_job, megatron_training_job, without_one
from tests.worlds import run_world, start_world

ALL = frozenset()

# substitution -> (world size, job, where the job stops without it: text of the error's traceback)
CORE_FAILURES: dict[str, tuple[int, Callable[..., Any], tuple[str, ...]]] = {
    "current_device": (1, without_one.core_job, ("layers.py", "_lazy_init")),
    "rng": (1, without_one.core_job, ("tensor_parallel/random.py", "in add", "_lazy_init")),
    "stream": (1, without_one.core_job, ("token_dispatcher.py", "torch/cuda/streams.py")),
    "synchronize": (1, without_one.core_job, ("preload_tensors", "_lazy_init")),
    "device_literals": (1, without_one.core_job, ("optimizer.py", "_lazy_init")),
    "tensor_type_literals": (1, without_one.core_job, ("must be one of torch.cuda.FloatTensor",)),
    "expert_split_sizes": (
        2,
        without_one.core_job,
        ("mappings.py", "TypeError: all_to_all_single"),
    ),
    "unequal_parts": (
        2,
        without_one.tokens_of_two_expert_tensor_ranks,
        ("mappings.py", "ProcessGroupGloo::allgather: invalid tensor size"),
    ),
    "cp_positions": (
        1,
        without_one.context_parallel_positions,
        ("rope_utils.py", "cp_idx = torch.tensor("),
    ),
    "adam": (1, without_one.core_job, ("distrib_optimizer.py", "assert len(steps) == 1")),
    "optimizer_load": (
        1,
        without_one.core_job,
        ("distrib_optimizer.py", "a view of a leaf Variable"),
    ),
    "per_group_steps": (
        1,
        without_one.core_job_with_groups_at_two_steps,
        ("distrib_optimizer.py", "assert len(steps) <= 1"),
    ),
    "save_queue": (
        1,
        without_one.core_job_that_may_not_spawn,
        ("filesystem_async.py", "ChildProcess"),
    ),
    "multi_tensor": (1, without_one.core_job_with_kernels_that_refuse, ("this kernel takes CUDA",)),
    "jit_fuser": (1, without_one.fused_swiglu_without_a_compiler, ("torch._inductor", "swiglu")),
}
EP, TP = ("--expert-model-parallel-size", "2"), ("--tensor-model-parallel-size", "2")
TRAINING_FAILURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor_cuda": (
        EP,
        ("prepare_existing_model_chunks_for_distributed_training", "must be cuda device"),
    ),
    "training_device_literals": (EP, ("training/initialize.py", "_lazy_init")),
    "device_count": (EP, ("group is not initialized",)),
    "device_arch": (TP, ("get_device_arch_version", "_lazy_init")),
    "allow_no_cuda": (EP, ("Megatron requires CUDA.",)),
    "prebuilt_helpers": (EP, ("compile_helpers", "SystemExit")),
}


def _told(error: BaseException) -> str:
    return "\n".join([repr(error), *getattr(error, "__notes__", [])])


def _twice() -> list[bool]:
    """Say of every substituted object whether a second call left it as it was."""
    from megatron_xorl.parallel.literals import resolve
    from megatron_xorl.parallel.substitutions import SUBSTITUTIONS

    cpu.use_cpu()
    paths = [path for entry in SUBSTITUTIONS for path in entry.replaces]
    before = [(resolve(path), getattr(resolve(path), "__code__", None)) for path in paths]
    cpu.use_cpu()
    after = [(resolve(path), getattr(resolve(path), "__code__", None)) for path in paths]
    return [old == new for old, new in zip(before, after, strict=True)]


def _missing_objects() -> list[str]:
    """Return the objects and literals of the table that the installed packages do not have."""
    from megatron_xorl.parallel.literals import holds_literal, resolve
    from megatron_xorl.parallel.substitutions import SUBSTITUTIONS

    missing = []
    for entry in SUBSTITUTIONS:
        for path in entry.replaces:
            try:
                resolve(path)
            except PlatformError as error:
                missing.append(f"{entry.name}: {error}")
                continue
            if entry.name.endswith("device_literals") and not holds_literal(path, "cuda"):
                missing.append(f"{entry.name}: {path} holds no 'cuda'")
            if entry.name == "tensor_type_literals" and not any(
                holds_literal(path, f"torch.cuda.{kind}Tensor") for kind in ("Float", "BFloat16")
            ):
                missing.append(f"{entry.name}: {path} holds no type string")
    return missing


@pytest.mark.parametrize(
    ("world", "bf16", "pp"), [(1, False, 1), (2, False, 1), (2, True, 1), (2, False, 2)]
)
def test_stock_megatron_trains_saves_and_loads_to_the_same_bits(
    world: int, bf16: bool, pp: int
) -> None:
    ranks = run_world(megatron_core_job.train_save_load, world, ALL, bf16=bf16, pp=pp, steps=3)
    for seen in ranks:
        assert seen["after_load"] == seen["after_save"]
        assert len({*seen["losses"], seen["after_save"]}) == 4  # every step moved the weights
    assert all(seen == ranks[0] for seen in ranks)


def test_two_ranks_sum_what_one_process_computes_on_each_ones_data() -> None:
    """Before any update the two-process loss is the sum over both ranks' batches, whoever holds which expert."""
    (one,) = run_world(megatron_core_job.first_losses, 1, 2)
    two = run_world(megatron_core_job.first_losses, 2, 1)
    assert two[0] == two[1]
    assert two[0][0] == pytest.approx(sum(one), rel=1e-6)


@pytest.mark.parametrize("name", CORE_FAILURES)
def test_without_one_substitution_the_job_stops_where_the_table_says(name: str) -> None:
    world, job, expected = CORE_FAILURES[name]
    with pytest.raises(Exception) as stopped:  # which error it is differs, its place does not
        run_world(job, world, frozenset({name}))
    for text in expected:
        assert text in _told(stopped.value), _told(stopped.value)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (without_one.context_parallel_positions, [2.0, 3.0, 4.0, 5.0]),
        (
            without_one.fused_swiglu_without_a_compiler,
            [2 * torch.sigmoid(torch.tensor(1.0)).item()],
        ),
    ],
)
def test_with_every_substitution_the_small_jobs_give_the_right_numbers(
    job: Any, expected: list[float]
) -> None:
    assert run_world(job, 1, ALL)[0] == pytest.approx(expected)


def test_tokens_of_unequal_ranks_are_gathered_and_their_gradients_summed_back() -> None:
    ranks = run_world(without_one.tokens_of_two_expert_tensor_ranks, 2, ALL)
    # The rows of both, in rank order; backward sums what both ranks gave each row.
    assert ranks == [[1.0, 2.0, 2.0, 2.0, 2.0], [1.0, 2.0, 2.0, 2.0, 4.0, 6.0, 8.0]]


@pytest.mark.parametrize(
    "job", [without_one.core_job_that_may_not_spawn, without_one.core_job_with_kernels_that_refuse]
)
def test_with_every_substitution_the_hindered_jobs_finish(job: Any) -> None:
    (seen,) = run_world(job, 1, ALL)
    assert seen["after_load"] == seen["after_save"]


def test_groups_at_two_steps_go_through_a_state_dict() -> None:
    assert run_world(without_one.core_job_with_groups_at_two_steps, 1, ALL) == [[1, 101]]


def test_every_substitution_is_in_one_of_the_two_tables_of_failures() -> None:
    from megatron_xorl.parallel.substitutions import SUBSTITUTIONS

    training = {entry.name for entry in SUBSTITUTIONS if entry.needed_by == "training"}
    assert training == set(TRAINING_FAILURES)
    assert {entry.name for entry in SUBSTITUTIONS} - training == set(CORE_FAILURES)
    assert all(entry.why and entry.first_failure and entry.replaces for entry in SUBSTITUTIONS)


def test_every_substituted_object_and_literal_exists_in_the_installed_version() -> None:
    assert run_world(_missing_objects, 1, process_group=False) == [[]]


def test_an_object_or_a_literal_that_does_not_exist_is_refused_by_name() -> None:
    from megatron_xorl.parallel.literals import exchange_literals, resolve

    with pytest.raises(PlatformError, match=r"fractions:Fraction\.no_such"):
        resolve("fractions:Fraction.no_such")
    with pytest.raises(PlatformError, match="shlex:quote holds none of the literals"):
        exchange_literals("shlex:quote", {"cuda": "cpu"})


def test_a_second_call_changes_nothing() -> None:
    assert all(run_world(_twice, 1, process_group=False)[0])


def test_a_visible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_applied", set())  # as in a process in which nothing was applied yet
    with pytest.raises(PlatformError, match="GPU is visible"):
        cpu.use_cpu()
    assert not cpu.is_cpu_platform()


@pytest.mark.parametrize("version", ["0.19.1", "0.20.0", "1.0"])
def test_another_version_of_megatron_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(
        PlatformError, match=rf"megatron-core {version} is installed; .*>=0.19.2,<0.20"
    ):
        cpu.use_cpu()


def test_an_unknown_name_to_skip_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlatformError, match="nearest: save_queue"):
        cpu.use_cpu(skip=frozenset({"save_queu"}))


@pytest.mark.slow
def test_stock_megatron_training_trains_saves_and_resumes(tmp_path: Path) -> None:
    job = megatron_training_job.pretrain_steps
    whole = _losses(job, 3, str(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = _losses(job, 3, str(tmp_path), resume=True)
    assert len(set(whole)) == 3
    assert resumed == whole[2:]


def _losses(job: Any, iterations: int, folder: str, *, resume: bool = False) -> list[float]:
    with start_world(
        job, 2, ALL, iterations, folder, *EP, process_group=False, resume=resume
    ) as world:
        world.results(120)
        return megatron_training_job.losses(world.log(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING_FAILURES)
def test_without_one_substitution_megatron_training_stops(name: str, tmp_path: Path) -> None:
    extra, expected = TRAINING_FAILURES[name]
    job = megatron_training_job.pretrain_steps
    with pytest.raises(Exception) as stopped:  # which error it is differs, its place does not
        run_world(
            job, 2, frozenset({name}), 2, str(tmp_path), *extra, process_group=False, timeout=120
        )
    for text in expected:
        assert text in _told(stopped.value)
