"""``megatron-xorl inspect`` of a layout: what each rank holds, the cut of the pipeline, the real modules beside it."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.cli import main
from tests.worlds import run_world

FORMS = ("fp8_codes", "fp8_scales", "bf16", "fp32")
PROGRAM = Path(sys.executable).with_name("megatron-xorl")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run ``inspect`` in this process; return exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as left:
        main(["inspect", *arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_layout_is_reported_by_stage_with_its_cut(capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, "glm-5.2", "--tp", "2", "--pp", "4", "--ep", "8")
    assert report["layout"]["world"] == 32
    assert (report["layout"]["dp"], report["layout"]["edp"]) == (4, 1)
    assert report["pipeline"] == {
        "starts": [0, 18, 38, 58],
        "layers": [18, 20, 20, 20],
        "layout": "Et*18|t*20|t*20|t*20L",
    }
    ranks = report["per_rank"]
    assert [(one["rank"], one["stage"]) for one in ranks] == [(0, 0), (8, 1), (16, 2), (24, 3)]
    assert [one["layers"] for one in ranks][1] == list(range(18, 38))
    for one in ranks:
        assert one["experts"] == list(range(32))
        assert one["parameters"]["total"] == sum(one["parameters"]["by_region"].values())
        forms = one["bytes"]["by_region"].values()
        assert one["bytes"]["total"] == sum(sum(form.values()) for form in forms)
        for form in ("fp8_codes", "fp8_scales", "bf16", "fp32"):
            assert one["bytes"][form] == sum(region[form] for region in forms)
    # Routed experts: 15 sparse layers on the first stage, 20 on the others, an eighth of 256 experts each.
    expert = 3 * 2048 * 6144
    routed = [one["parameters"]["by_region"]["routed_experts"] for one in ranks]
    assert routed == [15 * 32 * expert, 20 * 32 * expert, 20 * 32 * expert, 20 * 32 * expert]
    heads = [one["parameters"]["by_region"].get("lm_head", 0) for one in ranks]
    assert heads == [0, 0, 0, 154880 * 6144 // 2]


def test_one_rank_is_reported_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, "glm-5.2", "--tp", "2", "--pp", "2", "--ep", "8", "--rank", "13")
    (one,) = report["per_rank"]
    assert one["coordinates"] == {
        "tp": 1, "cp": 0, "dp": 2, "pp": 1, "etp": 0, "ep": 5, "edp": 0
    }  # fmt: skip
    assert one["experts"] == list(range(160, 192))
    assert one["layers"] == list(range(38, 78))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["glm-5.2", "--pp", "22"], "21 such layers; nearest legal: 19, 20, 21"),
        (
            ["glm-5.2", "--tp", "3"],
            "64 attention heads are not divisible by it; nearest legal: 1, 2, 4",
        ),
        (["glm-5.2", "--tp", "32"], "FP8 blocks of 128"),
        (["glm-5.2", "--ep", "5"], "ep 5 does not divide the 256 experts; nearest legal: 2, 4, 8"),
        (["glm-5.2", "--ep", "8", "--world", "12"], "world size 12 is not a multiple of etp × ep"),
        (
            ["glm-5.2", "--cp", "2", "--world", "3"],
            "world size 3 is not a multiple of tp × pp × cp",
        ),
        (["glm-5.2", "--pp", "0"], "pp is 0, expected a whole number of at least 1"),
        (["tiny", "--ep", "2", "--rank", "2"], "rank 2 does not exist; expected 0 to 1"),
        (
            ["tiny", "--world", "1" + "0" * 20],
            "world is a number of 67 bits, expected at most 1048576",
        ),
        (["tiny", "--tp", "1" + "0" * 20], "tp is a number of 67 bits, expected at most 1048576"),
    ],
    ids=str,
)
def test_an_illegal_layout_is_one_line_with_the_nearest_legal_values_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("megatron-xorl: ") and err.count("\n") == 1
    assert says in err


def test_a_person_is_told_the_cut_and_what_is_carried_but_not_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "glm-5.2", "--pp", "2")
    assert (code, err) == (0, "")
    for line in (
        "glm-5.2: 59,585 tensors and 59,044 block scales",
        "MTP layer 78: 791 tensors, carried through conversion, not built for training",
        "stages begin on layers 0, 38; layers a stage: 38, 40",
        "--pipeline-model-parallel-layout 'Et*38|t*40L'",
        "rank 1: stage 1, layers 38-77, experts 0-255",
    ):
        assert line in out, line
    assert "MTP" in run(capsys, "tiny")[1]


def test_without_an_mtp_layer_none_is_mentioned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from megatron_xorl.config.model import preset_dict

    (tmp_path / "config.json").write_text(
        json.dumps(preset_dict("tiny") | {"num_nextn_predict_layers": None})
    )
    assert "MTP" not in run(capsys, str(tmp_path))[1]
    report = document(capsys, str(tmp_path))
    assert report["mtp"] == {"layers": [], "tensors": 0, "trained": False}
    assert "mtp" not in report["parameters"]["by_region"]


# Processor time, not time on the clock: what else the machine does is no property of the verb.
QUICK = """
import contextlib, io, sys, time
start = time.process_time()
from megatron_xorl.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["inspect", "glm-5.2", *sys.argv[1:], "--json"])
print(time.process_time() - start, "torch" in sys.modules)
"""


@pytest.mark.parametrize("arguments", [[], ["--tp", "2", "--pp", "16", "--ep", "8"]], ids=str)
def test_glm_52_is_inspected_in_a_second_and_a_half_without_torch(arguments: list[str]) -> None:
    best = 9.9
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", QUICK, *arguments], capture_output=True, text=True, check=True
        )
        seconds, torch = done.stdout.split()
        assert torch == "False"
        best = min(best, float(seconds))
        if best < 1.5:
            break
    assert best < 1.5


def built(arguments: list[str]) -> tuple[str, int]:
    """What ``inspect`` of these arguments prints with ``--build``, and its exit code."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as left:
        main(["inspect", *arguments, "--build"])
    return out.getvalue(), int(left.value.code or 0)


