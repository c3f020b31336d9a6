"""The random state of a rank: what was drawn after saving is drawn again, from every generator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worlds import run_world

pytestmark = pytest.mark.dist


def draws() -> list[float]:
    """Draw from every generator a training run can use; the normal ones keep a second value for later."""
    import random

    import numpy as np
    import torch
    from megatron.core import tensor_parallel

    found = [torch.rand(1).item(), random.random(), random.gauss(0, 1)]
    found += [float(np.random.random()), float(np.random.normal())]
    tracker = tensor_parallel.get_cuda_rng_tracker()
    for name in sorted(tracker.get_states()):
        with tracker.fork(name):
            found.append(torch.rand(1).item())
    return found


def save_draw_restore() -> dict[str, Any]:
    """Return the draws after saving, after restoring, and after restoring all but one kind of state."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.rng import get_rng_state, set_rng_state

    use_cpu()
    initialize()
    draws()  # so that the normal generators hold a second value
    saved = {kind: value.clone() for kind, value in get_rng_state().items()}
    first = draws()
    found: dict[str, Any] = {"first": first, "kinds": sorted(saved), "without": {}}
    draws()
    set_rng_state(saved)
    found["again"] = draws()
    for kind in saved:
        draws()
        set_rng_state(saved | {kind: get_rng_state()[kind]})
        found["without"][kind] = draws()
    found["dtypes"] = {str(value.dtype) for value in saved.values()}
    return found


def test_every_generator_continues_where_it_was_and_each_kind_of_state_is_needed() -> None:
    (found,) = run_world(save_draw_restore, 1)
    assert found["again"] == found["first"]
    assert {"torch", "numpy", "numpy_gauss", "python", "python_gauss"} <= set(found["kinds"])
    assert any(kind.startswith("tracker.") for kind in found["kinds"])
    for kind, drawn in found["without"].items():
        assert drawn != found["first"], kind
    # Plain integers: read back without pickle, NaN included.
    assert found["dtypes"] == {"torch.uint8", "torch.int64"}
