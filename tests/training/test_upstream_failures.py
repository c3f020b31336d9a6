"""Eight ways in which megatron-core 0.19.2 loses or refuses optimizer state, and the adapter checkpoint that does not.

Each worker first sees upstream's failure (so that a test fails when upstream heals, and the workaround can go), then saves and
loads the same job through the product and compares every tensor with what was drawn.

a, b, g are also in ``tests/parallel/test_cpu_platform.py`` (substitutions ``adam``, ``optimizer_load``, ``per_group_steps``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_xorl as mx
from tests.training.test_checkpoint import SMALL
from tests.workers.adapter_job import Job
from tests.worlds import run_world

pytestmark = pytest.mark.dist


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def parts(job: Job) -> list[Any]:
    return list(getattr(job.optimizer, "chained_optimizers", [job.optimizer]))


def live(job: Job) -> Any:
    return [job.model], job.optimizer


def round_trip(job: Job, other: Job, root: Path) -> list[str]:
    """Save drawn values, load them into another job; every difference, also of its next save's files."""
    job.fill(1)
    other.fill(2)
    control = mx.compare_states(live(job), live(other))
    assert control, "two draws must differ"
    job.save(root, 3)
    assert other.load(root) == 3
    return [str(found) for found in mx.compare_states(live(job), live(other))]


def model_state(job: Job) -> dict[str, Any]:
    """The model's own part of a Megatron checkpoint."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    replica = (0, 0, parallel_state.get_data_parallel_rank(with_context_parallel=True))
    return {
        name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=replica)
        for name, parameter in job.model.named_parameters()
    }


def upstream(job: Job, kind: str, loading: bool = False) -> Any:
    from megatron.core import parallel_state

    metadata = {
        "distrib_optim_sharding_type": kind,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    return job.optimizer.sharded_state_dict(model_state(job), is_loading=loading, metadata=metadata)


def rewrap(job: Job, *, bf16: bool = False, distributed: bool = True, **ddp: Any) -> Job:
    """The same factors under another DDP and optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **ddp)
    job.chunk = DistributedDataParallel(job.model.config, settings, job.model)
    config = OptimizerConfig(
        lr=1e-2, weight_decay=0.01, bf16=bf16, use_distributed_optimizer=distributed
    )
    job.optimizer = get_megatron_optimizer(config, [job.chunk])
    return job


def without(*names: str) -> None:
    """Leave substitutions out for good in this process."""
    from megatron_xorl.parallel import cpu

    cpu.use_cpu(skip=frozenset(names))
    cpu._applied.update(names)


# --- the eight ----------------------------------------------------------------------------------------------------------------


def a_torch_adamw(model: Path, root: Path) -> list[Any]:
    """Megatron on torch.optim.AdamW: no state dict of a fresh optimizer; after a load, one step tensor for all parameters."""
    without("adam", "per_group_steps")
    job, other = (Job(model, SMALL, base=False) for _ in range(2))
    (part,) = parts(job)
    assert type(part.optimizer) is torch.optim.AdamW
    fresh = said_by(job.optimizer.state_dict)
    for parameter in job.model.parameters():
        parameter.main_grad.fill_(1.0)
    job.optimizer.step()
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    shared = len({id(state["step"]) for state in part.optimizer.state.values()})
    wrong = round_trip(job, other, root)
    own = [state["step"] for state in parts(other)[0].optimizer.state.values()]
    return [fresh, shared, wrong, len(own) - len({id(step) for step in own}), {int(s) for s in own}]


def test_a_torch_adamw_has_its_own_steps(tiny_dir: Path, tmp_path: Path) -> None:
    (found,) = run_world(a_torch_adamw, 1, tiny_dir, tmp_path)
    assert found == ["AssertionError: ", 1, [], 0, {3}]


