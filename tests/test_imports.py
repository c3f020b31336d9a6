"""Imports go one way, and the rooms that read configurations are light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each room may import of this package; a room that is not here fails, so that a new one is placed on purpose.
ARROWS: dict[str, set[str]] = {"errors": set()}
ARROWS["config"] = {"errors"}
ARROWS["adapters"] = {"config", "errors"}
ARROWS["plan"] = {"adapters", "config", "errors"}
ARROWS["kernels"] = set()
ARROWS["fp8"] = {"kernels", "config", "errors"}
ARROWS["weights"] = {"fp8", "adapters", "config", "errors"}
ARROWS["parallel"] = {"fp8", "adapters", "config", "errors"}
ARROWS["layers"] = {"kernels", "parallel", "weights", "fp8", "adapters", "config", "errors"}
ARROWS["specs"] = ARROWS["layers"] - {"kernels"} | {"layers"}
ARROWS["convert"] = ARROWS["specs"] | {"specs"}
ARROWS["training"] = ARROWS["specs"] | {"specs"}
ARROWS["parity"] = ARROWS["training"] | {"training", "convert"}
# At the top: the command line, what it prints with, and the training entry. They may use anything, and each other.
TOP = {"cli", "display", "doctor", "pretrain"}
for _name in TOP:
    ARROWS[_name] = ARROWS["parity"] | {"parity", "plan"} | TOP

# The one import against the arrows: Megatron's launch script names the spec and nothing else, so the
# spec, when called, hands over to the training room.
EXCEPTIONS = {("specs", "megatron_xorl.training.launch.launch_for")}

LIGHT = ("errors", "config", "adapters", "plan")
HEAVY = {"torch", "megatron", "transformer_engine", "triton", "transformers", "numpy"}
WITHOUT_MEGATRON = ("weights", "fp8", "kernels")
STDLIB_AND = {"kernels": {"torch", "triton"}}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield (room, file) of every module of the package; the package's own __init__ is the lazy table, tested below."""
    for folder, prefix in ((ROOT / "megatron_xorl", ()), (ROOT / "kernels", ("kernels",))):
        for file in sorted(folder.rglob("*.py")):
            parts = (*prefix, *file.relative_to(folder).with_suffix("").parts)
            if parts != ("__init__",):
                yield parts[0], file


def imported(source: str, package: str) -> set[str]:
    """Return the dotted names a module imports, anywhere in it, under ``TYPE_CHECKING`` and in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                if node.level
                else ""
            )
            stem = ".".join(part for part in (base, node.module or "") if part)
            names |= {f"{stem}.{alias.name}" for alias in node.names}
    return names


def faults(room: str, source: str, package: str = "megatron_xorl.room") -> list[str]:
    """Return what is wrong with the imports of a module of ``room``."""
    if room not in ARROWS:
        return [f"room {room} has no place in ARROWS"]
    found = []
    for name in sorted(imported(source, package)):
        parts = name.split(".")
        if parts[0] == "megatron_xorl":
            if (room, name) in EXCEPTIONS or len(parts) == 1:
                continue
            if parts[1] != room and parts[1] not in ARROWS[room] | {"__version__"}:
                found.append(f"{room} may not import {name}")
        elif parts[0] == "transformers":
            found.append(f"{room} may not import transformers: it is a reference for tests alone")
        elif room in LIGHT and parts[0] in HEAVY:
            found.append(f"{room} is light and may not import {name}")
        elif room in WITHOUT_MEGATRON and parts[0] == "megatron":
            found.append(f"{room} may not import Megatron-core")
        elif room in STDLIB_AND and parts[0] not in sys.stdlib_module_names | STDLIB_AND[room]:
            found.append(f"{room} may not import {name}")
    return found


@pytest.mark.parametrize(
    ("room", "file"),
    [pytest.param(room, file, id=str(file.relative_to(ROOT))) for room, file in modules()],
)
def test_imports_follow_the_arrows(room: str, file: Path) -> None:
    package = ".".join(("megatron_xorl", *file.relative_to(ROOT).parent.parts[1:]))
    assert faults(room, file.read_text(encoding="utf-8"), package) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("config", "from megatron_xorl.adapters.scopes import SCOPES"),
        ("config", "def f():\n    import torch"),
        ("adapters", "if TYPE_CHECKING:\n    from megatron_xorl.plan import x"),
        ("plan", "from ..weights import names"),
        ("weights", "import megatron.core"),
        ("fp8", "from megatron_xorl import weights"),
        ("layers", "from megatron_xorl.training.loop import x"),
        ("training", "import megatron_xorl.cli"),
        ("training", "from megatron_xorl.convert import tiny"),
        ("kernels", "import numpy"),
        ("convert", "from transformers import AutoConfig"),
        ("a_new_room", "import os"),
    ],
)
def test_an_import_against_the_arrows_is_caught(room: str, source: str) -> None:
    assert faults(room, source) != []


def test_the_exceptions_are_needed_and_hold_inside_functions_only() -> None:
    for room, name in EXCEPTIONS:
        source = (ROOT / "megatron_xorl" / f"{room}.py").read_text(encoding="utf-8")
        assert name in imported(source, "megatron_xorl")
        top = [
            node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert name not in imported("\n".join(map(ast.unparse, top)), "megatron_xorl")


def in_a_fresh_process(code: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


# Processor time, not time on the clock: what else the machine does is no property of the rooms.
LIGHT_IMPORT = """
import sys, time
start = time.process_time()
import importlib, pkgutil, megatron_xorl
for room in ("config", "adapters", "plan"):
    package = importlib.import_module(f"megatron_xorl.{room}")
    for item in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"megatron_xorl.{room}.{item.name}")
print(time.process_time() - start, sorted({"torch", "megatron", "transformer_engine", "numpy"} & set(sys.modules)))
"""


def test_the_light_rooms_import_in_under_half_a_second_without_torch() -> None:
    best = 9.9
    for _ in range(3):
        seconds, heavy = in_a_fresh_process(LIGHT_IMPORT).split(maxsplit=1)
        assert heavy == "[]"
        best = min(best, float(seconds))
    assert best < 0.5


def test_the_package_itself_imports_nothing_of_itself_until_a_name_is_used() -> None:
    code = """
import sys, megatron_xorl
before = [name for name in sys.modules if name.startswith("megatron_xorl.")]
assert before == [], before
from megatron_xorl import AdapterConfig
print(AdapterConfig.__module__, "torch" in sys.modules)
"""
    assert in_a_fresh_process(code) == "megatron_xorl.config.adapter False"


def test_every_exported_name_exists_where_the_table_says() -> None:
    import megatron_xorl

    for name, module in megatron_xorl._EXPORTS.items():
        tree = ast.parse(
            (ROOT / "megatron_xorl" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        )
        defined = {
            node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        assert name in defined, f"{name} is not defined in megatron_xorl.{module}"
        assert name in dir(megatron_xorl)
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        _ = megatron_xorl.nothing_of_the_kind
