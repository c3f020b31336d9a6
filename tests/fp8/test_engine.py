"""Which backend and mode a process uses, and what is said when it is not the one that was hoped for."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron_xorl.errors import PlatformError
from megatron_xorl.fp8 import engine, native
from megatron_xorl.fp8.engine import forward_record, use_fp8
from megatron_xorl.fp8.linear import frozen_linear
from tests.fp8.weights import frozen, inputs, relative


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-here")
    native.library.cache_clear()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_XORL_FP8_BACKEND", raising=False)
    monkeypatch.delenv("MEGATRON_XORL_FP8_MODE", raising=False)
    engine.engine_on.cache_clear()


def test_a_cpu_that_can_build_uses_the_fast_backend_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = engine.engine_on("cpu")
    assert (found.backend.name, found.mode) == ("cpu", "w8a16") and not caplog.records


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_one_warning_says_what_is_missing_and_how_to_get_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight, exact = frozen((64, 32), (32, 32), torch.float32)
    x = inputs(4, 32, dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            y = frozen_linear(x, weight)
    assert relative(y, x.double() @ exact.T) <= 1e-6
    (record,) = caplog.records
    assert (
        "a-compiler-that-is-not-here" in record.getMessage()
        and "install g++" in record.getMessage()
    )
    assert engine.engine_on("cpu").backend.name == "reference"


@pytest.mark.usefixtures("no_compiler")
def test_a_backend_asked_for_by_name_is_an_error_where_it_cannot_run() -> None:
    with pytest.raises(PlatformError, match=r"FP8 backend cpu .*no C\+\+ compiler"):
        use_fp8(backend="cpu")
    assert use_fp8(backend="reference").backend.name == "reference"


@pytest.mark.parametrize(
    ("backend", "mode", "named"),
    [
        ("cpuu", None, "did you mean cpu"),
        (None, "w8a18", "w8a16, w8a8"),
        ("cuda", None, "auto, reference, cpu, triton"),
        ("triton", None, "needs a GPU"),
    ],
)
def test_an_unknown_name_is_refused_and_the_choice_before_stays(
    backend: str | None, mode: str | None, named: str
) -> None:
    use_fp8(backend="reference", mode="w8a8")
    with pytest.raises(PlatformError, match=named):
        use_fp8(backend=backend, mode=mode)
    assert forward_record() == {"mode": "w8a8", "backend": "reference"}


def test_the_environment_chooses_and_a_call_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_XORL_FP8_BACKEND", "reference")
    monkeypatch.setenv("MEGATRON_XORL_FP8_MODE", "w8a8")
    assert forward_record() == {"mode": "w8a8", "backend": "reference"}
    use_fp8(backend="cpu")
    assert forward_record() == {"mode": "w8a8", "backend": "cpu"}
    use_fp8(backend="auto", mode="w8a16")  # auto leaves it to the environment
    assert forward_record() == {"mode": "w8a16", "backend": "reference"}


def test_fp64_activations_always_meet_the_reference() -> None:
    found = engine.engine(torch.zeros(1, dtype=torch.float64))
    assert found.backend.name == "reference" and "float64" in found.why


def test_tensors_on_another_device_are_not_given_to_the_cpu_backend() -> None:
    assert engine.engine_on("cuda").backend.name == "reference"
    use_fp8(backend="cpu")
    with pytest.raises(PlatformError, match="the tensors are on cuda"):
        engine.engine_on("cuda")
