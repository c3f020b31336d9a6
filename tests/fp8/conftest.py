"""Every backend of the FP8 engine, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_xorl.fp8 import engine, native
from megatron_xorl.fp8.cpu import CpuBackend
from megatron_xorl.fp8.engine import Backend

# "cpu, bf16 GEMM" is the path of a CPU with bf16 instructions, which runs, slowly, on every CPU.
BACKENDS = ("reference", "cpu, fp32 GEMM", "cpu, bf16 GEMM")


@pytest.fixture(autouse=True)
def _forget_the_choice() -> Iterator[None]:
    """Leave no choice of a test's to the next."""
    yield
    engine._asked.backend = engine._asked.mode = None
    engine.engine_on.cache_clear()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Use each backend in turn."""
    if request.param == "reference":
        return engine.use_fp8(backend="reference").backend
    native = request.param.endswith("bf16 GEMM")
    monkeypatch.setattr(engine, "_cpu", lambda device: CpuBackend(native_bf16=native))
    return engine.use_fp8(backend="cpu").backend


@pytest.fixture(autouse=True)
def _forget_the_library() -> Iterator[None]:
    """A library of a test's own folder is not the next test's."""
    yield
    native.library.cache_clear()
