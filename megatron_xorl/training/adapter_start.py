"""Start training from an adapter file alone: factors from the file, masters from the factors, Adam from zero.

An optimizer that exists already holds fp32 masters of the factors it was built with. A file that is loaded under it changes the
factors only, and the first update writes the old masters over them (radixark/miles#2572, #3143). So whoever loads a file into a
job loads it here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import nn

from megatron_xorl.layers.attach import named_factors
from megatron_xorl.training.adapter_io import load_adapter
from megatron_xorl.training.optimizer_state import STATE_KINDS, scatter_state

__all__ = ["start_from_adapter"]


def start_from_adapter(
    model: nn.Module,
    optimizer: MegatronOptimizer,
    path: str | Path,
    *,
    allow_missing: bool = False,
) -> None:
    """Load an adapter directory into a model and its optimizer, as a fresh start from these factors; collective.

    Moments are zero and every step is 0, whatever the optimizer held.

    Args:
        model: with the adapters of the file attached.
        optimizer: Megatron's, built on it.
        path: of the adapter.
        allow_missing: see :func:`~megatron_xorl.training.adapter_io.load_adapter`.

    Raises:
        AdapterError: the file is damaged, of another base, or does not fit the model's adapters.
        CheckpointError: no optimizer holds a factor.
    """
    load_adapter(model, path, allow_missing=allow_missing)
    parameters = {
        name: parameter
        for name, (factor, _, parameter) in named_factors(model).items()
        if factor.trainable
    }
    state = {}
    for name, parameter in parameters.items():
        zero = torch.zeros(parameter.shape, device=parameter.device)
        values = (parameter.detach().float(), zero, zero)
        state[name] = dict(zip(STATE_KINDS, values, strict=True))
    scatter_state(optimizer, parameters, state, dict.fromkeys(parameters, 0))
