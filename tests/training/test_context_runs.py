"""Runs under context parallelism: the entry, the launcher, checkpoints that change hands, and layouts held to one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_xorl.errors import LayoutError
from tests.training.comparison import LIMITS, Outcome, beyond_limits, difference, relative
from tests.training.harness import Job, run_layout
from tests.training.test_checkpoint import read_tensors, wrong_values
from tests.training.test_pretrain import (
    arguments,
    environment,
    foreign,
    inputs,
    metrics,
    ours,
    run,
)
from tests.workers.adapter_job import Job as AdapterJob
from tests.worlds import run_world

__all__ = ["inputs"]  # a fixture

pytestmark = pytest.mark.dist

ADAPTER = {"rank": 4, "alpha": 8}
ROOT = Path(__file__).resolve().parents[2]


def held(one: Outcome, other: Outcome) -> None:
    worst = difference(one, other)
    print("; ".join(f"{kind} {figure:.1e} {at}" for kind, (figure, at) in worst.items()))
    assert not beyond_limits(worst), worst
    assert one.choices.keys() == other.choices.keys()
    assert all(torch.equal(other.choices[key], chosen) for key, chosen in one.choices.items())


def test_one_step_on_two_context_ranks_equals_one_process(tiny_dir: Path) -> None:
    job = Job(str(tiny_dir), ADAPTER, steps=1, keep=(1,))
    one = run_layout(job)
    held(one, run_layout(replace(job, layout={"cp": 2, "ep": 2}, world=2), states=one.states))


@pytest.fixture(scope="module")
def whole(
    inputs: Path, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """Folders of uninterrupted runs of five iterations of four microbatches on one and on two context ranks."""
    folders = {}
    for cp in (1, 2):
        folders[cp] = tmp_path_factory.mktemp(f"cp{cp}")
        words = [*arguments(inputs, tiny_dir, folders[cp]), "--context-parallel-size", str(cp)]
        run(ours, cp, words)
    return folders


def numbers(folder: Path, name: str, first: int = 1) -> list[float]:
    return [line[name] for line in metrics(folder) if line["iteration"] >= first]


@pytest.mark.slow
def test_our_entry_trains_on_two_context_ranks_as_on_one(whole: dict[int, Path]) -> None:
    assert len(numbers(whole[1], "loss")) == 5
    for name in ("loss", "grad_norm"):
        # The limits between layouts, in a run whose learning rate is ten times the layouts'.
        assert numbers(whole[2], name) == pytest.approx(numbers(whole[1], name), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_context_ranks(
    inputs: Path, tiny_dir: Path, whole: dict[int, Path], tmp_path: Path, saved: int, resumed: int
) -> None:
    shutil.copytree(
        whole[saved] / "checkpoints/iter_0000002", tmp_path / "checkpoints/iter_0000002"
    )
    (tmp_path / "checkpoints/latest").write_text("2\n")
    words = [*arguments(inputs, tiny_dir, tmp_path), "--context-parallel-size", str(resumed)]
    run(ours, resumed, words)
    assert [line["iteration"] for line in metrics(tmp_path)] == [3, 4, 5]
    for name in ("loss", "grad_norm"):
        expected = numbers(whole[saved], name, 3)
        assert numbers(tmp_path, name) == pytest.approx(expected, rel=1e-5)


def fill_and_save(model: Path, root: Path, layout: dict[str, int]) -> None:
    job = AdapterJob(model, ADAPTER, base=False, bf16=True, layout=layout)
    job.fill(1)
    job.save(root, 3)


def load_and_save(model: Path, root: Path, other: Path, layout: dict[str, int]) -> None:
    job = AdapterJob(model, ADAPTER, base=False, bf16=True, layout=layout)
    job.fill(7)
    assert job.load(root) == 3
    job.save(other, 3)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_the_state_in_a_checkpoint_is_the_same_bytes_whatever_cp_saved_or_loaded_it(
    tiny_dir: Path, tmp_path: Path, first: int, second: int
) -> None:
    roots = tmp_path / "first", tmp_path / "second"
    run_world(fill_and_save, first, tiny_dir, roots[0], {"cp": first})
    run_world(load_and_save, second, tiny_dir, *roots, {"cp": second})
    for root in roots:
        assert wrong_values(root / "iter_0000003", ADAPTER, 1) == []
    one, other = (read_tensors(root / "iter_0000003") for root in roots)
    state = {name for name in one if "lora_" in name}
    assert len(state) > 300 and state == {name for name in other if "lora_" in name}
    assert all(torch.equal(one[name], other[name]) for name in state)
    manifests = [json.loads((root / "iter_0000003/manifest.json").read_text()) for root in roots]
    assert [manifest["layout"]["cp"] for manifest in manifests] == [first, second]


@pytest.mark.slow
def test_a_run_configuration_trains_on_context_ranks_from_the_command_line(
    inputs: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    losses = []
    for cp in (1, 2):
        document = {
            "model": {"path": str(tiny_dir), "dtype": "fp32"},
            "adapter": ADAPTER,
            "data": {"train": str(inputs / "train.jsonl"), "seq_length": 48},
            "parallel": {"cp": cp, "ep": cp},
            "optimizer": {"lr": 2e-3},
            "schedule": {"steps": 3, "warmup": 1},
            "batch": {"micro": 2, "global": 4},
            "output": str(tmp_path / f"out{cp}"),
        }
        (tmp_path / f"run{cp}.yaml").write_text(json.dumps(document))
        command = [
            sys.executable,
            "-m",
            "megatron_xorl.cli",
            "train",
            str(tmp_path / f"run{cp}.yaml"),
        ]
        done = subprocess.run(
            [*command, "--nproc", str(cp)],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append(numbers(tmp_path / f"out{cp}", "loss"))
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def refused_generation(directory: str) -> list[str]:
    from megatron_xorl.training.generation import cached_logits, generate, new_cache
    from tests.layers.context_case import start

    model, said = start(directory, {"cp": 2}), []
    ids = torch.arange(16).unsqueeze(0)
    for call in (
        lambda: generate(model, ids, max_new_tokens=2),
        lambda: cached_logits(model, ids, ids, new_cache(20), torch.tensor([15])),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_generation_on_context_ranks_is_refused(tiny_dir: Path) -> None:
    for said in run_world(refused_generation, 2, str(tiny_dir)):
        assert "context parallel size 2; use cp=1" in said[0]
        assert "a generation cache holds whole rows" in said[1]


@pytest.mark.slow
def test_a_script_that_cuts_its_batch_with_megatrons_function_trains_as_on_one_rank(
    inputs: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    states = []
    for cp in (1, 2):
        folder = tmp_path / str(cp)
        words = ["--train-iters", "1", "--save", str(folder), "--save-interval", "1"]
        words += ["--context-parallel-size", str(cp)]
        run(foreign, cp, words, env=environment(inputs, tiny_dir))
        states.append(read_tensors(folder / "iter_0000001"))
    # After one step the first moment is the gradient; that of A is zero, since B was.
    names = [name for name in states[0] if name.startswith("exp_avg/") and name.endswith("_B")]
    assert len(names) == 42
    for name in names:
        assert relative(states[1][name], states[0][name]) <= LIMITS["gradient"], name
        assert states[0][name].any()


def split_of_a_launch(directory: Path, packs: bool) -> str:
    from argparse import Namespace

    import megatron_xorl.training.launch as launcher
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.layers.context import split_of
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.model import build_model
    from megatron_xorl.weights.opening import open_checkpoint

    use_cpu()
    initialize()
    launcher.get_args = lambda: Namespace(save=None, sft=packs)
    glm = load_glm_config(directory)
    launch = launcher.Launch(
        directory, glm, AdapterConfig(**ADAPTER), open_checkpoint(directory), seed=1, keep_last=None
    )
    (model,) = launch.prepare([build_model(glm, dtype=torch.float32)])
    return split_of(model).kind


@pytest.mark.parametrize(("packs", "kind"), [(True, "documents"), (False, "zigzag")])
def test_a_launch_knows_how_megatron_cuts_its_batches(
    tiny_dir: Path, packs: bool, kind: str
) -> None:
    assert run_world(split_of_a_launch, 1, tiny_dir, packs) == [kind]
