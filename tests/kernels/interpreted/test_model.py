"""A whole model on the ``triton`` backend, every kernel interpreted: as close to fp32 as the reference backend in bf16 is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_xorl.fp8 import engine
from megatron_xorl.fp8.engine import use_fp8
from megatron_xorl.kernels.subjects import relative
from tests.training.harness import use_one_process

NO_FURTHER = 1.5
"""How much further from fp32, against the reference backend: both round to bf16 at every step, at other places."""


@pytest.fixture(autouse=True)
def _forget_the_choice() -> Iterator[None]:
    yield
    engine._asked.backend = engine._asked.mode = None
    engine.engine_on.cache_clear()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_xorl.convert.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", block=128)


def run(base: Path, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits, and the gradient of every factor, of a model whose adapters are not zero; more keys than topk."""
    use_one_process()
    import megatron_xorl as mx

    use_fp8(backend=backend, mode="w8a16")
    model = mx.load_model(base, dtype=dtype)
    mx.attach_adapters(model, mx.AdapterConfig(rank=4, alpha=8))
    draw = torch.Generator().manual_seed(2)
    factors = mx.trainable_factors(model)
    for factor in factors.values():
        factor.data = torch.randn(factor.shape, generator=draw).mul(0.02).to(dtype)
    tokens = torch.randint(0, 200, (1, 40), generator=torch.Generator().manual_seed(1))
    logits = mx.forward_logits(model, tokens)
    torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
    found = {name: factor.grad for name, factor in factors.items()}
    assert all(gradient is not None for gradient in found.values())
    return {"logits": logits.detach()} | found


def test_logits_and_gradients(base: Path) -> None:
    exact = run(base, "reference", torch.float32)
    theirs = run(base, "reference", torch.bfloat16)
    ours = run(base, "triton", torch.bfloat16)
    assert not torch.equal(theirs["logits"], ours["logits"])

    def error(found: dict[str, Tensor]) -> tuple[float, float]:
        errors = {name: relative(value, exact[name]) for name, value in found.items()}
        return errors["logits"], sum(errors.values()) / len(errors)

    for own, other in zip(error(ours), error(theirs), strict=True):
        assert own < NO_FURTHER * other
