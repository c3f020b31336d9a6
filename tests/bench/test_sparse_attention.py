"""The benchmark of sparse attention runs, at a small size, and its two forms agree."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_benchmark_prints_both_forms_their_ratio_and_their_growth() -> None:
    small = "--lengths 64 128 --topk 16 --heads 2 --latent 16 --rope 8 --repeat 1"
    command = [sys.executable, "-m", "tests.bench.sparse_attention", *small.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if line.split()[0] in ("64", "128")]
    assert [int(row[0]) for row in rows] == [64, 128]
    # The last column: outputs and gradients, relative; fp32 rounding.
    assert all(float(row[-1]) <= 1e-5 for row in rows)
    assert sum("grow with S^" in line for line in lines) == 4
