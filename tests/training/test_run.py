"""``train``: the arguments a run becomes, and what the launcher shows when a rank dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_xorl.config.run import RunConfig
from megatron_xorl.errors import MegatronXorlError
from megatron_xorl.training.run import check_run, launch_command, pretrain_arguments

ROOT = Path(__file__).resolve().parents[2]


def run_config(folder: Path, **sections: Any) -> RunConfig:
    document = {
        "model": {"path": "model", "dtype": "fp32"},
        "adapter": {"rank": 4, "alpha": 8},
        "data": {"train": "train.jsonl", "seq_length": 48, "repeat": True},
        "parallel": {"ep": 2},
        "optimizer": {"lr": 2e-3},
        "schedule": {"steps": 4, "warmup": 2, "final": 0.05},
        "batch": {"micro": 1, "global": 2},
        "output": "out",
    }
    return RunConfig.from_dict(document | sections, "run.yaml", folder)


def values(run: RunConfig) -> dict[str, str | bool]:
    """Arguments as ``{flag: value, True where it has none}``."""
    found: dict[str, str | bool] = {}
    flag = ""
    for word in pretrain_arguments(run):
        if word.startswith("--"):
            flag = word
            assert flag not in found
            found[flag] = True
        else:
            found[flag] = word
    return found


def test_every_key_of_a_run_becomes_megatrons_argument(tmp_path: Path) -> None:
    found = values(run_config(tmp_path, megatron_args={"log-throughput": True}))
    expected = {
        "--hf-model": str(tmp_path / "model"),
        "--adapter-config": str(tmp_path / "out/adapter.yaml"),
        "--chat-data": str(tmp_path / "train.jsonl"),
        "--seq-length": "48",
        "--expert-model-parallel-size": "2",
        "--micro-batch-size": "1",
        "--global-batch-size": "2",
        "--train-iters": "4",
        "--lr": "0.002",
        "--min-lr": "0.0001",
        "--lr-warmup-iters": "2",
        "--lr-warmup-init": "0.001",
        "--lr-decay-style": "cosine",
        "--weight-decay": "0.01",
        "--adam-beta1": "0.9",
        "--adam-beta2": "0.95",
        "--clip-grad": "1.0",
        "--save": str(tmp_path / "out/checkpoints"),
        "--load": str(tmp_path / "out/checkpoints"),
        "--save-interval": "4",
        "--metrics": str(tmp_path / "out/metrics.jsonl"),
        "--chat-repeat": True,
        "--log-throughput": True,
    }
    assert {flag: found.get(flag) for flag in expected} == expected
    assert not {"--chat-truncate", "--bf16", "--sequence-parallel", "--keep-last"} & found.keys()


def test_a_megatron_argument_of_the_run_is_the_last_word(tmp_path: Path) -> None:
    words = pretrain_arguments(run_config(tmp_path, megatron_args={"log-interval": 3}))
    places = [place for place, word in enumerate(words) if word == "--log-interval"]
    assert words[places[-1] + 1] == "3"


def test_bf16_tensor_parallel_and_truncation_add_their_flags(tmp_path: Path) -> None:
    run = run_config(
        tmp_path,
        model={"path": "model"},
        parallel={"tp": 2},
        data={"train": "t", "seq_length": 8, "truncate": True},
        checkpoint={"dir": "saved", "interval": 2, "keep_last": 3},
    )
    found = values(run)
    assert {"--bf16", "--sequence-parallel", "--chat-truncate"} <= found.keys()
    assert "--chat-repeat" not in found
    assert (found["--save"], found["--save-interval"], found["--keep-last"]) == (
        str(tmp_path / "saved"),
        "2",
        "3",
    )


def test_the_launcher_starts_our_entry_on_one_machine(tmp_path: Path) -> None:
    command = launch_command(run_config(tmp_path), 2)
    assert command[:5] == ["--standalone", "--nproc-per-node", "2", "-m", "megatron_xorl.pretrain"]


def _full(method: str, layers: int) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


def _selective(modules: list[str]) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


@pytest.fixture
def sound(tiny_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """Sections that make :func:`run_config` a run that trains."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Kx7"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    return {"model": {"path": str(tiny_dir), "dtype": "fp32"}}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {
                "parallel": {"pp": 2},
                "megatron_args": {"pipeline_model_parallel_layout": "Ett|ttL"},
            },
            "between layers 1 and 2: layer 2 uses the selection of layer 1",
        ),
        (
            {"parallel": {"pp": 2}, "megatron_args": {"pipeline_model_parallel_layout": "Et|tL"}},
            "leave it out to get Et|t*3L",
        ),
        ({"parallel": {"pp": 3}}, "there are 2 such layers"),
        (
            {"parallel": {"cp": 2}, "data": {"train": "train.jsonl", "seq_length": 50}},
            "data.seq_length 50 does not cut evenly over cp 2 and tp 1: it must be a multiple of 4; nearest legal: 48, 52",
        ),
        ({"parallel": {"cp": 2}, "megatron_args": {"cp_comm_type": "a2a"}}, "keys are gathered"),
        ({"megatron_args": {"hybrid_context_parallel": True}}, "holds whole rows"),
        ({"seed": 0}, "seed is 0"),
        ({"seed": 2**40}, "Megatron takes 1 to 2147483647"),
        ({"output": "train.jsonl"}, "train.jsonl is a file"),
        ({"output": "train.jsonl/deeper"}, "train.jsonl is a file"),
        ({"megatron_args": {"lr": 5}}, "megatron_args.lr is set by a key of the run"),
        ({"megatron_args": {"save": "elsewhere"}}, "megatron_args.save is set by a key"),
        ({"megatron_args": {"fp61": True}}, "no argument of Megatron's; nearest: fp16"),
        ({"megatron_args": {"fp16": True}}, "fp16 needs loss scaling"),
        ({"megatron_args": {"overlap_param_gather_with_optimizer_step": True}}, "leave it out"),
        ({"megatron_args": {"log_throughput": [1, 2]}}, "megatron_args: "),
        ({"megatron_args": {"num_workers": "many"}}, "megatron_args: argument --num-workers"),
        *[
            ({"megatron_args": recompute}, says)
            for recompute, says in [
                ({"recompute_granularity": "some"}, "--recompute-granularity: invalid choice"),
                ({"recompute_granularity": "full"}, "recompute_method is None"),
                (_full("uniform", 0), "recompute_num_layers is 0"),
                (_full("block", 99), "pass 1 to 4"),
                (_full("uniform", 1) | {"recompute_modules": ["moe"]}, "takes whole layers"),
                (_selective([]), "expected at least one argument"),
                (_selective(["foo"]), "recompute_modules is ['foo']; pass some of core_attn"),
                (_selective(["gdn_norm_out"]), "pass some of core_attn"),
                (_selective(["moe_act"]), "on CPU use moe"),
                (
                    _selective(["moe"]) | {"recompute_num_layers": 1},
                    "without recompute_granularity full",
                ),
                ({"recompute_modules": ["moe"]}, "without recompute_granularity selective"),
                ({"recompute_num_layers": 1}, "without recompute_granularity full"),
            ]
        ],
    ],
    ids=str,
)
def test_what_only_a_rank_would_have_refused_is_refused_before_any_starts(
    sections: dict[str, Any], says: str, sound: dict[str, Any], tmp_path: Path
) -> None:
    world = 6 if sections.get("parallel", {}).get("pp") == 3 else 2
    before = sorted(tmp_path.iterdir())
    with pytest.raises(MegatronXorlError) as refused:
        check_run(run_config(tmp_path, **(sound | {"parallel": {}} | sections)), world)
    assert says in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


