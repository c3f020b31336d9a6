"""The run configuration: keys, paths, overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.run import RunConfig, load_run_config
from megatron_xorl.errors import ConfigError


def run_values() -> dict[str, Any]:
    return {
        "model": {"path": "tiny", "dtype": "fp32"},
        "adapter": "adapter.yaml",
        "data": {"train": "../data/chat.jsonl", "seq_length": 128, "repeat": True},
        "parallel": {"ep": 2},
        "optimizer": {"lr": "3e-3"},
        "schedule": {"steps": 80, "warmup": 10, "final": 0.05},
        "batch": {"micro": 1, "global": 2},
        "checkpoint": {"interval": 40},
        "output": "runs/first",
        "megatron_args": {"--log-interval": 1, "eval_iters": 0, "nothing": None},
    }


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "adapter.yaml").write_text("rank: 16\nalpha: 32\n")
    (folder / "run.yaml").write_text(yaml.safe_dump(run_values()))
    return folder / "run.yaml"


def refused(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_paths_are_relative_to_the_folder_of_the_file(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    run = load_run_config(run_file)
    folder = run_file.parent
    assert Path(run.model.path) == folder / "tiny"
    assert Path(run.data.train).resolve() == folder.parent / "data" / "chat.jsonl"
    assert run.checkpoint_dir == folder / "runs" / "first" / "checkpoints"
    assert load_run_config(run_file, ["checkpoint.dir=/kept"]).checkpoint_dir == Path("/kept")


def test_values_and_defaults_are_read(run_file: Path) -> None:
    run = load_run_config(run_file)
    assert run.adapter == AdapterConfig(rank=16, alpha=32)
    assert run.optimizer.lr == 3e-3
    assert (run.optimizer.betas, run.optimizer.weight_decay, run.optimizer.clip) == (
        (0.9, 0.95),
        0.01,
        1.0,
    )
    assert (run.batch.micro, run.batch.global_) == (1, 2)
    assert (run.parallel.tp, run.parallel.ep) == (1, 2)
    assert (run.data.truncate, run.data.repeat, run.data.template) == (False, True, "glm")
    assert run.megatron_args == {"log_interval": 1, "eval_iters": 0, "nothing": None}


def test_what_was_resolved_can_be_written_and_read_again(run_file: Path, tmp_path: Path) -> None:
    run = load_run_config(run_file)
    again = tmp_path / "run.yaml"
    again.write_text(yaml.safe_dump(run.to_dict()))
    assert load_run_config(again) == run


def test_overrides_reach_every_level_and_an_adapter_in_its_own_file(run_file: Path) -> None:
    run = load_run_config(
        run_file,
        [
            "schedule.steps=4e1",
            "adapter.rank=4",
            "adapter.targets=['*.o_proj']",
            "seed=7",
            "optimizer.betas=[0.8, 0.9]",
        ],
    )
    assert (run.schedule.steps, run.seed, run.optimizer.betas) == (40, 7, (0.8, 0.9))
    assert run.adapter == AdapterConfig(rank=4, alpha=32, targets=["*.o_proj"])
    assert load_run_config(run_file).adapter.rank == 16


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("modle.path=x", "did you mean 'model'"),
        ("optimizer.leraning_rate=1", "unknown key 'optimizer.leraning_rate'"),
        ("batch.globl=1", "did you mean 'global'"),
        ("adapter.rnak=1", "did you mean 'rank'"),
        ("schedule.warmup=81", "longer than the 80 steps"),
        ("schedule.steps=0", "expected at least 1"),
        ("schedule.steps=1.5", "expected a whole number"),
        ("schedule.final=2", "fraction of the learning rate"),
        ("schedule.decay=cosin", "did you mean 'cosine'"),
        ("optimizer.lr=fast", "expected a finite number"),
        ("optimizer.lr=-1", "expected at least 0"),
        ("optimizer.betas=0.9", "expected two numbers"),
        ("optimizer.betas=[0.9, 1.0]", "less than 1"),
        ("optimizer=3", "expected a mapping with keys lr"),
        ("model.path=on", "the boolean true"),
        ("model.dtype=fp16", "expected one of bf16, fp32"),
        ("data.repeat=1", "expected true or false"),
        ("parallel.ep=0", "expected at least 1"),
        ("checkpoint.keep_last=0", "expected at least 1"),
        ("adapter.targets=[*.x]", "quote the pattern"),
        ("seed.x=1", "seed: found"),
        ("schedule.steps.x=1", "has no keys"),
        ("steps", "expected key=value"),
        ("=3", "expected key=value"),
        ("adapter=other.yaml", "cannot be read"),
        ("megatron_args=3", "expected a mapping"),
        ("megatron_args.log-interval=3", "two spellings"),
    ],
)
def test_a_wrong_value_is_refused_by_name(run_file: Path, override: str, says: str) -> None:
    assert says in refused(run_file, override)


def test_a_global_batch_is_a_multiple_of_the_micro_batch(run_file: Path) -> None:
    assert load_run_config(run_file, ["batch.micro=2"]).batch.micro == 2
    assert "expected a multiple of micro (2)" in refused(
        run_file, "batch.micro=2", "batch.global=3"
    )


@pytest.mark.parametrize(
    "key", ["model", "adapter", "data", "optimizer", "schedule", "batch", "output"]
)
def test_a_missing_section_is_named(run_file: Path, key: str) -> None:
    values = {name: value for name, value in run_values().items() if name != key}
    run_file.write_text(yaml.safe_dump(values))
    assert f"{key} is missing" in refused(run_file)


def test_a_run_may_carry_its_adapter_inline() -> None:
    run = RunConfig.from_dict(run_values() | {"adapter": {"rank": 2, "lora_alpha": "4"}})
    assert run.adapter.scale_for("lm_head") == 2.0
    with pytest.raises(ConfigError, match="run: adapter: alpha is missing"):
        RunConfig.from_dict(run_values() | {"adapter": {"rank": 2}})
