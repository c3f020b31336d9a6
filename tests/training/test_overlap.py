"""Gradients reduced and parameters gathered while the model computes give the same training as one after the other.

Combinations with the other axes and with recompute are rows of ``tests/layouts/rows.py``.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.comparison import Outcome, beyond_limits, difference
from tests.training.harness import Job, Trainer, run_layout
from tests.training.test_pretrain import arguments, differing, inputs, metrics, ours, run
from tests.training.test_virtual_stages import write_model
from tests.worlds import run_world

__all__ = ["inputs"]  # a fixture

pytestmark = pytest.mark.dist

ADAPTER = {"rank": 4, "alpha": 8}
KV_B = {"rank": 4, "alpha": 8, "lora_target_modules": ["kv_b_proj"], "frozen_factors": "drop"}
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}
"""A bucket is a small part of the factors here, so that there are several to overlap."""
LAYOUTS = [pytest.param({}, id="dp2"), pytest.param({"ep": 2}, id="ep2")]


def figures(one: Outcome, other: Outcome) -> dict[str, tuple[float, str]]:
    worst = difference(one, other)
    print(
        "\n" + "\n".join(f"{kind:10s} {figure:.1e}  {at}" for kind, (figure, at) in worst.items())
    )
    return worst


@pytest.fixture(scope="module")
def one_process(tiny_dir: Path) -> Outcome:
    """Twenty steps in one process."""
    return run_layout(Job(str(tiny_dir), ADAPTER, global_batch=4))


@pytest.mark.layouts
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_with_overlap_equal_those_without(
    layout: dict[str, int], tiny_dir: Path, one_process: Outcome
) -> None:
    job = Job(str(tiny_dir), ADAPTER, global_batch=4, layout=layout, world=2)
    plain = run_layout(job, one_process.states)
    overlapped = run_layout(replace(job, ddp=BOTH), one_process.states)
    # Two ranks: every sum has two terms, whatever the buckets, so nothing may differ but the norm's order of summing.
    worst = figures(plain, overlapped)
    assert worst["gradient"][0] == 0
    assert not beyond_limits(worst), worst
    assert not beyond_limits(figures(one_process, overlapped))


WORDS = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"]
VIRTUAL = [
    *("--pipeline-model-parallel-size", "2"),
    *("--num-virtual-stages-per-pipeline-rank", "2"),
]


@pytest.mark.layouts
@pytest.mark.parametrize("deep", [False, True], ids=["dp2", "pp2,vpp2,dp2"])
def test_our_entry_overlaps_and_resumes_exactly(
    deep: bool, inputs: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model") if deep else tiny_dir
    world, sizes = (4, VIRTUAL) if deep else (2, [])
    folders = plain, whole, again = [tmp_path / name for name in ("plain", "whole", "again")]
    for folder in folders:
        folder.mkdir()
    run(ours, world, [*arguments(inputs, model, plain), *sizes])
    words = [*sizes, *WORDS, "--check-replicas", "1"]
    run(ours, world, [*arguments(inputs, model, whole), *words])
    for one, two in zip(metrics(plain), metrics(whole), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-6)
    shutil.copytree(whole / "checkpoints/iter_0000002", again / "checkpoints/iter_0000002")
    (again / "checkpoints/latest").write_text("2\n")
    run(ours, world, [*arguments(inputs, model, again), *words])
    assert metrics(again) == metrics(whole)[2:]
    last = "checkpoints/iter_0000005"
    assert differing(again / last, whole / last) == []


def trained(job: Job, gathered: bool) -> tuple[list[float], str]:
    """Losses of a free run, and what the replica check says of its end; ``gathered`` False takes our calls away."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(**job.layout)
    from megatron_xorl.errors import ReplicaError
    from megatron_xorl.training import model, replicas

    if not gathered:
        model.gather_before_use = replicas.gather_now = lambda models: None
    trainer = Trainer(job)
    losses = []
    for step in range(1, job.steps + 1):
        losses.append(trainer.forward_backward(step))
        trainer.update(step)
    try:
        replicas.check_replicas(trainer.chunks)
    except ReplicaError as error:
        return losses, str(error)
    return losses, ""


def test_an_adapter_of_kv_b_alone_is_gathered_before_it_is_read_and_stale_weights_are_caught(
    tiny_dir: Path,
) -> None:
    job = Job(str(tiny_dir), KV_B, steps=6, lr=1e-2, warmup=1, world=2, seq=24)
    plain, said = run_world(trained, 2, job, True, timeout=120)[0]
    assert said == ""
    job = replace(job, ddp=BOTH | {"bucket_size": 1_000})
    assert run_world(trained, 2, job, True, timeout=120)[0] == (plain, "")
    # Without our calls nobody waits for the factors of kv_b_proj: each rank goes on with its own half of the update.
    stale, said = run_world(trained, 2, job, False, timeout=120)[0]
    assert stale[0] == plain[0]
    assert abs(stale[-1] - plain[-1]) > 1e-5 * plain[-1]
    assert "kv_b_proj.lora_B: rank 0 against rank 1" in said


@pytest.mark.layouts
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_gradients_are_fp32_ones_rounded_and_overlap_changes_no_bit(
    layout: dict[str, int], tiny_dir: Path
) -> None:
    job = Job(str(tiny_dir), ADAPTER, steps=2, keep=(1, 2), dtype="bfloat16")
    states = run_layout(job).states
    job = replace(job, layout=layout, world=2)
    wide, narrow, wide_overlapped, narrow_overlapped = (
        run_layout(replace(job, ddp={"grad_reduce_in_fp32": fp32, **overlap}), states)
        for overlap in ({}, BOTH)
        for fp32 in (True, False)
    )
    for plain, overlapped in ((wide, wide_overlapped), (narrow, narrow_overlapped)):
        worst = figures(plain, overlapped)
        # Factors may differ in a last bit: the norm, by which gradients are clipped, is summed bucket by bucket.
        assert worst["gradient"][0] == 0
        assert not beyond_limits(worst), worst
    assert next(iter(wide.gradients["random"].values())).dtype == torch.float32
    assert next(iter(narrow.gradients["random"].values())).dtype == torch.bfloat16
    # One microbatch a rank: a bf16 gradient is rounded when two ranks are summed and when it is divided by the number of
    # tokens, each time by at most 2^-9 of an element.
    for state, found in narrow.gradients.items():
        for name, gradient in found.items():
            exact = wide.gradients[state][name].double()
            assert (gradient.double() - exact).norm() <= 2**-8 * 1.01 * exact.norm(), (state, name)
