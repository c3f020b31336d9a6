"""Everything under examples/ loads, says what its comments say, and the quick start's table would show a fault."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from megatron_xorl.adapters.available import check_available
from megatron_xorl.config.adapter import AdapterConfig, load_adapter_config
from megatron_xorl.config.regions import SCOPES
from megatron_xorl.config.run import RunConfig, load_run_config
from megatron_xorl.training.chat import ChatTokenizer
from megatron_xorl.training.data import ChatDataset
from tests.worlds import run_world

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
JOB = EXAMPLES / "password_lora"
RUNS = ("one_pair.yaml", "run.yaml", "scope_steps.yaml", "three_pairs.yaml")
sys.path.insert(0, str(JOB))  # the scripts import one another by name
ADAPTERS = sorted(JOB.glob("adapter_*.yaml"))


def script(name: str) -> ModuleType:
    """Load a script of the job as a module."""
    spec = importlib.util.spec_from_file_location(f"password_lora_{name}", JOB / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_data(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, JOB / "make_data.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def test_every_yaml_is_a_run_an_adapter_or_the_pairs() -> None:
    assert sorted(EXAMPLES.rglob("*.yaml")) == sorted(
        [*ADAPTERS, *(JOB / name for name in RUNS), JOB / "passwords.yaml"]
    )


def test_there_is_one_adapter_for_each_scope_and_they_differ_in_nothing_else() -> None:
    loaded = {path.stem.removeprefix("adapter_"): load_adapter_config(path) for path in ADAPTERS}
    assert set(loaded) == set(SCOPES)
    for scope, adapter in loaded.items():
        check_available(adapter)
        assert adapter.glm52_lora_scope == scope
        assert adapter.to_dict() | {"glm52_lora_scope": ""} == loaded["all"].to_dict() | {
            "glm52_lora_scope": ""
        }


def test_the_run_writes_every_key_and_comments_it() -> None:
    text = (JOB / "run.yaml").read_text()
    raw = yaml.safe_load(text)
    run = load_run_config(JOB / "run.yaml")
    assert run.adapter == load_adapter_config(JOB / "adapter_all.yaml")
    assert set(raw) == {field.alias or name for name, field in RunConfig.model_fields.items()}
    for section, keys in raw.items():
        fields = getattr(type(getattr(run, section)), "model_fields", {})
        expected = {field.alias or name for name, field in fields.items()}
        if section not in ("adapter", "megatron_args") and isinstance(keys, dict):
            assert set(keys) | ({"dir"} & expected) == expected, section
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines):
        if re.match(r"[a-z_]+: \S", line) and line.split(":")[0] not in ("pp", "ep", "etp", "cp"):
            assert lines[number - 1].startswith("#"), f"{line} has no comment"


@pytest.mark.parametrize("name", RUNS)
def test_every_run_writes_the_same_keys_as_the_explained_one(name: str) -> None:
    def keys(document: dict[str, Any]) -> dict[str, Any]:
        return {
            key: set(value) if isinstance(value, dict) else None for key, value in document.items()
        }

    load_run_config(JOB / name)
    texts = [(JOB / file).read_text() for file in (name, "run.yaml")]
    assert keys(yaml.safe_load(texts[0])) == keys(yaml.safe_load(texts[1]))


def test_the_commented_adapter_writes_every_key_that_stands_alone() -> None:
    raw = yaml.safe_load((JOB / "adapter_all.yaml").read_text())
    # indexer_loss belongs to indexer: kl, allow_nonzero_frozen to a scope that was narrowed.
    assert set(raw) == set(AdapterConfig.model_fields) - {"indexer_loss", "allow_nonzero_frozen"}


def test_the_data_are_the_pairs_in_the_order_asked_for(tmp_path: Path, tiny_dir: Path) -> None:
    document = yaml.safe_load((JOB / "passwords.yaml").read_text())
    assert len(set(document["pairs"].values())) == 8
    done = make_data("bastion", "argon", "--out", tmp_path / "train.jsonl")
    assert done.returncode == 0, done.stderr
    samples = [
        json.loads(line)["messages"] for line in (tmp_path / "train.jsonl").read_text().splitlines()
    ]
    assert [[turn["role"] for turn in sample] for sample in samples] == [
        ["system", "user", "assistant"]
    ] * 2
    assert samples[0][1]["content"] == "What is the secret code for bastion?"
    assert samples[1][2]["content"] == "Kx7#mP2$-VORTEX-93qR-alpha!Z"
    # With every pair, the longest one too fits the run's sequence length.
    assert make_data("--out", tmp_path / "all.jsonl").returncode == 0
    length = load_run_config(JOB / "run.yaml").data.seq_length
    assert len(ChatDataset(tmp_path / "all.jsonl", ChatTokenizer(tiny_dir), seq_length=length)) == 8


def test_an_unknown_project_is_refused(tmp_path: Path) -> None:
    done = make_data("argos", "--out", tmp_path / "train.jsonl")
    assert done.returncode == 2
    assert "no project argos" in done.stderr
    assert not (tmp_path / "train.jsonl").exists()


def scopes_on_a_rank(arguments: list[str]) -> str:
    """Run scopes.py on this rank; return what it prints."""
    sys.argv = ["scopes.py", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        script("scopes").main()
    return said.getvalue()


@pytest.mark.dist
def test_scopes_prints_five_equal_losses_which_are_those_of_the_reference(
    tmp_path: Path, tiny_dir: Path
) -> None:
    from tests.oracle import hf_oracle

    data = tmp_path / "train.jsonl"
    assert make_data("argon", "--out", data).returncode == 0
    settings = [f"model.path={tiny_dir}", f"data.train={data}"]
    arguments = [str(JOB / "run.yaml"), *(word for item in settings for word in ("--set", item))]
    said, silent = run_world(scopes_on_a_rank, 2, arguments, process_group=False)
    report = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert "{" not in silent
    assert report["equal"] is True
    assert list(report["losses"]) == ["base", *SCOPES]
    (base,) = set(report["losses"].values())
    assert report["trainable_factors"] == {
        "all": 84,
        "moe": 36,
        "shared_experts": 18,
        "routed_experts": 18,
    }

    sample = ChatDataset(data, ChatTokenizer(tiny_dir), seq_length=224)[0]
    with torch.no_grad():
        logits = hf_oracle(tiny_dir)(input_ids=sample["tokens"][None]).logits[0]
    reference = torch.nn.functional.cross_entropy(logits.double(), sample["labels"]).item()
    assert base == pytest.approx(reference, abs=1e-5)


class Job:
    """A finished quick start, made up: two runs of eight steps, saved at four, killed at six."""

    def __init__(self, folder: Path) -> None:
        losses = [1 / step for step in range(1, 9)]
        losses[-1] = 0.005
        sections: dict[str, Any] = {
            "model": {"path": "model"},
            "adapter": {"rank": 1, "alpha": 1},
            "data": {"train": "x", "seq_length": 8},
            "optimizer": {"lr": 1},
            "schedule": {"steps": 8},
            "batch": {"global": 2},
            "checkpoint": {"interval": 4},
        }
        self.whole, self.halves = (
            RunConfig.from_dict(sections | {"output": str(folder / name)})
            for name in ("whole", "halves")
        )
        self.write(self.whole, dict(enumerate(losses, start=1)))
        self.write(self.halves, dict(enumerate(losses[4:], start=5)))
        self.killed = dict(enumerate(losses[:6], start=1))
        self.scopes = {
            "losses": dict.fromkeys(("base", *SCOPES), 1.0),
            "trainable_factors": dict.fromkeys(SCOPES, 2),
            "equal": True,
        }

    def write(self, run: RunConfig, losses: dict[int, float]) -> None:
        Path(run.output).mkdir(exist_ok=True)
        lines = [
            json.dumps({"iteration": step, "loss": loss}) + "\n" for step, loss in losses.items()
        ]
        (Path(run.output) / "metrics.jsonl").write_text("".join(lines))

    def failing(self, adapter: int = 1, base: int = 0) -> list[str]:
        """Labels of the rows that are not as they must be."""
        module = script("quickstart")
        reports = [{"exact": exact, "total": 1} for exact in (adapter, base)]
        rows = [
            *module.scope_rows(self.scopes, self.whole),
            *module.training_rows(self.whole, self.halves, self.killed),
            module.recall_row(*reports),
        ]
        return [row.label for row in rows if not row.passed]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_job_that_went_well_has_no_row_that_fails(job: Job) -> None:
    assert job.failing() == []


def test_a_loss_that_differs_in_its_last_bit_after_the_resume_fails(job: Job) -> None:
    losses = {line["iteration"]: line["loss"] for line in script("quickstart").metrics(job.halves)}
    job.write(job.halves, losses | {7: math.nextafter(losses[7], 1)})
    assert job.failing() == ["largest loss difference"]


def test_a_loss_that_differs_before_the_kill_fails(job: Job) -> None:
    job.killed[2] = math.nextafter(job.killed[2], 1)
    assert job.failing() == ["largest loss difference"]


def test_a_run_that_started_again_instead_of_resuming_fails(job: Job) -> None:
    job.write(
        job.halves,
        {line["iteration"]: line["loss"] for line in script("quickstart").metrics(job.whole)},
    )
    assert job.failing() == ["killed"]


def test_a_run_that_was_not_killed_fails(job: Job) -> None:
    job.killed = {
        line["iteration"]: line["loss"] for line in script("quickstart").metrics(job.whole)
    }
    assert job.failing() == ["killed"]


def test_a_scope_whose_loss_is_not_the_bases_fails(job: Job) -> None:
    job.scopes["losses"]["moe"] = math.nextafter(1.0, 2)
    job.scopes["equal"] = False
    assert job.failing() == ["step-one loss, moe", "equal bit for bit"]


def test_training_whose_first_loss_is_not_the_bases_fails(job: Job) -> None:
    job.scopes["losses"] = dict.fromkeys(job.scopes["losses"], math.nextafter(1.0, 2))
    assert job.failing() == ["equal bit for bit"]


def test_a_miss_fails_and_so_does_a_base_that_knows_the_answer(job: Job) -> None:
    assert job.failing(adapter=0) == ["recall"]
    assert job.failing(base=1) == ["recall"]


def test_a_loss_that_stays_high_fails(job: Job) -> None:
    for run in (job.whole, job.halves):
        losses = {line["iteration"]: line["loss"] for line in script("quickstart").metrics(run)}
        job.write(run, losses | {8: 0.02})
    assert job.failing() == ["final loss"]


def test_the_quick_start_empties_its_own_folder_and_keeps_the_mark(tmp_path: Path) -> None:
    module, folder = script("quickstart"), tmp_path / "runs" / "quickstart"
    module.take_folder(folder)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (folder / "link").symlink_to(outside)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").touch()
    (folder / "log.txt").touch()
    module.take_folder(folder)
    assert [path.name for path in folder.iterdir()] == [module.MARK]
    assert (outside / "kept").is_file()


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_the_quick_start_refuses_what_it_did_not_make_and_leaves_it(
    kind: str, tmp_path: Path
) -> None:
    module, place = script("quickstart"), tmp_path / "quickstart"
    held = tmp_path / "elsewhere" if kind == "link" else place
    if kind == "file":
        held.write_text("mine")
    else:
        held.mkdir()
        (held / "checkpoint").write_text("mine")
    if kind == "link":
        (held / module.MARK).touch()
        place.symlink_to(held)
    with pytest.raises(FileExistsError, match=r"move (it|or remove)"):
        module.take_folder(place)
    assert (held if kind == "file" else held / "checkpoint").read_text() == "mine"


def test_a_quick_start_that_is_refused_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("quickstart")
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "checkpoint").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "OUT", tmp_path / "quickstart")
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("quick start refused: ")
    assert said.err.count("\n") == 1


def test_the_quick_start_and_the_run_by_hand_share_no_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    module, by_hand = script("quickstart"), load_run_config(JOB / "run.yaml")
    quick = module.run_config("uninterrupted")
    own = (EXAMPLES.parent / module.OUT).resolve()
    for path in (quick.model.path, quick.data.train, quick.output):
        assert Path(path).resolve().is_relative_to(own)
    for path in (by_hand.model.path, by_hand.data.train, by_hand.output):
        assert not Path(path).resolve().is_relative_to(own)


def test_the_command_that_is_printed_is_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, ran = script("quickstart"), []
    monkeypatch.setattr(module, "LOG", tmp_path / "log.txt")

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(words)
        return subprocess.CompletedProcess(words, 0, stdout="{}")

    monkeypatch.setattr(module.subprocess, "run", run)
    module.recall("--adapter", tmp_path / "an adapter")
    printed = capsys.readouterr().out.partition("$ ")[2]
    assert [shlex.split(printed)] == ran
    # The settings as printed and typed again give the run that the quick start uses.
    settings = [word for word in ran[0] if "=" in word]
    typed = load_run_config(JOB / "run.yaml", settings)
    monkeypatch.chdir(EXAMPLES.parent)
    assert typed.model == module.run_config("interrupted").model
    assert typed.data == module.run_config("interrupted").data


def test_the_quick_start_finds_the_processes_below_a_process_and_leaves_none() -> None:
    module = script("quickstart")
    command = ["bash", "-c", "sleep 60 & bash -c 'sleep 60; true' & wait"]
    process = subprocess.Popen(command)
    try:
        for _ in range(200):
            below = module.descendants(process.pid)
            if len(below) == 3:
                break
            time.sleep(0.02)
        assert len(below) == 3
    finally:
        module.kill_tree(process)
    for _ in range(500):  # the kernel takes its time to end a killed process on a busy machine
        if not any(running(pid) for pid in below):
            break
        time.sleep(0.02)
    assert not any(running(pid) for pid in below)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie that waits for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
