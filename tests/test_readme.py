"""README and docs say what is so: paths exist, commands run, output and error messages are the real ones."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

from megatron_xorl import errors
from megatron_xorl.cli import app, main
from tests.worlds import run_world

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples/password_lora/README.md",
]
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def section(title: str, page: str = README) -> str:
    """Text of a section, without its title."""
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def indented(text: str) -> list[str]:
    """Lines of the blocks that are indented by four."""
    return [line[4:] for line in text.splitlines() if line.startswith("    ")]


def tree_paths() -> list[str]:
    """Paths of the file tree, with the folders that the indentation means."""
    found, parents = [], []
    for line in section("File tree").partition("```\n")[2].partition("```")[0].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        parents[depth:] = [name]
        found.append("".join(parents))
    return found


def test_every_path_of_the_file_tree_exists_and_has_a_phrase() -> None:
    assert len(tree_paths()) > 15
    for path in tree_paths():
        assert (ROOT / path).exists(), path
        assert (ROOT / path).is_dir() == path.endswith("/"), path


def test_the_file_tree_names_every_folder_of_the_package() -> None:
    folders = {
        f"megatron_xorl/{path.name}/"
        for path in (ROOT / "megatron_xorl").iterdir()
        if (path / "__init__.py").is_file()
    }
    assert folders <= set(tree_paths())


def test_the_five_files_to_read_first_exist() -> None:
    files = re.findall(r"^\d\. `([^`]+)`", section("File tree"), re.MULTILINE)
    assert len(files) == 5
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_every_file_in_backquotes_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:examples|tests|docs|megatron_xorl)/[\w./]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing + [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_names_every_verb_and_no_other() -> None:
    commands = typer.main.get_command(app).commands
    verbs = {name for name, command in commands.items() if not hasattr(command, "commands")}
    for name, command in commands.items():
        verbs |= {f"{name} {inner}" for inner in getattr(command, "commands", {})}
    lines = [
        line.removeprefix("megatron-xorl ") for line in indented(section("On the command line"))
    ]
    named = {next((verb for verb in verbs if line.startswith(f"{verb} ")), line) for line in lines}
    assert named == verbs


@pytest.mark.parametrize("number", range(3))
def test_the_commands_that_cost_nothing_run(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = indented(section("On the command line"))[number].partition("   ")[0].split()[1:]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert (left.value.code or 0) == 0
    assert capsys.readouterr().out


def test_the_spec_snippet_names_what_the_package_reads() -> None:
    from megatron_xorl import specs

    launch = (ROOT / "megatron_xorl" / "training" / "launch.py").read_text(encoding="utf-8")
    variables = re.findall(r'^\w+_VARIABLE = "(\w+)"$', launch, re.MULTILINE)
    snippet = section("In a Megatron script").partition("```bash\n")[2].partition("```")[0]
    assert re.findall(r"export (\w+)=", snippet) == variables
    module, function = re.search(r"--spec (\S+) (\S+)", snippet).groups()
    assert module == specs.__name__
    assert callable(getattr(specs, function))


def run_snippet(code: str, folder: str) -> str:
    """Run code in a folder; return what it prints."""
    os.chdir(folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    return said.getvalue()


def test_the_library_snippet_runs_and_prints_what_the_readme_says(tmp_path: Path) -> None:
    text = section("As a library")
    code = text.partition("```python\n")[2].partition("```")[0]
    (said,) = run_world(run_snippet, 1, code, str(tmp_path), process_group=False)
    printed = [line for line in said.splitlines() if re.match(r"\d", line)]
    promised = indented(text.partition("\nprints\n")[2])
    assert len(promised) == 3
    for line, promise in zip(printed, promised, strict=True):
        *counts, loss = line.split()
        *expected, near = promise.split()
        assert counts == expected
        assert float(loss) == pytest.approx(
            float(near), abs=2e-3
        )  # processors differ in the last bits
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()


def blank_model(folder: Path, tiny_dir: Path) -> None:
    shutil.copytree(tiny_dir, folder / "glm-tiny")
    sorted((folder / "glm-tiny").glob("*.safetensors"))[1].unlink()


def chat(folder: Path, *turns: tuple[str, str]) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    (folder / "train.jsonl").write_text(json.dumps({"messages": messages}) + "\n")


def data() -> None:
    from megatron_xorl.training.chat import ChatTokenizer
    from megatron_xorl.training.data import ChatDataset

    ChatDataset("train.jsonl", ChatTokenizer("glm-tiny"), seq_length=224)


def adapter_file(text: str) -> None:
    from megatron_xorl.config.adapter import load_adapter_config

    Path("adapter.yaml").write_text(text)
    load_adapter_config("adapter.yaml")


def targets(pattern: str) -> None:
    from megatron_xorl.adapters.inventory import build_inventory
    from megatron_xorl.config.adapter import AdapterConfig
    from megatron_xorl.config.model import load_glm_config

    build_inventory(load_glm_config("tiny"), AdapterConfig(rank=1, alpha=1, targets=[pattern]))


def layout(**sizes: int) -> None:
    from megatron_xorl.config.layout import ParallelLayout, check_layout
    from megatron_xorl.config.model import load_glm_config

    check_layout(load_glm_config("tiny"), ParallelLayout(**sizes))


def sequence() -> None:
    from megatron_xorl.config.layout import sequence_problem

    raise errors.LayoutError(f"data.{sequence_problem(50, tp=1, cp=2)}")


def stages(*starts: int) -> None:
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.config.stages import check_stage_starts

    check_stage_starts(load_glm_config("glm-5.2"), starts)


def weights() -> None:
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.weights.reader import HfCheckpoint

    HfCheckpoint("glm-tiny").validate(load_glm_config("glm-tiny"))


def quantise() -> None:
    from megatron_xorl.fp8.format import quantize_blocks

    broken = torch.ones(4, 4)
    broken[0, 0] = float("inf")
    quantize_blocks(broken, (2, 2), name="o_proj")


def checkpoint() -> None:
    from megatron_xorl.weights.manifest import read_manifest

    directory = Path("runs/job/checkpoints/iter_0000040")
    directory.mkdir(parents=True)
    read_manifest(directory)


def adapter_directory() -> None:
    from megatron_xorl.weights.adapter_files import AdapterFile

    AdapterFile("my-adapter")


def no_device() -> None:
    from megatron_xorl.parallel.groups import initialize

    initialize()


def preset() -> None:
    from megatron_xorl.config.model import load_glm_config

    load_glm_config("glm-52")


def no_answer() -> None:
    chat(Path(), ("user", "?"))
    data()


def long_question() -> None:
    chat(Path(), ("user", "?" * 300), ("assistant", "!"))
    data()


def replicas_differ() -> None:
    from megatron_xorl.training.replicas import refuse_differing

    refuse_differing({"lm_head.lora_A": "rank 3 differs from 3 others"}, "after iteration 40")


# One real fault for each message in docs/troubleshooting.md, in its order.
FAULTS: list[tuple[str, Callable[[], None]]] = [
    ("ConfigError", preset),
    ("ConfigError", lambda: adapter_file("rank: 16\nlora_target_modules:\n  - *.experts.*\n")),
    ("ConfigError", lambda: adapter_file("rank: 16\nalpha: 32\nscop: moe\n")),
    ("TargetError", lambda: targets("*.shared_expert.*_proj")),
    ("TargetError", lambda: targets("*.experts.3.up_proj")),
    ("WeightsError", weights),
    ("FormatError", quantise),
    ("LayoutError", lambda: layout(tp=8, world=8)),
    ("LayoutError", lambda: layout(ep=2, world=3)),
    ("LayoutError", lambda: stages(0, 7)),
    ("LayoutError", sequence),
    ("DataError", no_answer),
    ("DataError", long_question),
    ("CheckpointError", checkpoint),
    ("ReplicaError", replicas_differ),
    ("AdapterError", adapter_directory),
    ("PlatformError", no_device),
]


@pytest.mark.parametrize(
    ("kind", "fault"), FAULTS, ids=[f"{number}-{name}" for number, (name, _) in enumerate(FAULTS)]
)
def test_the_messages_in_troubleshooting_are_those_that_are_raised(
    kind: str,
    fault: Callable[[], None],
    tmp_path: Path,
    tiny_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_xorl.parallel.groups.is_cpu_platform", lambda: False)
    monkeypatch.setattr("megatron_xorl.parallel.groups._current", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    blank_model(tmp_path, tiny_dir)
    with pytest.raises(getattr(errors, kind)) as caught:
        fault()
    assert str(caught.value) in indented(section(kind, TROUBLE))


def test_troubleshooting_has_every_error_and_only_messages_that_are_tested() -> None:
    titles = set(re.findall(r"^## (\w+Error)$", TROUBLE, re.MULTILINE))
    assert titles == set(errors.__all__) - {"MegatronXorlError", "nearest"}
    for title in titles:
        kinds = [kind for kind, _ in FAULTS if kind == title]
        assert len(indented(section(title, TROUBLE))) == len(kinds)
        assert getattr(errors, title).__mro__[2].__name__ in section(title, TROUBLE)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project in another folder, with this environment as its own, so that nothing is installed."""
    root = tmp_path / "copy"
    keep_out = shutil.ignore_patterns(
        ".venv", "runs", ".git", "__pycache__", ".*_cache", "*.egg-info"
    )
    shutil.copytree(ROOT, root, ignore=keep_out)
    (root / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (root / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    digest = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
    (root / ".venv" / ".stamp").write_text(f"{digest} {platform.python_version()} {root}\n")
    return root


def labels(lines: list[str]) -> list[str]:
    """First column of the table."""
    return [re.split(r"\s{2,}", line)[0] for line in lines]


@pytest.mark.slow
@pytest.mark.dist
def test_the_quick_start_passes_and_prints_the_table_of_the_readme(copy: Path) -> None:
    environment = os.environ | {"PIP_INDEX_URL": "http://127.0.0.1:9/none", "PYTHONPATH": str(copy)}
    done = subprocess.run(
        ["bash", "examples/quickstart.sh"],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = done.stdout.rpartition("\n\n")[2].splitlines()
    promised = [line for line in indented(section("Two commands")) if "  " in line]
    assert labels(table) == labels(promised)
    found = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in table)
    assert found["recall"] == "1/1 exact with the adapter, 0/1 without"
    assert found["largest loss difference"].startswith("0.0 ")
    assert (
        len(
            {
                found[label].split()[0]
                for label in found
                if "base loss" in label or "step-one" in label
            }
        )
        == 1
    )
    assert float(found["final loss"].split()[0]) < 0.01
