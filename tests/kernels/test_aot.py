"""Ahead-of-time compilation: every variant passes its gates for sm_90 and sm_100, and the golden table is what is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}

# Launches that must fail a gate: four warps do not hold the 128 x 128 fp32 accumulator beside its scaled copy; more stages than
# shared memory has room for.
CONTROLS = """
import dataclasses, json
from megatron_xorl.kernels import aot
known = aot.variants()
def changed(kernel, **settings):
    one = next(one for name, one in known.items() if name.startswith(kernel))
    return dataclasses.replace(one, config=one.config | settings)
spill = aot.compile_one("spill", changed("linear._kernel[EVEN=1,RANK=0", num_warps=4, num_stages=3), 90)
memory = aot.compile_one("memory", changed("linear._kernel[EVEN=1,RANK=0", num_stages=9), 90)
print(json.dumps([aot.faults(spill), aot.faults(memory)]))
"""


def python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads((ROOT / "kernels" / "golden.json").read_text(encoding="utf-8"))


def test_the_golden_table_passes_every_gate_and_holds_every_kernel(golden: dict) -> None:
    from megatron_xorl.kernels import aot

    reports = [aot.Report(**one) for one in golden["reports"]]
    assert [one.variant for one in reports if aot.faults(one)] == []
    assert {one.target for one in reports} == set(aot.TARGETS)
    assert {one.variant.partition("[")[0] for one in reports} == set(aot.PRODUCTS)
    products = [one for one in reports if aot.PRODUCTS[one.variant.partition("[")[0]]]
    assert all(one.opcode for one in products)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mma": 0}, "has no HGMMA"),
        ({"local": 3}, "spilled"),
        ({"shared": 232_449}, "shared memory"),
        ({"trap": True}, "lone trap"),
    ],
)
def test_each_gate_closes(change: dict, text: str) -> None:
    from megatron_xorl.kernels import aot

    good = {"variant": "k", "target": 90, "opcode": "HGMMA", "mma": 4, "registers": 9}
    good |= {"shared": 232_448, "local": 0, "trap": False}
    assert aot.faults(aot.Report(**good)) == []
    (fault,) = aot.faults(aot.Report(**good | change))
    assert text in fault


def test_a_lone_trap_is_told_from_a_kernel_with_an_assertion() -> None:
    from megatron_xorl.kernels import aot

    assert aot.is_lone_trap("{ trap; exit; }")
    assert not aot.is_lone_trap("{ @p trap; st.global.b32 [%rd1], %r1; ret; }")


def test_an_interpreting_process_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.kernels import aot

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it to compile"):
        aot.compile_all()


@pytest.mark.slow
def test_what_is_compiled_is_the_golden_table(golden: dict, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    found = json.loads(python("-m", "megatron_xorl.kernels.aot", "--json"))
    again = "run python -m megatron_xorl.kernels.aot --write and read the difference"
    assert found["triton"] == golden["triton"], f"another Triton: {again}"
    assert found["reports"] == golden["reports"], again


@pytest.mark.slow
def test_a_planted_spill_and_too_many_stages_are_caught() -> None:
    spill, memory = json.loads(python("-c", CONTROLS))
    assert "spilled" in spill[0]
    assert "shared memory" in memory[0]
