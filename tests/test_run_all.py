"""The eight adapters, the three in one and the scope table: what their tables say, what is done once only, what is refused."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_xorl.adapters.scopes import SCOPES
from megatron_xorl.config.run import load_run_config
from tests import worlds

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "examples" / "password_lora"
sys.path.insert(0, str(JOB))  # the scripts import one another by name
import fleet  # noqa: E402
import quickstart  # noqa: E402
import run_all  # noqa: E402
import tables  # noqa: E402

SIZES = {
    "built": 4,
    "trained": 2,
    "parameters": 9,
    "optimizer": 72,
    "checkpoint": 99,
    "adapter": 40,
}


def answers(*got: str, expected: tuple[str, ...] = ("a", "b", "c")) -> dict[str, Any]:
    """What recall reports."""
    pairs = [
        {"prompt": "?", "expected": right, "got": said, "exact": said == right}
        for right, said in zip(expected, got, strict=False)
    ]
    return {"pairs": pairs, "exact": sum(pair["exact"] for pair in pairs), "total": len(pairs)}


def eight(**changes: Any) -> tables.Table:
    """Table of two adapters that are right; ``changes`` replace an adapter's outcome or the bare base's."""
    found: dict[str, Any] = {
        name: {"loss": 0.001, "recall": answers(name, expected=(name,)), "seed": 7}
        for name in ("a", "b")
    }
    bare = changes.pop("bare", answers("-", "-", expected=("a", "b")))
    return tables.eight_table(found | changes, bare)


def test_a_table_has_a_line_a_row_in_columns() -> None:
    assert str(eight()).splitlines() == [
        "Eight pairs, eight adapters",
        "adapter   seed  final loss  recall with  without  answer",
        "a         7     0.001000    1/1          0/1      a",
        "b         7     0.001000    1/1          0/1      b",
        "together                    2/2          0/2",
    ]


def test_a_miss_a_base_that_knows_and_an_error_are_faults_of_the_eight() -> None:
    assert eight().faults == []
    missed = eight(b={"loss": 0.1, "recall": answers("a", expected=("b",)), "seed": 7})
    assert missed.faults == ["b: expected 'b'"]
    assert missed.rows[-1][3:5] == ("1/2", "0/2")
    assert "NOT AS IT MUST BE: b: expected 'b'" in str(missed)
    assert eight(bare=answers("a", "-", expected=("a", "b"))).faults == [
        "a: the base knows the answer without an adapter"
    ]
    broken = eight(a=fleet.TaskError("disk full"), bare=fleet.TaskError("no base"))
    assert broken.faults == ["the bare base: no base", "a: disk full"]
    assert broken.rows[-1][3:5] == ("1/2", "?")


def three(scope: str, *got: str) -> tables.Table:
    right = {"loss": 0.1, "recall": answers("a", "b", "c"), "sizes": SIZES}
    found = dict.fromkeys(("all", "routed_experts"), right)
    return tables.three_table(found | {scope: right | {"recall": answers(*got)}})


def test_the_full_scope_must_know_all_three_and_the_routed_experts_are_only_reported() -> None:
    assert three("all", "a", "b", "c").faults == []
    assert three("all", "a", "b", "-").faults == ["all: 2/3 exact, 0 swapped"]
    assert three("all", "b", "a", "c").faults == ["all: 1/3 exact, 2 swapped"]
    routed = three("routed_experts", "b", "b", "-")
    assert routed.faults == []
    assert routed.rows[1] == ("routed_experts", "2", "9", "72", "99", "40", "0.100000", "1/3", "1")


def scopes(base: float = 2.0, **changes: Any) -> list[str]:
    """Faults of a table of all scopes; a change such as ``moe_drop=[…]`` replaces losses."""
    found = {
        (scope, frozen): {
            "losses": changes.get(f"{scope}_{frozen}", [2.0, 1.0, 0.5]),
            "sizes": SIZES,
        }
        for scope in SCOPES
        for frozen in ("keep", "drop")
    }
    return tables.scope_table(found, base, 3).faults


def test_one_bit_between_kept_and_dropped_factors_is_a_fault() -> None:
    assert scopes() == []
    assert scopes(moe_drop=[2.0, math.nextafter(1.0, 2), 0.5]) == [
        "moe: keep and drop differ from step 2 on"
    ]


def test_one_bit_between_the_base_and_a_first_loss_is_a_fault() -> None:
    assert len(scopes(base=math.nextafter(2.0, 3))) == 8
    other = math.nextafter(2.0, 3)
    changed = {f"all_{frozen}": [other, 1.0, 0.5] for frozen in ("keep", "drop")}
    assert [fault.partition(":")[0] for fault in scopes(**changed)] == ["all, keep", "all, drop"]


def test_a_run_that_ended_early_is_a_fault() -> None:
    assert scopes(moe_keep=[2.0, 1.0]) == ["moe, keep: 2 steps, expected 3"]


class Stub:
    """What trained, by name, and what is to fail."""

    def __init__(self) -> None:
        self.trained: list[str] = []
        self.broken: set[str] = set()
        self.high: set[str] = set()  # whose loss ends high


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Training that writes the password into the adapter, and recall that reads it there."""
    state = Stub()

    def fresh(log: Path, function: Any, *arguments: Any) -> Any:
        if function is fleet.train:
            (job,) = arguments
            state.trained.append(job.name)
            return train(job)
        if function is fleet.ask:
            return ask(*arguments)
        raise AssertionError(function)

    def train(job: Any) -> None:
        if job.name in state.broken:
            raise fleet.TaskError("killed")
        output = Path(job.run.output)
        output.mkdir(parents=True)
        (output / "run.yaml").write_text(yaml.safe_dump(job.run.to_dict()))
        loss = 0.5 if job.name in state.high else 0.001
        (output / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "loss": loss}) + "\n")
        job.adapter.mkdir()
        (job.adapter / "password").write_text(questions(job.run)[0])

    def ask(run: Any, adapter: Path | None) -> dict[str, Any]:
        wanted = questions(run)
        said = "-" if adapter is None else (adapter / "password").read_text()
        return answers(*[said] * len(wanted), expected=tuple(wanted))

    def questions(run: Any) -> list[str]:
        lines = Path(run.data.train).read_text().splitlines()
        return [json.loads(line)["messages"][-1]["content"] for line in lines]

    monkeypatch.setattr(fleet, "fresh", fresh)
    monkeypatch.chdir(ROOT)
    return state


