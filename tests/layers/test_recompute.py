"""Full activation recompute over a frozen embedding: the same gradients to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_xorl.config.adapter import AdapterConfig
from tests.training.harness import randomise, use_one_process

RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _gradients(directory: Path, **overrides: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and every factor's gradient of one backward, A and B random."""
    use_one_process()
    from megatron.core.models.gpt import GPTModel

    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.specs import block_spec, transformer_config
    from megatron_xorl.training.model import attach_adapters, prepare_model
    from megatron_xorl.weights.reader import HfCheckpoint

    glm = load_glm_config(directory)
    config = transformer_config(glm, dtype=torch.float32, **overrides)
    model = GPTModel(
        config,
        block_spec(glm, config),
        vocab_size=glm.vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    prepare_model(model, glm, HfCheckpoint(directory))
    attach_adapters(model, AdapterConfig(rank=4, alpha=8))
    randomise(model)
    ids = torch.randint(0, 256, (2, 41), generator=torch.Generator().manual_seed(9))
    positions = torch.arange(40).expand(2, 40)
    model.train()
    loss = model(ids[:, :-1], positions, None, labels=ids[:, 1:]).mean()
    loss.backward()
    return loss.detach(), {
        name: parameter.grad for name, (_, _, parameter) in named_factors(model).items()
    }


def test_full_recompute_gives_the_same_loss_and_gradients_to_the_bit(tiny_dir: Path) -> None:
    loss, plain = _gradients(tiny_dir)
    again, recomputed = _gradients(tiny_dir, **RECOMPUTE)
    assert torch.equal(loss, again)
    assert len(plain) == 84
    different = [n for n, g in plain.items() if recomputed[n] is None or not g.equal(recomputed[n])]
    assert not different


def test_without_the_hook_on_the_frozen_embedding_the_gradients_vanish(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.layers import attach

    monkeypatch.setattr(attach, "_require_grad", lambda module, inputs, output: output)
    _, lost = _gradients(tiny_dir, **RECOMPUTE)
    # No checkpoint has an input that requires a gradient, so nothing inside one gets a gradient, and no error is raised.
    kept = [name for name, gradient in lost.items() if gradient is not None]
    assert kept == ["lm_head.lora_A", "lm_head.lora_B"]
