"""The table at the end of a run says what passed, what failed and by which check."""

from __future__ import annotations

from tests.layouts.matrix import Verdict
from tests.layouts.table import lines

FIGURES = {"gradient": 2.5e-6, "grad_norm": 1e-7, "loss": 3e-8, "drift": 4e-6}


def test_a_line_has_the_figures_and_names_the_checks_that_failed() -> None:
    good = Verdict("tp2", FIGURES, copies=120, seconds=3.2, cpu_seconds=6.1)
    bad = Verdict("dp2 ep2", failed={"replicas": "gate_proj: rank 0 against rank 1", "start": ""})
    half = Verdict("cp2 bf16", FIGURES, flips=3, bounds=dict.fromkeys(FIGURES, 0.25))
    limits, head, *rows, bounds, total = lines([good, bad, half])
    assert "gradient 1e-05" in limits and "drift 1e-03" in limits
    assert head.split()[:5] == ["layout", "gradient", "grad_norm", "loss", "drift"]
    assert rows[0].split() == [
        "tp2",
        "2.5e-06",
        "1.0e-07",
        "3.0e-08",
        "4.0e-06",
        "0",
        "120",
        "equal",
        "3.2",
        "6.1",
        "pass",
    ]
    assert "differ" in rows[1] and rows[1].endswith("FAIL start, replicas")
    assert rows[2].split()[6] == "3" and rows[2].endswith("pass")
    assert bounds.split()[2:6] == ["2.5e-01"] * 4
    assert total == "3 layouts, 2 pass, 1 fail"
