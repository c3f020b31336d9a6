"""A model, its transformers oracle, and their comparison on one batch longer than ``index_topk``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracle import hf_oracle

MAX_ABS, MEAN_KL, LENGTH = 1e-5, 1e-7, 80


def token_ids(batch: int = 2, length: int = LENGTH, seed: int = 3) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def gap(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Max-abs difference of the logits, and mean KL in fp64."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return (found - expected).abs().max().item(), kl.item()


def agrees(found: Tensor, expected: Tensor) -> bool:
    largest, kl = gap(found, expected)
    print(f"max-abs {largest:.2e}, mean KL {kl:.1e}")
    return largest <= MAX_ABS and kl <= MEAN_KL


class ParityCase:
    """A loaded model, the oracle of the same directory, and what both gave and chose on one batch."""

    def __init__(self, directory: Path) -> None:
        from megatron_xorl.training.model import load_model

        self.directory = directory
        self.model = load_model(directory)
        self.oracle = hf_oracle(directory)
        self.hf_selected: dict[int, Tensor] = {}
        self.hf_routes: dict[int, tuple[Tensor, Tensor]] = {}
        hooks = list(self._watch_oracle())
        with torch.no_grad():
            self.expected = self.oracle(input_ids=token_ids()).logits
        for hook in hooks:
            hook.remove()

    def _watch_oracle(self) -> Iterator[Any]:
        for number, layer in enumerate(self.oracle.model.layers):

            def routed(_: Any, __: Any, out: Any, n: int = number) -> None:
                self.hf_routes[n] = (out[2], out[1])

            def indexed(_: Any, __: Any, out: Tensor, n: int = number) -> None:
                self.hf_selected[n] = out.long()

            if layer.self_attn.indexer is not None:
                yield layer.self_attn.indexer.register_forward_hook(indexed)
            if hasattr(layer.mlp, "gate"):
                yield layer.mlp.gate.register_forward_hook(routed)

    def logits(self, ids: Tensor | None = None, **named: Any) -> Tensor:
        from megatron_xorl.training.model import forward_logits

        with torch.no_grad():
            return forward_logits(self.model, token_ids() if ids is None else ids, **named)

    def parts(self, kind: type) -> list[tuple[int, Any]]:
        return [
            (layer.layer_number - 1, part)
            for layer in self.model.decoder.layers
            for part in layer.modules()
            if isinstance(part, kind)
        ]
