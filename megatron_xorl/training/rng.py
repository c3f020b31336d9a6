"""The random state of one rank: torch, Megatron's tracker, Python and NumPy, as plain tensors.

Plain tensors need no pickle to be read back. A rank's state is restored only into the same layout; another layout starts its
generators from the seed, which is said.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch import Tensor

__all__ = ["get_rng_state", "set_rng_state"]

_TRACKER = "tracker."


def get_rng_state() -> dict[str, Tensor]:
    """All generators of this process, ``{name: integer tensor on CPU}``."""
    _, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64).view(torch.int64),
        "python": torch.tensor([version, *internal]),
        "python_gauss": torch.tensor(
            [float("nan") if gauss is None else gauss], dtype=torch.float64
        ).view(torch.int64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    for name, value in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        state[f"{_TRACKER}{name}"] = value.cpu()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Put back what :func:`get_rng_state` returned."""
    torch.set_rng_state(state["torch"])
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = float(state["numpy_gauss"].view(torch.float64))
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, *internal = state["python"].tolist()
    gauss = float(state["python_gauss"].view(torch.float64))
    random.setstate((version, tuple(internal), None if gauss != gauss else gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tracker = {
        name.removeprefix(_TRACKER): value
        for name, value in state.items()
        if name.startswith(_TRACKER)
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)