def test_a_sound_run_is_accepted_with_an_argument_of_megatrons(
    sound: dict[str, Any], tmp_path: Path
) -> None:
    check_run(run_config(tmp_path, **sound, megatron_args={"log-throughput": True}), 2)
    for recompute in (
        _full("block", 4),
        _selective(["core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "shared_experts"]),
        {"recompute_activations": True},
    ):
        check_run(run_config(tmp_path, **sound, megatron_args=recompute), 2)


@pytest.mark.slow
@pytest.mark.dist
def test_killing_the_launcher_ends_its_ranks(sound: dict[str, Any], tmp_path: Path) -> None:
    run = run_config(tmp_path, **sound, schedule={"steps": 400, "warmup": 2})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.to_dict()))
    words = [sys.executable, "-m", "megatron_xorl.cli", "train", str(tmp_path / "run.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "log", "w") as log:
        launcher = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) > 1)
    ranks = children(launcher.pid)
    assert len(ranks) == 2
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(alive(pid) for pid in ranks))
    assert len(metrics.read_text().splitlines()) < 400


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


DYING = """
import ctypes, os, sys
from megatron_xorl.training.metrics import MetricsLog

def die(self, *, iteration, **rest):
    if os.environ["RANK"] == "1" and iteration == 2:
        if os.environ["HOW"] == "segfault":
            ctypes.string_at(0)
        raise ValueError("rank one has had enough")

MetricsLog.on_iteration = die
from megatron_xorl.training.pretrain import main
main()
"""


@pytest.fixture(scope="module")
def job(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A script that runs our entry with a rank that dies at iteration 2, and its arguments."""
    folder = tmp_path_factory.mktemp("dying")
    (folder / "dying.py").write_text(DYING)
    (folder / "adapter.yaml").write_text("rank: 2\nalpha: 4\n")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Kx7"}]
    (folder / "train.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    arguments = [
        *("--hf-model", str(tiny_dir), "--adapter-config", str(folder / "adapter.yaml")),
        *("--chat-data", str(folder / "train.jsonl"), "--chat-repeat", "--seq-length", "48"),
        *("--train-iters", "4", "--lr", "1e-3", "--micro-batch-size", "1"),
        *("--global-batch-size", "2", "--expert-model-parallel-size", "2"),
    ]
    return folder, arguments


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("exception", ("ValueError: rank one has had enough", "dying.py", "rank      : 1 ")),
        ("segfault", ("Fatal Python error: Segmentation fault", "dying.py", "rank      : 1 ")),
        ("live", ()),
    ],
)
def test_a_rank_that_dies_leaves_its_python_traceback_and_its_number(
    job: tuple[Path, list[str]], how: str, expected: tuple[str, ...]
) -> None:
    folder, arguments = job
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOW": how, "PYTHONPATH": str(ROOT)}
    if how == "live":
        (folder / "dying.py").write_text(DYING.replace('== "1" and', '== "7" and'))
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(folder / "dying.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
    )
    assert (done.returncode == 0) == (how == "live"), done.stderr[-3000:]
    for text in expected:
        assert text in done.stderr, done.stderr[-6000:]
    if how == "live":
        assert "Traceback" not in done.stderr
