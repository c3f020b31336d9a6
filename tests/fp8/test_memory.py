"""Memory of the cpu backend: a scratch of 8 MiB a thread for everything, and nothing else beside a call's outputs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from megatron_xorl.fp8 import cpu
from megatron_xorl.fp8.engine import use_fp8
from megatron_xorl.fp8.linear import frozen_grouped_linear, frozen_linear
from tests.fp8.weights import frozen, inputs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_scratch_is_one_a_thread_whatever_the_weights(dtype: torch.dtype) -> None:
    use_fp8(backend="cpu")
    pools: list[int] = []

    def several() -> None:
        for experts, width in ((2, 64), (5, 256), (3, 1200)):
            single, _ = frozen((width, width), (32, 32), dtype)
            bank, _ = frozen((experts, width, width), (32, 32), dtype)
            x = inputs(3 * experts, width, dtype=dtype)
            (
                frozen_linear(x, single) + frozen_grouped_linear(x, bank, [3] * experts)
            ).sum().backward()
            pools.append(cpu._scratch.pool.data_ptr())
            assert cpu._scratch.pool.nbytes == 8 * 2**20

    several()
    other = threading.Thread(target=several)
    other.start()
    other.join()
    assert len(set(pools[:3])) == len(set(pools[3:])) == 1 and pools[0] != pools[3]


def _measured(which: str, dtype: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.workers.fp8_memory", which, dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the high-water mark of Linux"
)


@needs_proc
@pytest.mark.parametrize(
    ("which", "dtype"),
    [
        ("linear", "bf16"),
        pytest.param("linear", "fp32", marks=pytest.mark.slow),
        pytest.param("bank", "bf16", marks=pytest.mark.slow),
        pytest.param("bank", "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_call_takes_no_more_than_the_scratch_and_its_outputs(which: str, dtype: str) -> None:
    found = _measured(which, dtype)
    # N = K: dX is as large as the output. The scratch was there before, so it is allowed for what BLAS packs.
    allowed = found["scratch"] + found["output"]
    assert found["forward"] <= allowed and found["backward"] <= allowed, found


@needs_proc
@pytest.mark.slow
def test_a_weight_dequantised_at_once_is_seen_by_the_same_measure() -> None:
    found = _measured("whole weight", "fp32")
    assert found["forward"] > found["scratch"] + found["output"], found