def b_fp32_views(model: Path, root: Path) -> list[Any]:
    """fp32 factors: the load copies into a view of a leaf outside no_grad."""
    without("optimizer_load", "per_group_steps")
    job, other = (Job(model, SMALL, base=False) for _ in range(2))
    job.fill(1)
    other.fill(2)
    state = parts(job)[0].get_parameter_state_dp_reshardable()
    for buckets in (dtypes for key, dtypes in state.items() if isinstance(key, int)):
        for held in (held for bucket in buckets.values() for of in bucket for held in of):
            held["padding"] = False  # as its sharded form says
    loaded = said_by(lambda: parts(other)[0].load_parameter_state_from_dp_reshardable(state))
    return [loaded, round_trip(job, other, root)]


def test_b_fp32_factors_are_loaded_in_place(tiny_dir: Path, tmp_path: Path) -> None:
    (found,) = run_world(b_fp32_views, 1, tiny_dir, tmp_path)
    assert "a view of a leaf Variable that requires grad" in found[0]
    assert found[1] == []


TINY = {"rank": 1, "alpha": 1, "lora_target_modules": ["model.layers.1.mlp.experts.gate_proj"]}


def c_empty_bucket(model: Path, root: Path) -> list[Any]:
    """A rank whose share of a bucket is padding alone."""
    one = TINY | {"lora_target_modules": ["lm_head"]}  # 448 elements, padded to 8 shares of 64
    job, other = (Job(model, one, base=False, layout={"ep": 1}) for _ in range(2))
    job.fill(1)
    held = len(job.optimizer_tensors())
    return [held, said_by(lambda: upstream(job, "dp_reshardable")), round_trip(job, other, root)]


def test_c_a_rank_may_hold_nothing_of_a_bucket(tiny_dir: Path, tmp_path: Path) -> None:
    found = run_world(c_empty_bucket, 8, tiny_dir, tmp_path, timeout=120)
    assert any("empty bucket encountered" in said for _, said, _ in found)
    assert [wrong for _, _, wrong in found] == [[]] * 8


def d_many_buckets(model: Path, root: Path) -> list[Any]:
    """More than one bucket: the fully reshardable state is shifted and padded with zeros."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.core.optimizer.distrib_optimizer").addHandler(handler)
    job, other = (
        rewrap(
            Job(model, SMALL | {"rank": 3}, base=False), overlap_grad_reduce=True, bucket_size=300
        )
        for _ in range(2)
    )
    buckets = sum(len(buffer.buckets) for buffer in parts(job)[0].buffers)
    job.fill(1)
    upstream(job, "fully_reshardable")
    return [buckets, any("data corruption" in text for text in told), round_trip(job, other, root)]


def test_d_several_buckets_are_read_right(tiny_dir: Path, tmp_path: Path) -> None:
    (found,) = run_world(d_many_buckets, 1, tiny_dir, tmp_path)
    assert found[0] > 1
    assert found[1:] == [True, []]


def mixed(model: Path) -> Job:
    """Every second pair in bf16."""
    from megatron_xorl.layers.attach import lora_pairs

    job = Job(model, SMALL, base=False)
    for number, pair in enumerate(lora_pairs(job.model)):
        if number % 2 == 0:
            pair.to(torch.bfloat16)
    return rewrap(job, bf16=True)


def e_mixed_dtypes(model: Path) -> list[Any]:
    """Two dtypes in one group: upstream's index of masters names the wrong ones."""
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.training.optimizer_state import gather_state, scatter_state

    job = mixed(model)
    (part,) = parts(job)
    factors = {name: p for name, (_, _, p) in named_factors(job.model).items()}
    odd = [
        name
        for name, parameter in factors.items()
        if part._get_main_param_and_optimizer_states(parameter)["param"].numel()
        != parameter.numel()
    ]
    torch.manual_seed(5)
    drawn = {n: torch.randn(3, *p.shape).abs() for n, p in factors.items()}
    with torch.no_grad():
        for name, parameter in factors.items():
            parameter.copy_(drawn[name][0])
    state = {
        n: dict(zip(("master", "exp_avg", "exp_avg_sq"), s, strict=True)) for n, s in drawn.items()
    }
    scatter_state(job.optimizer, factors, state, dict.fromkeys(factors, 3))
    wrong = [n for n, s in gather_state(job.optimizer, factors) if not torch.equal(s, drawn[n])]
    index = [
        name
        for name, parameter in factors.items()
        if part._get_main_param_and_optimizer_states(parameter)["param"].numel()
        != parameter.numel()
    ]
    return [bool(odd), wrong, index]


