"""What is installed: every package, the data beside it, and no top-level ``kernels``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_in(tree: Path) -> set[str]:
    """Return the packages a source tree holds: the folders with an ``__init__.py``, kernels as it is mapped."""
    found = {
        str(file.parent.relative_to(tree)).replace("/", ".")
        for file in (tree / "megatron_xorl").rglob("__init__.py")
    }
    kernels = {
        str(file.parent.relative_to(tree)).replace("/", ".")
        for file in (tree / "kernels").rglob("__init__.py")
    }
    return found | {f"megatron_xorl.{name}" for name in kernels}


def folders_of_modules(tree: Path) -> set[Path]:
    """Return the folders that hold Python files."""
    return {
        file.parent for top in ("megatron_xorl", "kernels") for file in (tree / top).rglob("*.py")
    }


def test_the_packages_listed_are_those_of_the_tree() -> None:
    listed = SETTINGS["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_in(ROOT)
    assert all((folder / "__init__.py").is_file() for folder in folders_of_modules(ROOT))


def test_a_package_missing_from_the_list_would_be_seen(tmp_path: Path) -> None:
    for folder in ("megatron_xorl/config/deeper", "kernels/new"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    assert packages_in(tmp_path) == {"megatron_xorl.config.deeper", "megatron_xorl.kernels.new"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("megatron_xorl", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built).namelist()


def test_the_wheel_has_one_top_level_package(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"megatron_xorl"}


def test_the_wheel_holds_every_module_and_every_preset(wheel: list[str]) -> None:
    for file in (ROOT / "megatron_xorl").rglob("*"):
        if file.suffix in (".py", ".json", ".typed", ".cpp"):
            assert str(file.relative_to(ROOT)) in wheel
    for file in (ROOT / "kernels").rglob("*"):
        if file.suffix in (".py", ".json", ".sh"):
            assert f"megatron_xorl/{file.relative_to(ROOT)}" in wheel
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_no_installed_package_is_called_kernels(tmp_path: Path) -> None:
    code = "import importlib.util as u, megatron_xorl.kernels as k; print(u.find_spec('kernels'), k.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None", "megatron_xorl.kernels"]


@pytest.mark.slow
def test_transformers_does_not_take_our_folder_for_the_package_of_that_name() -> None:
    code = "from transformers.utils import is_kernels_available as a; import kernels; print(a(), kernels.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    available, where = done.stdout.split()
    assert available == "False"
    assert Path(where) == ROOT / "kernels" / "__init__.py"