def test_a_finished_adapter_is_not_trained_again_and_one_that_failed_is(
    tmp_path: Path, stub: Stub
) -> None:
    work = run_all.Work(tmp_path / "all", 1)
    stub.broken.add("eight/citadel")
    table = run_all.do_eight(work)
    assert stub.trained == [f"eight/{project}" for project in run_all.PROJECTS]
    assert table.faults == ["citadel: killed"]
    assert table.rows[-1][3:5] == ("7/8", "0/8")
    stub.trained.clear()
    stub.broken.clear()
    assert run_all.do_eight(work).faults == []
    assert stub.trained == ["eight/citadel"]


def test_an_adapter_of_another_configuration_is_refused_and_stays(
    tmp_path: Path, stub: Stub
) -> None:
    work = run_all.Work(tmp_path / "all", 1)
    run_all.do_eight(work)
    stub.trained.clear()
    record = tmp_path / "all" / "eight" / "ember" / "run" / "run.yaml"
    document = yaml.safe_load(record.read_text())
    document["optimizer"]["lr"] *= 2
    record.write_text(yaml.safe_dump(document))
    (fault,) = run_all.do_eight(work).faults
    assert fault.startswith("ember: ")
    assert "was not trained by examples/password_lora/one_pair.yaml as it is now; move " in fault
    assert stub.trained == []
    assert (tmp_path / "all" / "eight" / "ember" / "adapter" / "password").is_file()


def swap(folder: Path) -> None:
    """Put the adapters of two projects into each other's place."""
    left, right = folder / "argon" / "adapter", folder / "bastion" / "adapter"
    left.rename(folder / "aside")
    right.rename(left)
    (folder / "aside").rename(right)


def test_adapters_in_each_others_place_miss(tmp_path: Path, stub: Stub) -> None:
    work = run_all.Work(tmp_path / "all", 1)
    assert run_all.do_eight(work).faults == []
    swap(tmp_path / "all" / "eight")
    table = run_all.do_eight(work)
    assert [fault.partition(":")[0] for fault in table.faults] == ["argon", "bastion"]
    assert table.rows[-1][3] == "6/8"


