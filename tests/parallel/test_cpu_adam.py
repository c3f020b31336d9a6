"""The CPU Adam against torch.optim.AdamW and torch.optim.Adam, and its FusedAdam-like state."""

from __future__ import annotations

import pytest
import torch

from megatron_xorl.errors import PlatformError
from megatron_xorl.parallel.cpu_adam import CpuFusedAdam

SHAPES = ((7,), (3, 5), (2, 3, 4), (6,))


def _groups(dtype: torch.dtype) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES
    ]
    parameters = [torch.nn.Parameter(value) for value in values]
    return [
        {"params": parameters[:2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": parameters[2:], "lr": 3e-3, "weight_decay": 0.0},
    ]


def _set_gradients(groups: list[dict], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    parameters = [parameter for group in groups for parameter in group["params"]]
    for parameter in parameters[:-1]:  # the last never has a gradient
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.to(parameter.dtype)


def _difference(
    dtype: torch.dtype, adam_w_mode: bool, betas: tuple[float, float] = (0.9, 0.95)
) -> float:
    """Return the largest elementwise difference after 20 steps, relative to the distance moved."""
    ours, theirs, start = _groups(dtype), _groups(dtype), _groups(dtype)
    reference = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer = CpuFusedAdam(ours, betas=betas, adam_w_mode=adam_w_mode)
    expected = reference(theirs, betas=(0.9, 0.95))
    for number in range(20):
        _set_gradients(ours, number)
        _set_gradients(theirs, number)
        optimizer.step()
        expected.step()
    flat = [
        torch.cat([p.detach().flatten() for g in gs for p in g["params"]])
        for gs in (ours, theirs, start)
    ]
    return ((flat[0] - flat[1]).abs().max() / (flat[1] - flat[2]).abs().max()).item()


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
def test_twenty_steps_equal_torchs(dtype: torch.dtype, bound: float, adam_w_mode: bool) -> None:
    assert _difference(dtype, adam_w_mode) < bound


def test_another_beta_is_seen_by_the_comparison() -> None:
    assert _difference(torch.float64, True, betas=(0.9, 0.951)) > 1e-4


def test_a_parameter_without_a_gradient_keeps_its_value_and_has_no_state() -> None:
    groups = _groups(torch.float32)
    idle = groups[1]["params"][-1]
    before = idle.detach().clone()
    optimizer = CpuFusedAdam(groups, weight_decay=0.5)
    _set_gradients(groups, 0)
    optimizer.step()
    assert torch.equal(idle, before)
    assert idle not in optimizer.state


def test_state_is_laid_out_as_fused_adams() -> None:
    groups = [*_groups(torch.float32), {"params": []}]
    optimizer = CpuFusedAdam(groups)
    _set_gradients(groups, 0)
    optimizer.step()
    optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [2, 2, None]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_a_reloaded_optimizer_continues_to_the_same_bits() -> None:
    straight, resumed = _groups(torch.float32), _groups(torch.float32)
    first, second = CpuFusedAdam(straight), CpuFusedAdam(resumed)
    for number in range(4):
        for groups, optimizer in ((straight, first), (resumed, second)):
            _set_gradients(groups, number)
            optimizer.step()
        if number == 1:
            loaded = CpuFusedAdam(resumed)
            loaded.load_state_dict(second.state_dict())
            second = loaded
    for ours, theirs in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours["params"], theirs["params"], strict=True))


@pytest.mark.parametrize(
    "option", ["amsgrad", "capturable", "master_weights", "use_decoupled_grad"]
)
def test_options_that_need_kernels_are_refused(option: str) -> None:
    with pytest.raises(PlatformError, match=option):
        CpuFusedAdam(_groups(torch.float32), **{option: True})
