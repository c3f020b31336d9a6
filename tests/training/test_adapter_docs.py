"""Every command of docs/adapter-files.md runs, in its order."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.worlds import run_world

pytestmark = pytest.mark.dist

PAGE = Path(__file__).resolve().parents[2] / "docs/adapter-files.md"


def save(model_dir: Path, root: Path) -> None:
    from tests.training.test_adapter_io import fill
    from tests.workers.adapter_job import Job

    job = Job(model_dir)
    fill(job.model)
    job.save(root, 3)


def commands(page: Path, folder: Path) -> list[tuple[int, str]]:
    """Run every command of the page as a user would; return the exit code and the output of each."""
    import contextlib
    import io
    import os

    from megatron_xorl.cli import main

    os.chdir(folder)
    found = []
    for line in re.findall(r"^    megatron-xorl (.*)$", page.read_text(), re.MULTILINE):
        out, code = io.StringIO(), 0
        with contextlib.redirect_stdout(out):
            try:
                main(shlex.split(line))
            except SystemExit as ended:
                code = int(ended.code or 0)
        found.append((code, f"{line}\n{out.getvalue()}"))
    return found


@pytest.mark.slow
def test_every_command_of_the_page_succeeds(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path / "glm-tiny")
    run_world(save, 1, tmp_path / "glm-tiny", tmp_path / "checkpoints")
    (found,) = run_world(commands, 1, PAGE, tmp_path, process_group=False, timeout=240)
    assert [text for code, text in found if code] == []
    assert len(found) == 7
    text = "".join(text for _, text in found)
    assert "vLLM ignores kv_b_proj" in text
    assert "transformers + PEFT: max_abs" in text
