"""YAML's traps, each turned into one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_xorl.config.yaml import load_yaml, parse_yaml
from megatron_xorl.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["targets: [*.mlp.experts.*.gate_proj]", "targets: [*gate_proj]", "- *.x"]
)
def test_an_unquoted_glob_is_told_to_be_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match="quote the pattern") as caught:
        parse_yaml(text, "a.yaml")
    assert str(caught.value).startswith("a.yaml: line 1")
    assert "\n" not in str(caught.value)


def test_a_quoted_glob_is_a_string() -> None:
    assert parse_yaml("targets: ['*.mlp.experts.*.gate_proj']") == {
        "targets": ["*.mlp.experts.*.gate_proj"]
    }


@pytest.mark.parametrize("text", ["rank: 1\nalpha: 2\nrank: 3", "a: {b: 1, b: 2}"])
def test_a_key_written_twice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is written twice"):
        parse_yaml(text)


def test_a_real_alias_and_a_merge_still_work() -> None:
    assert parse_yaml("a: &x {p: 1}\nb:\n  <<: *x\n  q: 2\nc: *x")["b"] == {"p": 1, "q": 2}


def test_what_is_not_a_mapping_or_not_yaml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for text, says in [
        ("- 1", "expected a mapping"),
        ("1: 2", "expected a mapping"),
        ("a: [1", "not YAML"),
        ("a: \x00", "not YAML"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_yaml(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path / "missing.yaml")
    file.write_text("")
    assert load_yaml(file) == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("start: 2024-99-99", "put it in quotes"),
        ("steps: " + "9" * 5000, "put it in quotes"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
    ids=["date", "digits", "depth"],
)
def test_what_yaml_itself_cannot_hold_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_yaml(text, "a.yaml")
    assert str(caught.value).startswith("a.yaml: ") and "\n" not in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml: is no file; expected a YAML file"):
        load_yaml(tmp_path / "a.yaml")


def test_what_yaml_says_in_two_lines_is_said_in_one() -> None:
    with pytest.raises(ConfigError, match="not YAML: unacceptable character") as caught:
        parse_yaml("rank: \x00")
    assert "\n" not in str(caught.value)
