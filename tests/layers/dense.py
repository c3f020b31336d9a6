"""The tiny model on dense weights, and its frozen weights in full: what merging is judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_xorl.config.adapter import AdapterConfig

ADAPTER: dict[str, Any] = {"rank": {"routed_experts": 2, "default": 3}, "alpha": 6}


def tokens(length: int = 40) -> Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(5))


def dense_weight(base: Any) -> Tensor:
    """The whole weight in fp32, ``[(E,) N, K]``."""
    rows, cols = slice(0, base.shape[-2]), slice(0, base.shape[-1])
    if len(base.shape) == 2:
        return base.tile(torch.float32, rows=rows, cols=cols).clone()
    return torch.stack(
        [base.tile(torch.float32, rows=rows, cols=cols, expert=e) for e in range(base.shape[0])]
    )


def load(directory: Path | str, *, dense: bool = True, dtype: Any = torch.float32, **adapter: Any) -> Any:  # fmt: skip
    """The model with random factors, in evaluation mode; its base dequantised to ``dtype`` if ``dense``."""
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.layers.switch import hosts_of
    from megatron_xorl.training.model import load_model
    from tests.training.harness import randomise

    model = load_model(directory, AdapterConfig(**(ADAPTER | adapter)), dtype=dtype).eval()
    randomise(model)
    with torch.no_grad():
        for name, (_, _, parameter) in named_factors(model).items():
            if name.endswith("lora_B"):
                parameter.mul_(0.2)  # changes of some percent of the weights, as training makes
    if dense:
        for host in hosts_of(model):
            host.base.set_dense(dense_weight(host.base))
    return model


def logits_of(model: Any, length: int = 40) -> Tensor:
    from megatron_xorl.training.model import forward_logits

    with torch.no_grad():
        logits = forward_logits(model, tokens(length))
    assert logits is not None
    return logits


def held_bytes(model: Any) -> dict[str, Tensor]:
    """A copy of every buffer of every frozen weight."""
    from megatron_xorl.layers.base import megatron_modules
    from megatron_xorl.layers.host import AdapterHost

    return {
        f"{name}.{leaf}": buffer.clone()
        for name, host in megatron_modules(model).items()
        if isinstance(host, AdapterHost)
        for leaf, buffer in host.base.named_buffers()
    }
