"""The set-up script, with a stand-in for Python that logs what it is asked and installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"

# Makes a copy of itself where a virtual environment is asked for; everything that is neither venv nor pip runs for real.
STAND_IN = f"""#!/bin/bash
log() {{ printf '%s\\n' "$1" >>"$STAND_IN_LOG"; }}
case "$*" in
    "-m venv"*) log venv; rm -rf "${{@: -1}}"; mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip --version") exit 0 ;;
    "-m pip install"*) log pip; sleep 0.2; [ ! -e "$STAND_IN_LOG.fail" ] ;;
    *"import megatron.core"*) [ ! -e "$STAND_IN_LOG.half" ] ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
REFUSES = "#!/bin/bash\necho 'python: command not found' >&2\nexit 127\n"


class Clone:
    """A clone of the project that holds what the set-up reads, on a machine with the stand-in as its only Python."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.log = folder / "a clone", folder / "bin", folder / "log"
        (self.root / "examples").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / "examples" / "setup.sh", self.root / "examples")
        self.pyproject = self.root / "pyproject.toml"
        self.pyproject.write_text("[project]\n")
        for name in ("python3", "python", "python3.12", "python3.13"):
            self.program(name, REFUSES)
        self.program(f"python{VERSION}", STAND_IN)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self) -> subprocess.Popen[str]:
        home = str(self.bin.parent)
        environment = {
            "PATH": f"{self.bin}:{os.defpath}",
            "HOME": home,
            "STAND_IN_LOG": str(self.log),
        }
        command = ["bash", "-c", "set -euo pipefail; source examples/setup.sh; command -v python"]
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self) -> tuple[int, str, str]:
        process = self.start()
        out, err = process.communicate(timeout=60)
        return process.returncode, out.strip(), err

    def calls(self) -> list[str]:
        calls = self.log.read_text().split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return calls


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_the_first_start_installs_and_the_second_does_not(clone: Clone) -> None:
    code, python, err = clone.run()
    assert (code, python) == (0, str(clone.root / ".venv" / "bin" / "python")), err
    assert clone.calls() == ["venv", "pip"]
    start = time.perf_counter()
    assert clone.run() == (0, python, "")
    assert time.perf_counter() - start < 5
    assert clone.calls() == []


def test_a_changed_pyproject_installs_again_into_the_same_environment(clone: Clone) -> None:
    clone.run()
    clone.calls()
    clone.pyproject.write_text("[project]\ndependencies = ['more']\n")
    assert clone.run()[0] == 0
    assert clone.calls() == ["pip"]
    clone.run()
    assert clone.calls() == []


def test_a_broken_environment_is_made_afresh(clone: Clone) -> None:
    clone.run()
    clone.calls()
    (clone.root / ".venv" / "bin" / "python").unlink()
    assert clone.run()[0] == 0
    assert clone.calls() == ["venv", "pip"]


def test_a_failed_installation_leaves_no_stamp_and_is_repaired(clone: Clone) -> None:
    failing = Path(f"{clone.log}.fail")
    failing.touch()
    code, _, err = clone.run()
    assert code == 1
    assert "run this again to repair it" in err
    assert not (clone.root / ".venv" / ".stamp").exists()
    failing.unlink()
    clone.calls()
    assert clone.run()[0] == 0
    assert clone.calls() == ["pip"]


def test_a_working_environment_survives_a_failed_update(clone: Clone) -> None:
    clone.run()
    clone.calls()
    clone.pyproject.write_text("[project]\ndependencies = ['more']\n")
    Path(f"{clone.log}.fail").touch()
    assert clone.run()[0] == 1
    assert clone.calls() == ["pip"]
    assert (clone.root / ".venv" / "bin" / "python").exists()


def test_an_interrupted_installation_is_made_afresh(clone: Clone) -> None:
    clone.run()
    clone.calls()
    (clone.root / ".venv" / ".stamp").unlink()
    Path(f"{clone.log}.half").touch()
    assert clone.run()[0] == 1
    assert clone.calls() == ["pip", "venv", "pip"]


def test_an_installation_that_cannot_be_imported_is_not_stamped(clone: Clone) -> None:
    Path(f"{clone.log}.half").touch()
    assert clone.run()[0] == 1
    assert clone.calls() == ["venv", "pip"]
    assert not (clone.root / ".venv" / ".stamp").exists()


def test_two_set_ups_at_once_install_once(clone: Clone) -> None:
    both = [clone.start(), clone.start()]
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]
    assert clone.calls() == ["venv", "pip"]


def test_a_python_among_pyenvs_versions_is_found_when_the_shim_refuses(clone: Clone) -> None:
    folder = clone.bin.parent / ".pyenv" / "versions" / f"{VERSION}.7" / "bin"
    folder.mkdir(parents=True)
    shutil.move(clone.bin / f"python{VERSION}", folder / "python")
    clone.program(f"python{VERSION}", REFUSES)
    assert clone.run()[0] == 0
    assert clone.calls() == ["venv", "pip"]


def test_without_a_python_that_runs_the_message_says_which_and_how(clone: Clone) -> None:
    clone.program(f"python{VERSION}", REFUSES)
    code, _, err = clone.run()
    assert code == 1
    assert "No Python 3.12 or 3.13" in err
    assert "pyenv install 3.12" in err
    assert clone.calls() == []