@pytest.mark.dist
def test_the_real_modules_of_the_whole_model_are_built_and_agree() -> None:
    ((out, code),) = run_world(built, 1, ["glm-5.2", "--json"], process_group=False)
    report = json.loads(out)
    assert code == 0
    assert report["build"]["equal"] and report["build"]["seconds"] < 10
    assert report["build"]["peak_bytes"] < 4 * 2**30
    (one,) = report["per_rank"]
    assert one["built"]["parameters"]["total"] == 753_329_940_480 - 9_952_920_576
    assert one["built"]["bytes"]["total"] == one["bytes"]["total"]
    assert one["differences"] == []


@pytest.mark.dist
def test_both_counts_stand_side_by_side_in_the_table_of_a_rank() -> None:
    words = ["tiny", "--tp", "2", "--ep", "2", "--rank", "1"]
    ((out, code),) = run_world(built, 1, words, process_group=False)
    assert code == 0
    assert "modules and arithmetic are equal" in out
    (total,) = [line for line in out.splitlines() if "total" in line][1:]
    cells = [cell.strip() for cell in total.split("│")]
    assert cells[2] == cells[-2] != "0"


@pytest.mark.slow
def test_the_installed_program_builds_the_whole_model() -> None:
    words = [PROGRAM, "inspect", "glm-5.2", "--build", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["build"]["equal"]


def test_a_difference_is_named_and_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.cli import inspection

    fault = "rank 0: decoder.layers.0.x.weight: 4 parameters by arithmetic, the modules have none"
    monkeypatch.setattr(inspection, "add_built", lambda *_: (fault,))
    code, out, err = run(capsys, "tiny", "--build", "--json")
    assert (code, err) == (1, f"megatron-xorl: {fault}\n")
    assert "per_rank" in json.loads(out)


def listing(tmp_path: Path, base: str, listed: list[str], **changes: Any) -> str:
    """The folder of a preset's config.json with another ``modules_to_not_convert``."""
    from megatron_xorl.config.model import preset_dict

    raw = preset_dict(base)
    raw["quantization_config"] |= {"modules_to_not_convert": listed}
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    return str(tmp_path)


def test_modules_left_out_of_glm_52_have_no_scales_and_two_bytes_an_element(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = document(capsys, "glm-5.2")
    report = document(capsys, listing(tmp_path, "glm-5.2", ["o_proj", r"model.layers.\d+.mlp"]))
    # Left with scales: four of five attention matrices of 79 layers and two of 22 indexers, the MTP layer's among both.
    assert whole["scale_tensors"] == 59_044
    assert report["scale_tensors"] == 79 * 4 + 22 * 2
    elements = whole["parameters"]["by_region"]["routed_experts"]
    assert report["bytes"]["by_region"]["routed_experts"] == 2 * elements
    assert report["parameters"] == whole["parameters"]
    (one,) = report["per_rank"]
    assert one["bytes"]["by_region"]["routed_experts"]["bf16"] == 2 * elements
    assert one["bytes"]["by_region"]["routed_experts"]["fp8_codes"] == 0


def test_entries_that_leave_nothing_out_are_said_to(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = listing(tmp_path, "glm-5.2", ["lm_head", "mlp", "self_attn"])
    code, out, _ = run(capsys, folder, "--json")
    assert (code, json.loads(out)["scale_tensors"]) == (0, 59_044)
    (record,) = caplog.records
    assert "2 of 3 entries name no module with a weight" in record.getMessage()
    assert "first: 'mlp'" in record.getMessage()
    caplog.clear()
    assert run(capsys, "glm-5.2")[0] == 0  # 21 entries of the shipped list are misspelt
    assert caplog.records == []


def test_an_unquantised_float32_checkpoint_has_four_bytes_a_parameter(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from megatron_xorl.config.model import preset_dict

    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        raw = preset_dict("tiny") | {"dtype": dtype, "quantization_config": None}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        report = document(capsys, str(tmp_path))
        biases = (
            (4 - size) * 4 * 8
        )  # e_score_correction_bias is float32 always: three layers and MTP, 8 experts
        assert report["bytes"]["total"] == size * report["parameters"]["total"] + biases
        (one,) = report["per_rank"]
        assert one["bytes"]["bf16" if size == 4 else "fp8_codes"] == 0


@pytest.mark.dist
def test_what_is_built_of_a_partly_quantised_and_of_a_float32_config_is_what_was_counted(
    tmp_path: Path,
) -> None:
    (tmp_path / "parts").mkdir()
    parts = listing(tmp_path / "parts", "tiny", ["o_proj", "model.layers.2.mlp.experts"])
    (tmp_path / "wide").mkdir()
    wide = listing(tmp_path / "wide", "tiny", [], dtype="float32", quantization_config=None)
    for folder, kinds in ((parts, {"fp8_codes", "fp8_scales", "bf16", "fp32"}), (wide, {"fp32"})):
        ((out, code),) = run_world(built, 1, [folder, "--json"], process_group=False)
        (one,) = json.loads(out)["per_rank"]
        assert (code, one["differences"]) == (0, [])
        assert {form for form in FORMS if one["built"]["bytes"][form]} == kinds


@pytest.mark.dist
def test_a_world_too_large_to_build_is_one_line_and_exit_2() -> None:
    done = subprocess.run(
        [PROGRAM, "inspect", "tiny", "--build", "--world", "1000000"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("megatron-xorl: ")]
    assert "a world of 1000000 takes too long to build, expected at most 4096 processes" in line
    assert "Traceback" not in done.stderr
