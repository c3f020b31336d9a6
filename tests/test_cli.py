"""The command line: one JSON document, one-line errors, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.cli import main

PROGRAM = Path(sys.executable).with_name("megatron-xorl")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_installed_program_lists_the_targets_of_glm_5_2_in_under_three_seconds() -> None:
    start = time.perf_counter()
    done = subprocess.run(
        [PROGRAM, "targets", "glm-5.2", "--json"], capture_output=True, text=True, check=True
    )
    seconds = time.perf_counter() - start
    totals = json.loads(done.stdout)["totals"]
    assert (totals["factors"], totals["trainable_factors"]) == (1700, 1700)
    assert round(totals["parameters"] / 1e6, 1) == 8201.7
    assert {name: found["factors"] for name, found in totals["by_region"].items()} == {
        "attention": 780,
        "dense_mlp": 18,
        "shared_experts": 450,
        "routed_experts": 450,
        "lm_head": 2,
    }
    assert done.stderr == ""
    assert seconds < 3


def test_targets_lists_each_factor_with_the_promised_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = document(
        capsys,
        "targets",
        "tiny",
        "--scope",
        "moe",
        "--rank",
        "4",
        "--target",
        "*.mlp.experts.*",
        "--target",
        "lm_head",
    )
    assert report["totals"]["factors"] == len(report["factors"]) == 20
    assert (
        report["totals"]["trainable_factors"]
        == sum(item["trainable"] for item in report["factors"])
        == 18
    )
    assert report["factors"][0] == {
        "name": "model.layers.1.mlp.experts.gate_proj.lora_A",
        "target": "model.layers.1.mlp.experts.gate_proj",
        "region": "routed_experts",
        "shape": [1, 4, 128],
        "dtype": "bfloat16",
        "trainable": True,
    }


def test_targets_reads_an_adapter_file_and_nothing_beside_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("rank: 2\nalpha: 1e1\nglm52_lora_scope: shared_experts\nfrozen_factors: drop\n")
    assert document(capsys, "targets", "tiny", "--adapter", str(file))["totals"]["factors"] == 18
    code, _, err = run(capsys, "targets", "tiny", "--adapter", str(file), "--rank", "4")
    assert code == 2
    assert "cannot be combined" in err


def test_inspect_gives_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, "inspect", "glm-5.2")
    assert report["indexer"]["full"] == [0, 1, *range(2, 78, 4)]
    assert len(report["indexer"]["shared"]) == 57
    # The public BF16 checkpoint has 59,585 tensors; the FP8 one has a scale beside each of the quantised ones.
    assert (report["hf_tensors"], report["scale_tensors"]) == (59585, 59044)
    indexer_everywhere = document(capsys, "inspect", "glm-5.1")
    assert indexer_everywhere["hf_tensors"] == 59585 + 57 * 5
    assert indexer_everywhere["scale_tensors"] == 0
    assert report["mtp"] == {"layers": [78], "tensors": 791, "trained": False}
    for key in ("parameters", "bytes"):
        assert report[key]["total"] == sum(report[key]["by_region"].values())


def test_doctor_gives_the_promised_keys_and_fails_only_on_what_is_required(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = document(capsys, "doctor")
    assert set(report) == {"versions", "backends", "missing"}
    assert report["versions"]["megatron-core"].startswith("0.19.")
    assert report["backends"]["device"] in ("cpu", "cuda")
    from megatron_xorl import doctor

    monkeypatch.setitem(doctor._REQUIRED, "a-package-nobody-has", "pip install it")
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "MISSING: a-package-nobody-has (for everything): pip install it" in out


def test_doctor_shows_the_compiler_s_gates_and_fails_on_a_closed_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    aot = pytest.importorskip("megatron_xorl.kernels.aot")
    golden = json.loads(aot.GOLDEN.read_text(encoding="utf-8"))["reports"]
    monkeypatch.setattr(aot, "compile_all", lambda: [aot.Report(**one) for one in golden])
    found = document(capsys, "doctor", "--kernels")["kernels"]
    assert [one["variant"] for one in found] == [one["variant"] for one in golden]
    assert {one["target"] for one in found} == {90, 100} and not any(one["faults"] for one in found)
    spilled = [aot.Report(**golden[0] | {"local": 8})]
    monkeypatch.setattr(aot, "compile_all", lambda: spilled)
    code, out, _ = run(capsys, "doctor", "--kernels")
    assert code == 1 and "spilled" in out.replace("\n", " ")
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, _, err = run(capsys, "doctor", "--kernels")
    assert code == 2 and "unset it to compile" in err


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["__init__.py"], "is not NVIDIA's"),
        (["__init__.py", "multi_tensor_apply/__init__.py"], None),
        ([], "not on the package index"),
    ],
)
def test_doctor_tells_the_unrelated_apex_from_nvidias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], says: str | None
) -> None:
    from megatron_xorl.doctor import examine

    for name in files:
        (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apex" / name).write_text("raise ImportError('it must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    report = examine()
    notes = [item["how"] for item in report["missing"] if item["name"] == "apex"]
    assert (notes == []) if says is None else (says in notes[0])
    assert report["versions"]["apex"] == ("NVIDIA" if says is None else None)


@pytest.mark.parametrize("verb", ["inspect", "targets", "doctor"])
def test_without_json_a_person_gets_a_table(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, err = run(capsys, verb, *([] if verb == "doctor" else ["tiny"]))
    assert (code, err) == (0, "")
    assert {"inspect": "routed_experts", "targets": "[8, 128, 64]", "doctor": "megatron-core"}[
        verb
    ] in out
    with pytest.raises(json.JSONDecodeError):
        json.loads(out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["targets", "glm-52"], "did you mean the preset 'glm-5.2'"),
        (["targets", "tiny", "--scope", "experts"], "expected one of all, moe"),
        (["targets", "tiny", "--target", "*.shared_expert.*_proj"], "'*.shared_experts.*_proj'"),
        (["targets", "tiny", "--rank", "0"], "expected at least 1"),
        (["inspect", "/nothing/here"], "/nothing/here: found no file"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, out) == (2, "")
    assert err.startswith("megatron-xorl: ")
    assert err.count("\n") == 1
    assert says in err


def test_debug_shows_where_an_error_came_from() -> None:
    done = subprocess.run(
        [PROGRAM, "targets", "nothing", "--debug"], capture_output=True, text=True
    )
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("megatron-xorl: nothing: found no file")
    assert done.returncode == 2


def test_usage_errors_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "targets")[0] == 2
    assert run(capsys, "targets", "tiny", "--nonsense")[0] == 2
    assert run(capsys, "no-such-verb")[0] == 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            PermissionError(13, "Permission denied", "out/config.json"),
            "out/config.json: Permission denied; ",
        ),
        (OSError(28, "No space left on device"), "No space left on device; "),
        (OSError("odd\nerror"), "odd error; "),
        (RecursionError("maximum recursion depth exceeded"), "an input is nested too deeply"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("debug", [False, True])
def test_what_the_system_refuses_is_one_line_and_a_traceback_under_debug_alone(
    error: Exception,
    line: str,
    debug: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("megatron_xorl.convert.tiny.make_tiny", fail)
    code, out, err = run(capsys, "make-tiny", "out", *(["--debug"] if debug else []))
    assert (code, out, "Traceback" in err) == (2, "", debug)
    last = err.splitlines()[-1]
    assert last.startswith(f"megatron-xorl: {line}")
    assert debug or err == f"{last}\n"
