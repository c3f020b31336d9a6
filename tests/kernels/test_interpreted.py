"""Runs tests/kernels/interpreted in a process that interprets, and reports each of its files; see conftest.py for why."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "tests" / "kernels" / "interpreted"
LONG = {"test_attention", "test_every_case", "test_model"}
"""Files of half a minute: a default run interprets the linears, the quantisers, and what watches over them."""

FILES = [
    pytest.param(file.stem, marks=pytest.mark.slow if file.stem in LONG else ())
    for file in sorted(FOLDER.glob("test_*.py"))
]

Results = dict[str, list[tuple[str, str]]]
"""By file: name and failure (empty if it passed) of each of its tests."""


@pytest.fixture(scope="module")
def suite(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Results]:
    """The child's results for a marker expression, each run once, for the files that this run asks for."""
    done: dict[str, Results] = {}
    asked = {item.callspec.params["file"] for item in request.session.items if is_file(item)}

    def results(marker: str) -> Results:
        if marker not in done:
            report = tmp_path_factory.mktemp("interpreted") / "results.xml"
            done[marker] = run(marker, report, asked if marker == "not slow" else None)
        return done[marker]

    return results


def is_file(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == "test_in_the_interpreter"


def run(marker: str, report: Path, files: set[str] | None) -> Results:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker]
    places = (
        [str(FOLDER)] if files is None else [str(FOLDER / f"{file}.py") for file in sorted(files)]
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"--junitxml={report}", *places],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    found: Results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = [child for child in case if child.tag in ("failure", "error")]
        name, file = case.get("name", ""), case.get("classname", "").rpartition(".")[2]
        found.setdefault(file, []).append((name, (failure[0].text or "?") if failure else ""))
    return found


def check(results: list[tuple[str, str]]) -> None:
    failed = [f"{name}\n{text[-3000:]}" for name, text in results if text]
    assert not failed, f"{len(failed)} of {len(results)} failed\n\n" + "\n\n".join(failed)


@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(suite: Callable[[str], Results], file: str) -> None:
    results = suite("not slow")[file]
    assert results
    check(results)


@pytest.mark.slow
def test_the_long_ones_in_the_interpreter(suite: Callable[[str], Results]) -> None:
    results = suite("slow")
    assert results
    check([one for file in results.values() for one in file])


def test_kernels_import_and_describe_themselves_without_the_interpreter() -> None:
    """This process need not interpret to know every variant: wrappers run on meta tensors."""
    code = "from megatron_xorl.kernels import aot; print(len(aot.variants()))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 30
