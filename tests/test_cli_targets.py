"""``megatron-xorl targets``: its document, its tables, and every command, file and message of docs/targets.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.cli import main
from megatron_xorl.config.model import load_glm_config

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "targets.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (megatron-xorl .*)$", PAGE, re.MULTILINE)
MESSAGES = re.findall(r"^    (target '.*)$", PAGE, re.MULTILINE)
FILES = dict(
    zip(
        ("adapter.yaml", "manifest.yaml", "ranks.yaml"),
        re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL),
        strict=True,
    )
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's files, in the folder where its commands run."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, "targets", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *shlex.split(command)[1:])
    assert (code, err) == (0, "")
    assert "never adapted" in out or json.loads(out)


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_of_the_page_is_the_real_one(
    message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = re.match(r"target '([^']+)'", message)[1]
    code, out, err = run(capsys, "targets", "glm-5.2", "--target", entry)
    assert (code, out, err) == (2, "", f"megatron-xorl: {message}\n")


def test_the_page_has_commands_messages_and_a_row_for_every_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(COMMANDS) >= 7
    assert len(MESSAGES) >= 7
    rows = PAGE.partition("## What is in the JSON document?")[2].partition("\n## ")[0]
    keys = set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE))
    found = document(capsys, "tiny")
    assert keys == found.keys()
    for row in ("targets", "per_rank", "factors"):
        line = next(line for line in rows.splitlines() if line.startswith(f"| `{row}`"))
        assert set(found[row][0]) <= set(re.findall(r"`(\w+)`", line))


def test_the_page_counts_as_the_inventory_counts(capsys: pytest.CaptureFixture[str]) -> None:
    by_region = document(capsys, "glm-5.2")["totals"]["by_region"]
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (\d+) \|$", PAGE, re.MULTILINE))
    assert rows == {region: str(count["targets"]) for region, count in by_region.items()}


@pytest.mark.usefixtures("files")
def test_the_manifest_of_the_page_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "glm-5.2", "--adapter", "manifest.yaml")
    assert found["totals"]["targets"] == sum(item["count"] for item in found["entries"]) == 616
    ranks = {row["region"]: (row["rank"], row["scale"]) for row in found["targets"]}
    assert ranks == {"attention": (16, 2.0), "routed_experts": (4, 8.0), "lm_head": (8, 4.0)}
    ranks = document(capsys, "glm-5.2", "--adapter", "ranks.yaml")["targets"]
    assert {(row["rank"], row["scale"]) for row in ranks} == {(4, 32.0), (64, 8.0)}


def test_the_scale_is_left_out_where_no_alpha_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(capsys, "tiny", "--rank", "4")["targets"]
    assert {row["scale"] for row in rows} == {None}
    assert {row["entry"] for row in rows} == {None}


def test_per_rank_shapes_follow_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "tiny", "--rank", "4", "--tp", "2", "--ep", "4", "--pp", "2")
    experts = load_glm_config("tiny").n_routed_experts
    bank = next(row for row in found["targets"] if row["name"].endswith("experts.down_proj"))
    assert bank["per_rank_shapes"]["A"] == [experts // 4, 4, 128]
    assert [held["stage"] for held in found["per_rank"]] == [0, 1]
    assert found["layout"]["world"] == 8
    code, out, err = run(capsys, "targets", "tiny", "--ep", "3")
    assert (code, out) == (2, "")
    assert "ep 3 does not divide the 8 experts" in err


@pytest.mark.usefixtures("files")
def test_a_person_sees_entries_shapes_on_a_rank_and_what_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["targets", "glm-5.2", "--adapter", "adapter.yaml", "--tp", "2", "--ep", "8"]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    for words in (
        "model.layers.1?.self_attn.q_*",
        "[256, 16, 2048]",
        "[32, 16, 2048]",
        "not adapted: 526 (attention 292, dense_mlp 8, shared_experts 225, lm_head 1): no entry of",
    ):
        assert words in out
    code, out, _ = run(capsys, "targets", "tiny", "--scope", "moe")
    assert "do not train: 24 (attention 20, dense_mlp 3, lm_head 1): scope moe trains" in out
    assert "not adapted:" not in out