def test_e_factors_of_two_dtypes_have_their_own_masters(tiny_dir: Path) -> None:
    assert run_world(e_mixed_dtypes, 1, tiny_dir) == [[True, [], []]]


def f_plain_bf16_optimizer(model: Path, root: Path) -> list[Any]:
    """Without the distributed optimizer: fp32 factors under the bf16 optimizer cannot be saved."""
    job, other = (
        rewrap(Job(model, SMALL, base=False), bf16=True, distributed=False) for _ in range(2)
    )
    job.fill(1)
    said = said_by(lambda: upstream(job, "none"))
    half = [
        rewrap(Job(model, SMALL, base=False, bf16=True), bf16=True, distributed=False)
        for _ in range(2)
    ]
    plain = [rewrap(Job(model, SMALL, base=False), distributed=False) for _ in range(2)]
    return [said, type(parts(job)[0]).__name__, type(parts(plain[0])[0]).__name__] + [
        round_trip(*jobs, root / str(number))
        for number, jobs in enumerate(((job, other), half, plain))
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_f_the_plain_optimizers_are_saved_and_loaded(
    tiny_dir: Path, tmp_path: Path, world: int
) -> None:
    for found in run_world(f_plain_bf16_optimizer, world, tiny_dir, tmp_path):
        assert found[0] != "nothing"
        assert found[1:3] == ["Float16OptimizerWithFloat16Params", "FP32Optimizer"]
        assert found[3:] == [[], [], []]


def g_stub(model: Path, root: Path) -> list[Any]:
    """An expert-only scope: the dense sub-optimizer is a stub."""
    without("per_group_steps")
    per_expert = TINY | {"glm52_lora_scope": "routed_experts"}
    job = Job(model, per_expert, base=False)
    for parameter in job.model.parameters():  # only what each expert has for itself trains
        parameter.requires_grad_(not parameter.allreduce)
    job = rewrap(job)
    stubs = [getattr(part, "is_stub_optimizer", False) for part in parts(job)]
    said = said_by(job.optimizer._synchronize_steps) if len(stubs) > 1 else "one optimizer"
    from megatron_xorl.parallel.step_patches import _common_step

    assert _common_step(job.optimizer) is None
    return [stubs, said, mx.materialize_adam_state(job.optimizer) >= 0]


def test_g_an_empty_sub_optimizer_is_passed_over(tiny_dir: Path, tmp_path: Path) -> None:
    for stubs, said, materialised in run_world(g_stub, 2, tiny_dir, tmp_path):
        assert (stubs, materialised) == ([True, False], True)
        assert "AttributeError" in said


def h_save(model: Path, root: Path) -> int:
    job = Job(model, SMALL, base=False)
    job.fill(1)
    job.save(root, 3)
    return len(parts(job))


def h_load(model: Path, root: Path, entries: int) -> list[Any]:
    job = Job(model, SMALL, base=False)
    job.fill(2)
    told = said_by(lambda: job.optimizer.load_state_dict([{}] * entries))
    assert job.load(root) == 3
    return [told, [str(found) for found in mx.compare_states(root, live(job))]]


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)])
def test_h_another_expert_parallel_size_is_a_plain_load(
    tiny_dir: Path, tmp_path: Path, before: int, now: int
) -> None:
    entries = run_world(h_save, before, tiny_dir, tmp_path)[0]
    for said, wrong in run_world(h_load, now, tiny_dir, tmp_path, entries):
        assert said != "nothing"
        assert wrong == []
