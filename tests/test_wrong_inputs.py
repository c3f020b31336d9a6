"""Wrong inputs of a training run: one clear line on stderr, exit 2, nothing written.

Every case starts from the same small run, which is accepted; that is the control.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_xorl.cli import main
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.config.run import load_run_config
from megatron_xorl.convert.tiny import make_tiny
from megatron_xorl.training.resume import run_identity
from megatron_xorl.weights.fingerprint import fingerprint
from megatron_xorl.weights.manifest import describe_files, write_manifest
from megatron_xorl.weights.reader import HfCheckpoint

WEIGHT = "model.layers.1.self_attn.q_a_proj.weight"


@dataclass
class Run:
    """A run on disk: change its files or its YAML text."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def yaml(self) -> Path:
        return self.folder / "run.yaml"

    def set(self, **sections: dict[str, Any]) -> None:
        document = yaml.safe_load(self.yaml.read_text())
        for name, values in sections.items():
            document[name] = {**document.get(name, {}), **values}
        self.yaml.write_text(yaml.safe_dump(document))

    def replace(self, old: str, new: str) -> None:
        text = self.yaml.read_text()
        assert old in text
        self.yaml.write_text(text.replace(old, new))

    def shard(self, tensor: str) -> Path:
        index = json.loads((self.model / "model.safetensors.index.json").read_text())
        return self.model / index["weight_map"][tensor]

    def rewrite(self, tensor: str, value: torch.Tensor | None) -> None:
        """Give a tensor another value, or take it out of its shard and the index."""
        shard = self.shard(tensor)
        with safe_open(str(shard), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors.pop(tensor)
        if value is not None:
            tensors[tensor] = value
        else:
            path = self.model / "model.safetensors.index.json"
            index = json.loads(path.read_text())
            index["weight_map"].pop(tensor)
            path.write_text(json.dumps(index))
        save_file(tensors, shard, metadata={"format": "pt"})

    def checkpoint(self) -> None:
        """Lay a checkpoint of this run, without tensors, where the run resumes from."""
        run = load_run_config(self.yaml)
        directory = self.folder / "out/checkpoints/iter_0000003"
        directory.mkdir(parents=True)
        (directory / "__0_0.distcp").write_bytes(b"factors")
        identity = run_identity(
            fingerprint(load_glm_config(self.model), HfCheckpoint(self.model)),
            run.adapter,
            run.seed,
        )
        files = describe_files(directory, ["__0_0.distcp"])
        scheduler = {
            "max_lr": run.optimizer.lr,
            "lr_warmup_steps": run.schedule.warmup * run.batch.global_,
            "lr_decay_steps": run.schedule.steps * run.batch.global_,
            "lr_decay_style": run.schedule.decay,
        }
        rest = {"format_version": 1, "iteration": 3, "files": files, "scheduler": scheduler}
        write_manifest(directory, identity | rest)
        (directory.parent / "latest").write_text("3\n")

    def other_schedule(self) -> None:
        self.checkpoint()
        self.set(schedule={"steps": 7})

    def other_base(self) -> None:
        self.checkpoint()
        shutil.rmtree(self.model)
        make_tiny(self.model, seed=1)


@pytest.fixture
def run(tiny_dir: Path, tmp_path: Path) -> Run:
    shutil.copytree(tiny_dir, tmp_path / "model")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Kx7"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    document = {
        "model": {"path": "model", "dtype": "fp32"},
        "adapter": {"rank": 4, "alpha": 8},
        "data": {"train": "train.jsonl", "seq_length": 48, "repeat": True},
        "parallel": {"ep": 2},
        "optimizer": {"lr": "1e-3"},
        "schedule": {"steps": 4},
        "batch": {"micro": 1, "global": 2},
        "output": "out",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    return Run(tmp_path)


def train(
    run: Run, capsys: pytest.CaptureFixture[str], nproc: int = 2, dry: bool = False
) -> tuple[int, str, str]:
    """Run ``megatron-xorl train`` in this process; a refusal comes before anything is launched."""
    flags = ["--dry-run", "--json"] if dry else []
    with pytest.raises(SystemExit) as left:
        main(["train", str(run.yaml), "--nproc", str(nproc), *flags])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


CASES: dict[str, tuple[Callable[[Run], Any], tuple[str, ...]]] = {
    "missing shard": (
        lambda run: run.shard(WEIGHT).unlink(),
        ("safetensors", "missing"),
    ),
    "truncated shard": (
        lambda run: os.truncate(run.shard(WEIGHT), 5000),
        ("safetensors", "truncated"),
    ),
    "FP8 without scale": (
        lambda run: run.rewrite(f"{WEIGHT}_scale_inv", None),
        (WEIGHT, "scale"),
    ),
    "grid mismatch": (
        lambda run: run.rewrite(f"{WEIGHT}_scale_inv", torch.ones(4, 5)),
        (WEIGHT, "[4, 5]", "[4, 4]"),
    ),
    "unknown key": (
        lambda run: run.set(schedule={"step": 40}),
        ("schedule.step", "steps"),
    ),
    "unquoted glob": (
        lambda run: run.replace("  rank: 4\n", "  rank: 4\n  targets: [*.self_attn.q_a_proj]\n"),
        ("quote the pattern",),
    ),
    "scope: on": (
        lambda run: run.replace("  rank: 4\n", "  rank: 4\n  scope: on\n"),
        ("scope", "routed_experts"),
    ),
    "a target that matches nothing": (
        lambda run: run.set(adapter={"targets": ["q_proj"]}),
        ("'q_proj'", "q_a_proj"),
    ),
    "shared_expert for shared_experts": (
        lambda run: run.set(adapter={"targets": ["*.shared_expert.*_proj"]}),
        ("*.shared_expert.*_proj", "shared_experts"),
    ),
    "a world that EP does not divide": (lambda run: None, ("world", "ep", "3")),
    "a resume from another base": (
        Run.other_base,
        ("is of another run", "base.fingerprint"),
    ),
    "a resume with another schedule": (
        Run.other_schedule,
        ("was trained on another schedule", "schedule.steps: checkpoint 4, this run 7"),
    ),
    "a resume with another rank": (
        lambda run: (run.checkpoint(), run.set(adapter={"rank": 2})),
        ("adapter.rank: checkpoint has 4, this run has 2",),
    ),
    "a resume from a truncated file": (
        lambda run: (
            run.checkpoint(),
            os.truncate(run.folder / "out/checkpoints/iter_0000003/__0_0.distcp", 3),
        ),
        ("__0_0.distcp has 3 bytes, the manifest says 7",),
    ),
    "dropout": (
        lambda run: run.set(adapter={"dropout": 1.5}),
        ("dropout is 1.5, expected 0 or more and less than 1",),
    ),
    "indexer: kl": (
        lambda run: run.set(adapter={"indexer": "kl"}),
        ("indexer is kl", "not available yet"),
    ),
    "no data": (
        lambda run: (run.folder / "train.jsonl").unlink(),
        ("train.jsonl", "does not exist"),
    ),
    "a sample that is too long": (
        lambda run: run.set(data={"seq_length": 8}),
        ("train.jsonl", "data.truncate"),
    ),
    "context parallel": (
        lambda run: run.set(parallel={"cp": 2}, data={"seq_length": 201}),
        ("data.seq_length", "cp 2", "multiple of 4", "nearest legal: 200"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_input_is_one_clear_line_and_exit_2_and_nothing_is_written(
    case: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it, expected = CASES[case]
    break_it(run)
    before = listing(run.folder)
    code, out, err = train(run, capsys, nproc=3 if "world" in case else 2)
    assert (code, out) == (2, ""), err
    assert err.startswith("megatron-xorl: ")
    assert err.count("\n") == 1, err
    for text in expected:
        assert text in err
    assert listing(run.folder) == before


def test_the_run_that_they_all_start_from_is_accepted(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    # Its learning rate is the string that YAML makes of 1e-3 in a quoted or exponent form.
    code, out, _ = train(run, capsys, dry=True)
    command = json.loads(out)["command"]
    assert code == 0
    assert command[command.index("--lr") + 1] == "0.001"
    run.replace("lr: 1e-3", "lr: 1e-4") if "lr: 1e-3" in run.yaml.read_text() else run.replace(
        "lr: '1e-3'", "lr: 1e-4"
    )
    code, out, _ = train(run, capsys, dry=True)
    command = json.loads(out)["command"]
    assert (code, command[command.index("--lr") + 1]) == (0, "0.0001")


def test_a_checkpoint_of_the_same_run_is_accepted_wherever_base_and_run_lie(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.checkpoint()
    moved = Run(tmp_path.with_name(tmp_path.name + " moved"))
    shutil.copytree(tmp_path, moved.folder)
    for place in (run, moved):
        assert train(place, capsys, dry=True)[0] == 0