def test_a_loss_that_ended_high_is_tried_with_the_next_seeds_and_the_table_says_which(
    tmp_path: Path, stub: Stub
) -> None:
    work = run_all.Work(tmp_path / "all", 1)
    stub.high |= {"eight/ember", *(f"eight/argon{end}" for end in ("", "-seed1235"))}
    table = run_all.do_eight(work)
    assert table.faults == []
    seeds = {row[0]: row[1] for row in table.rows}
    assert (seeds["argon"], seeds["ember"], seeds["bastion"]) == ("1236", "1235", "1234")
    assert len(stub.trained) == 11
    stub.trained.clear()
    assert run_all.do_eight(work).rows == table.rows and stub.trained == []


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Exit code of run_all.py."""
    monkeypatch.setattr(sys, "argv", ["run_all.py", *map(str, words)])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as left:
        run_all.main()
        sys.exit(0)
    return left.value.code


def test_the_exit_code_is_1_if_a_table_has_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_all.Work, "model", lambda self: None)
    monkeypatch.setattr(fleet, "start_server", lambda log: None)
    wrong = eight(b={"loss": 0.1, "recall": answers("a", expected=("b",)), "seed": 7})
    for table, code in ((eight(), 0), (wrong, 1)):
        monkeypatch.setitem(run_all.PARTS, "eight", lambda work, table=table: table)
        assert call(monkeypatch, "eight", "--out", tmp_path / "all") == code
        assert str(table) in capsys.readouterr().out


def test_a_folder_of_somebody_elses_is_refused_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").write_text("mine")
    assert call(monkeypatch, "--out", tmp_path) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("run_all refused: ")
    assert said.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nine"], "no part nine; choose from eight, three, scopes"),
        (["--jobs", "0"], "--jobs is 0"),
    ],
)
def test_wrong_arguments_are_refused(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_prints_each_run_as_a_command_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all"
    assert call(monkeypatch, "--dry-run", "--out", out) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    work = run_all.Work(out)
    jobs = [*work.eight().values(), *work.three().values(), *work.scopes().values()]
    assert [load_run_config(line[2], line[4::2]) for line in lines] == [job.run for job in jobs]
    assert len({job.run.output for job in jobs}) == 18
    assert not out.exists()


def test_the_runs_of_a_part_differ_in_the_scope_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    work = run_all.Work(run_all.OUT)
    for part, keys in ((work.three(), {"scope"}), (work.scopes(), {"scope", "frozen"})):
        plain = set()
        for job in part.values():
            document = job.run.to_dict() | {"output": ""}
            document["adapter"] |= {"glm52_lora_scope": ""}
            if "frozen" in keys:
                document["adapter"] |= {"frozen_factors": ""}
            plain.add(json.dumps(document))
        assert len(plain) == 1
    found = {
        (job.run.adapter.glm52_lora_scope, job.run.adapter.frozen_factors)
        for job in work.scopes().values()
    }
    assert found == {(scope, frozen) for scope in SCOPES for frozen in ("keep", "drop")}


def test_a_task_runs_in_another_process_and_its_fault_is_a_line(tmp_path: Path) -> None:
    worlds._context()  # the one server of this session, with what the other tests need
    log = tmp_path / "log.txt"
    assert fleet.fresh(log, os.getpid) != os.getpid()
    with pytest.raises(fleet.TaskError, match=r"^ValueError: invalid literal .*; see "):
        fleet.fresh(log, int, "x")
    assert "Traceback" in log.read_text()
    with pytest.raises(fleet.TaskError, match=r"^its process ended with exit code 3; see "):
        fleet.fresh(log, os._exit, 3)


def test_a_task_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    code = f"import fleet, time; fleet.fresh({str(tmp_path / 'log')!r}, time.sleep, 60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(JOB)}
    )
    below: list[int] = []
    try:
        wait_until(
            lambda: below.extend(quickstart.descendants(process.pid)) or len(set(below)) >= 3
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    try:
        wait_until(lambda: not any(running(pid) for pid in below))
    finally:
        for pid in filter(running, below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_until(holds: Any) -> None:
    limit = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie that waits for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(out: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(JOB / "run_all.py"), "--out", str(out), *parts]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1800)


@pytest.mark.slow
def test_everything_about_passwords_and_then_two_adapters_in_each_others_place(
    tmp_path: Path,
) -> None:
    out = tmp_path / "all"
    done = start(out)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert re.search(r"^together +8/8 +0/8$", done.stdout, re.MULTILINE)
    assert re.search(r"^all .* 3/3 +0$", done.stdout, re.MULTILINE)
    finals = {
        scope: re.findall(rf"^{scope} +(?:keep|drop) .*?(\S+) +yes$", done.stdout, re.MULTILINE)
        for scope in SCOPES
    }
    assert all(len(found) == 2 and len(set(found)) == 1 for found in finals.values())
    assert len({found[0] for found in finals.values()}) == 4  # four scopes that train four things

    swap(out / "eight")
    again = start(out, "eight")
    assert again.returncode == 1
    assert "training" not in again.stdout  # nothing finished is trained again
    assert re.search(r"^together +6/8 +0/8$", again.stdout, re.MULTILINE)
    shutil.rmtree(out)
