"""A launch checks its model once, after the first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import AdapterError
from megatron_xorl.layers.attach import named_factors
from megatron_xorl.training.launch import Launch
from megatron_xorl.training.model import forward_logits, load_model
from tests.training.harness import use_one_process


def test_a_gradient_on_a_frozen_factor_is_a_fault_and_a_sound_model_is_checked_once(
    tiny_dir: Path,
) -> None:
    use_one_process()
    adapter = AdapterConfig(rank=2, alpha=4, glm52_lora_scope="moe")
    model = load_model(tiny_dir, adapter)
    forward_logits(model, torch.arange(8).unsqueeze(0)).sum().backward()
    launch = SimpleNamespace(unchecked=[model], adapter=adapter)
    Launch.check_first_iteration(launch, iteration=1)
    assert launch.unchecked == []

    frozen = next(
        param for factor, _, param in named_factors(model).values() if not factor.trainable
    )
    frozen.grad = torch.zeros_like(frozen)
    launch.unchecked.append(model)
    with pytest.raises(AdapterError, match="is frozen and has a gradient"):
        Launch.check_first_iteration(launch, iteration=1)
