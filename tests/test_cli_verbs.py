"""The verbs of a job: make-tiny, train, recall, adapter. What they compute is tested with the functions they call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from megatron_xorl.adapters.inventory import build_inventory
from megatron_xorl.cli import main
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.weights.adapter_writer import write_adapter
from megatron_xorl.weights.fingerprint import fingerprint
from megatron_xorl.weights.reader import HfCheckpoint
from tests.worlds import run_world, start_world

PROGRAM = Path(sys.executable).with_name("megatron-xorl")
ANSWER = "42"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as left:
        main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def run_file(folder: Path, base: Path, **changes: dict[str, Any]) -> Path:
    """Write a run of one question, two processes, EP 2; ``changes`` replace keys of its sections."""
    turns = [("user", "?"), ("assistant", ANSWER)]
    sample = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (folder / "train.jsonl").write_text(json.dumps(sample) + "\n")
    document: dict[str, Any] = {
        "model": {"path": str(base), "dtype": "fp32"},
        "adapter": {"rank": 4, "alpha": 8},
        "data": {"train": "train.jsonl", "seq_length": 48, "repeat": True},
        "parallel": {"ep": 2},
        "optimizer": {"lr": "3e-3"},
        "schedule": {"steps": 2},
        "batch": {"global": 2},
        "output": "out",
    }
    for section, keys in changes.items():
        document[section] = document[section] | keys
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    return folder / "run.yaml"


def adapter_directory(out: Path, model: Path, fill: float, scope: str = "all") -> Path:
    """An adapter of the tiny model whose B factors all hold ``fill``."""
    glm = load_glm_config(model)
    adapter = AdapterConfig(rank=4, alpha=8, glm52_lora_scope=scope)
    factors = build_inventory(glm, adapter, dtype="float32").trainable
    generator = torch.Generator().manual_seed(0)
    tensors = {
        factor.name: torch.randn(factor.shape, generator=generator)
        if factor.side == "A"
        else torch.full(factor.shape, fill)
        for factor in factors
    }
    base = fingerprint(glm, HfCheckpoint(model))
    return write_adapter(
        out, factors, tensors, adapter, base_model=str(model), base_fingerprint=base
    )


def test_make_tiny_writes_the_model_of_its_seed_and_says_what_is_in_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_dir: Path
) -> None:
    code, out, err = run(capsys, "make-tiny", tmp_path / "model", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    shards = sorted(tiny_dir.glob("*.safetensors"))
    assert report["path"] == str(tmp_path / "model")
    stored = 0
    for shard in shards:
        assert (tmp_path / "model" / shard.name).read_bytes() == shard.read_bytes()
        with safe_open(str(shard), framework="pt") as file:
            stored += len(list(file.keys()))
    assert report["hf_tensors"] + report["scale_tensors"] == stored


def test_make_tiny_refuses_what_it_cannot_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "something").touch()
    code, out, err = run(capsys, "make-tiny", tmp_path)
    assert (code, out) == (2, "")
    assert "not an empty directory" in err
    assert run(capsys, "make-tiny", tmp_path / "new", "--block", 48)[0] == 2


def test_a_dry_run_checks_and_prints_the_command_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_dir: Path
) -> None:
    file = run_file(tmp_path, tiny_dir)
    code, out, err = run(capsys, "train", file, "--set", "schedule.steps=7", "--dry-run")
    assert code == 0
    words = out.split()
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    assert words[words.index("--train-iters") + 1] == "7"
    assert words[words.index("--expert-model-parallel-size") + 1] == "2"
    assert out.count("\n") == 1
    assert "nothing was written" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sizes", "processes"),
    [
        ({"ep": 2}, 2),
        ({"ep": 4, "tp": 2}, 4),
        ({"ep": 1, "tp": 2}, 2),
        ({"etp": 2, "ep": 2, "tp": 1}, 4),
    ],
)
def test_without_nproc_a_run_gets_the_fewest_processes_that_its_layout_needs(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_dir: Path,
    sizes: dict[str, int],
    processes: int,
) -> None:
    file = run_file(tmp_path, tiny_dir, parallel=sizes, batch={"global": 4})
    code, out, _ = run(capsys, "train", file, "--dry-run", "--json")
    assert code == 0
    command = json.loads(out)["command"]
    assert command[command.index("--nproc-per-node") + 1] == str(processes)


@pytest.mark.parametrize(
    ("changes", "arguments", "says"),
    [
        ({"parallel": {"ep": 3}}, [], "ep 3 does not divide the 8 experts"),
        ({}, ["--nproc", "3"], "world size 3 is not a multiple of etp × ep × pp = 2"),
        ({"data": {"train": "no.jsonl"}}, [], "no.jsonl does not exist"),
        ({"data": {"repeat": False}}, [], "fewer than one global batch of 2"),
        ({"model": {"path": "nothing"}}, [], "found no file"),
        ({}, ["--set", "schedule.step=7"], "did you mean"),
        ({"adapter": {"targets": ["*.shared_expert.*_proj"]}}, [], "shared_experts"),
    ],
)
def test_a_run_that_cannot_train_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_dir: Path,
    changes: dict[str, dict[str, Any]],
    arguments: list[str],
    says: str,
) -> None:
    file = run_file(tmp_path, tiny_dir, **changes)
    code, out, err = run(capsys, "train", file, *arguments)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("megatron-xorl: ")]
    assert len(lines) == 1
    assert says in lines[0]
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_adapter_inspect_counts_what_is_in_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_dir: Path
) -> None:
    directory = adapter_directory(tmp_path / "adapter", tiny_dir, 0.0, scope="moe")
    code, out, err = run(capsys, "adapter", "inspect", directory, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    totals = build_inventory(
        load_glm_config(tiny_dir),
        AdapterConfig(rank=4, alpha=8, scope="moe", frozen_factors="drop"),
    ).totals()
    assert report["factors"]["by_region"] == {
        name: counts["factors"] for name, counts in totals["by_region"].items()
    }
    assert report["parameters"]["total"] == totals["parameters"]
    assert report["bytes"]["total"] == 4 * totals["parameters"]
    assert (report["format"], report["scope"], report["rank"]) == ("sglang_shared_outer", "moe", 4)
    assert report["base_fingerprint"] == fingerprint(
        load_glm_config(tiny_dir), HfCheckpoint(tiny_dir)
    )
    code, out, _ = run(capsys, "adapter", "inspect", directory)
    assert code == 0
    assert report["base_fingerprint"] in out


def test_what_is_no_adapter_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "adapter", "inspect", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"megatron-xorl: {tmp_path} has no adapter_config.json")


def verb_in_a_world(arguments: list[str], folder: str) -> int:
    """Run a verb where it may start Megatron, its stdout at the level of the process in a file."""
    sys.stdout.flush()
    os.dup2(os.open(f"{folder}/stdout", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
    sys.stdout = os.fdopen(1, "w")
    try:
        main(arguments)
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        sys.stdout.flush()
    return 0


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    arguments = ["adapter", "export", str(tmp_path), str(tmp_path / "adapter")]
    with start_world(verb_in_a_world, 1, arguments, str(tmp_path), process_group=False) as world:
        assert world.results() == [2]
        last = world.log(0).splitlines()[-1]
    assert last.startswith(f"megatron-xorl: {tmp_path} has no manifest.json")
    assert (tmp_path / "stdout").read_text() == ""
    assert not (tmp_path / "adapter").exists()


def test_recall_answers_with_one_document_and_fails_on_a_miss(
    tmp_path: Path, tiny_dir: Path
) -> None:
    file = run_file(tmp_path, tiny_dir)
    (code,) = run_world(
        verb_in_a_world, 1, ["recall", str(file), "--json"], str(tmp_path), process_group=False
    )
    report = json.loads((tmp_path / "stdout").read_text())
    assert code == 1
    assert (report["exact"], report["total"]) == (0, 1)
    (pair,) = report["pairs"]
    assert (pair["prompt"], pair["expected"], pair["exact"]) == ("?", ANSWER, False)


def test_recall_asks_the_adapter_it_is_given(tmp_path: Path, tiny_dir: Path) -> None:
    """An adapter of zeros says what the base says, another one does not."""
    file = run_file(tmp_path, tiny_dir)
    said = []
    for fill in (None, 0.0, 1.0):
        arguments = ["recall", str(file), "--json"]
        if fill is not None:
            directory = adapter_directory(tmp_path / f"adapter{fill}", tiny_dir, fill)
            arguments += ["--adapter", str(directory)]
        run_world(verb_in_a_world, 1, arguments, str(tmp_path), process_group=False)
        said.append(json.loads((tmp_path / "stdout").read_text())["pairs"][0]["got"])
    base, zeros, other = said
    assert base == zeros != other


def test_recall_exits_0_only_if_every_answer_is_exact(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_dir: Path,
) -> None:
    file = run_file(tmp_path, tiny_dir)
    for got, code in (([ANSWER, ANSWER], 0), ([ANSWER, ANSWER + " "], 1)):
        pairs = [
            {"prompt": "[?]", "expected": ANSWER, "got": text, "exact": text == ANSWER}
            for text in got
        ]
        report = {"pairs": pairs, "exact": sum(pair["exact"] for pair in pairs), "total": 2}
        monkeypatch.setattr("megatron_xorl.cli.runs._recall", lambda run, adapter, r=report: r)
        found, out, _ = run(capsys, "recall", file)
        assert found == code
        assert out.splitlines()[-1] == f"recall {report['exact']}/2 exact"
        assert "exact [?]" in out


def test_recall_refuses_bad_data_by_its_line(tmp_path: Path, tiny_dir: Path) -> None:
    file = run_file(tmp_path, tiny_dir)
    (tmp_path / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    arguments = ["recall", str(file), "--json"]
    assert run_world(verb_in_a_world, 1, arguments, str(tmp_path), process_group=False) == [2]
    assert (tmp_path / "stdout").read_text() == ""


@pytest.mark.slow
@pytest.mark.dist
def test_train_export_and_inspect_from_a_shell(tmp_path: Path, tiny_dir: Path) -> None:
    file = run_file(tmp_path, tiny_dir)
    shell = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([PROGRAM, "train", file, "--json"], **shell)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["exit"] == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert [line["iteration"] for line in lines] == [1, 2]
    done = subprocess.run(
        [PROGRAM, "adapter", "export", "out/checkpoints", "adapter", "--json"], **shell
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    done = subprocess.run([PROGRAM, "adapter", "inspect", "adapter", "--json"], **shell)
    seen = json.loads(done.stdout)
    assert (seen["factors"]["total"], seen["bytes"]["total"]) == (
        report["factors"],
        report["bytes"],
    )
    again = subprocess.run([PROGRAM, "adapter", "export", "out/checkpoints", "adapter"], **shell)
    assert again.returncode == 2
    assert "adapter exists" in again.stderr
