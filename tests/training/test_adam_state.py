"""Zero Adam state for what was never stepped: torch's own state is the oracle, torch's own failure the control."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import megatron_xorl as mx
from megatron_xorl.errors import CheckpointError
from megatron_xorl.parallel.cpu_adam import CpuFusedAdam
from megatron_xorl.training.adam_state import adam_optimizers, materialize_adam_state
from megatron_xorl.training.torch_state import load_torch_state, save_torch_state
from tests.workers.adapter_job import tokens_of
from tests.worlds import run_world

# --- what is created --------------------------------------------------------------------------------------------------------

FLAGS = [
    dict(zip(("amsgrad", "fused", "capturable"), values, strict=True))
    for values in itertools.product((False, True), repeat=3)
    if not values[1] or not values[2]
]


def described(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        key: (value.dtype, value.device, value.shape, value.stride(), value.requires_grad)
        for key, value in state.items()
    }


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_state_is_what_torch_itself_would_create(
    kind: Any, flags: dict[str, bool], double: bool
) -> None:
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    try:
        ours, theirs = (nn.Parameter(torch.randn(3, 4).t()) for _ in range(2))
        mine, oracle = (kind([parameter], **flags) for parameter in (ours, theirs))
        assert materialize_adam_state(mine) == 1
        theirs.grad = torch.ones_like(theirs)
        oracle._init_group(oracle.param_groups[0], *([] for _ in range(6)))
        assert described(mine.state[ours]) == described(oracle.state[theirs])
        assert not any(bool(value.any()) for value in mine.state[ours].values())
    finally:
        torch.set_default_dtype(torch.float32)


class TeLike(torch.optim.Optimizer):
    """Transformer Engine's FusedAdam as far as its state goes: its own dtypes, masters it owns, step in the group."""

    def __init__(self, params: Any, master_weights: bool = False) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.95), "bias_correction": True})
        self.master_weights, self.store_param_remainders = master_weights, False
        self.state = defaultdict(dict)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert store_param_remainders is False
        for key in ("exp_avg", "exp_avg_sq"):
            self.state[param][key] = torch.zeros_like(param, dtype=torch.bfloat16)
        if self.master_weights:
            self.state[param]["master_param"] = param.detach().clone().float()


class ApexLike(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.95), "bias_correction": True})


@pytest.mark.parametrize(
    ("make", "dtype", "keys"),
    [
        (CpuFusedAdam, torch.float16, {"exp_avg", "exp_avg_sq"}),
        (TeLike, torch.bfloat16, {"exp_avg", "exp_avg_sq"}),
        (lambda p: TeLike(p, True), torch.bfloat16, {"exp_avg", "exp_avg_sq", "master_param"}),
        (ApexLike, torch.float32, {"exp_avg", "exp_avg_sq"}),
    ],
    ids=["ours", "te", "te with masters", "apex"],
)
def test_fused_adams_get_their_own_state_and_a_step_in_the_group(
    make: Any, dtype: torch.dtype, keys: set[str]
) -> None:
    parameter, frozen = (
        nn.Parameter(torch.ones(3, dtype=torch.float16)),
        nn.Parameter(torch.ones(3)),
    )
    frozen.requires_grad_(False)
    optimizer = make([{"params": [parameter]}, {"params": [frozen]}, {"params": []}])
    assert materialize_adam_state(optimizer) == 1
    state = optimizer.state[parameter]
    assert state.keys() == keys
    assert {state[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {dtype}
    assert frozen not in optimizer.state
    assert [group.get("step") for group in optimizer.param_groups] == [0, 0, None]
    before = dict(state)
    assert materialize_adam_state(optimizer) == 0
    assert all(optimizer.state[parameter][key] is value for key, value in before.items())


def test_a_group_that_has_stepped_keeps_its_step() -> None:
    used, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = CpuFusedAdam([used, idle])
    used.grad = torch.ones(3)
    optimizer.step()
    moments = optimizer.state[used]["exp_avg"].clone()
    assert materialize_adam_state(optimizer) == 1
    assert optimizer.param_groups[0]["step"] == 1
    assert torch.equal(optimizer.state[used]["exp_avg"], moments)


class Wrapper:
    """Megatron's wrappers as far as their attributes go."""

    def __init__(self, optimizer: Any = None, chained: Any = None, stub: bool = False) -> None:
        if chained is None:
            self.optimizer = optimizer
        else:
            self.chained_optimizers = chained
        self.is_stub_optimizer = stub


def test_wrappers_are_looked_through_and_empty_ones_passed_over() -> None:
    inner = [torch.optim.AdamW([nn.Parameter(torch.ones(2))]) for _ in range(2)]
    chained = Wrapper(
        chained=[
            Wrapper(inner[0]),
            Wrapper(None, stub=True),
            Wrapper(inner[1]),
            Wrapper(chained=[]),
        ]
    )
    assert list(adam_optimizers(chained)) == inner
    assert materialize_adam_state(chained) == 2


def test_partly_missing_state_and_other_optimizers_are_refused_by_name() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    materialize_adam_state(optimizer)
    del optimizer.state[parameter]["exp_avg_sq"]
    with pytest.raises(
        CheckpointError, match=r"parameter 0 of group 0 has exp_avg, step and no exp_avg_sq"
    ):
        materialize_adam_state(optimizer)
    with pytest.raises(CheckpointError, match=r"lm_head\.lora_B has exp_avg, step and no"):
        materialize_adam_state(optimizer, {parameter: "lm_head.lora_B"})
    with pytest.raises(CheckpointError, match="the optimizer is SGD; expected"):
        materialize_adam_state(torch.optim.SGD([parameter]))


def test_materialised_and_lazy_trajectories_have_the_same_bits_and_zero_gradients_are_another_thing() -> (
    None
):
    def run(materialised: bool, zero_gradient: bool = False) -> torch.Tensor:
        torch.manual_seed(0)
        late = nn.Parameter(torch.randn(8))
        optimizer = torch.optim.AdamW([late], lr=1e-2, weight_decay=0.1, amsgrad=True)
        for step in range(8):
            late.grad = torch.randn(8) if step >= 3 else None
            if zero_gradient and step < 3:
                late.grad = torch.zeros(8)
            if materialised:
                materialize_adam_state(optimizer)
            optimizer.step()
        return late.detach()

    assert torch.equal(run(True), run(False))
    assert not torch.equal(run(True, zero_gradient=True), run(False))


# --- a plain torch optimizer in the library path ----------------------------------------------------------------------------

ADAPTER = {"rank": 2, "alpha": 4}
IDLE, LATE, STEPS = "model.layers.1.self_attn.o_proj", 3, 6
"""A projection that gets no gradient in the first three of six steps."""


class Loop:
    """A library user's loop: our model, torch's AdamW, no Megatron optimizer."""

    def __init__(self, model_dir: Path, seed: int = 1234) -> None:
        mx.use_cpu()
        mx.initialize()
        self.model = mx.load_model(str(model_dir), adapters=None, dtype=torch.float32)
        mx.attach_adapters(self.model, mx.AdapterConfig(**ADAPTER), seed=seed)
        self.factors = mx.trainable_factors(self.model)
        self.optimizer = torch.optim.AdamW(
            self.factors.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1
        )

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        tokens = tokens_of(number)
        positions = torch.arange(tokens.shape[1] - 1)[None]
        loss = self.model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        if number < LATE:
            for side in "AB":
                self.factors[f"{IDLE}.lora_{side}"].grad = None
        self.optimizer.step()
        return loss.item()

    def factor_bytes(self) -> dict[str, bytes]:
        return {name: value.detach().numpy().tobytes() for name, value in self.factors.items()}


def train_and_save(model_dir: Path, folder: Path) -> dict[str, Any]:
    """Uninterrupted; saved before the first and after the third step, by us and by torch alone, in both forms."""
    loop = Loop(model_dir)
    torch_alone(loop, folder / "fresh torch", flatten=True)
    loop.optimizer.state.clear()  # torch has just stepped with zero gradients
    for flatten in (False, True):
        save_torch_state(folder / f"fresh {flatten}", loop.model, loop.optimizer, flatten=flatten)
        loop.optimizer.state.clear()
    trajectory = [(loop.step(number), loop.factor_bytes()) for number in range(LATE)]
    for flatten in (False, True):
        torch_alone(loop, folder / f"torch {flatten}", flatten=flatten)
    lacking = sorted(n for n, p in loop.factors.items() if not loop.optimizer.state[p])
    for flatten in (False, True):
        save_torch_state(folder / f"ours {flatten}", loop.model, loop.optimizer, flatten=flatten)
    trajectory += [(loop.step(number), loop.factor_bytes()) for number in range(LATE, STEPS)]
    return {"trajectory": trajectory, "lacking": lacking}


def torch_alone(loop: Loop, path: Path, *, flatten: bool) -> None:
    """Save as a user of torch's own functions does."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, ignore_frozen_params=True)
    optim = get_optimizer_state_dict(loop.model, loop.optimizer, options=options)
    model = {name: p for name, p in loop.model.named_parameters() if p.requires_grad}
    dcp.save({"model": model, "optim": optim}, checkpoint_id=str(path))


def load_and_train(model_dir: Path, path: Path, first: int) -> dict[str, Any]:
    """In a fresh process, with other initial factors: load, train to the end."""
    loop = Loop(model_dir, seed=99)
    absent = load_torch_state(path, loop.model, loop.optimizer)
    told = {"start": loop.factor_bytes(), "absent": absent}
    told["trajectory"] = [(loop.step(n), loop.factor_bytes()) for n in range(first, STEPS)]
    return told


def load_by_torch_alone(model_dir: Path, path: Path, flatten: bool) -> str:
    loop = Loop(model_dir, seed=99)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, ignore_frozen_params=True)
    state = {"optim": get_optimizer_state_dict(loop.model, loop.optimizer, options=options)}
    try:
        dcp.load(state, checkpoint_id=str(path))
    except BaseException as error:  # torch's CheckpointException is no Exception
        return str(error)
    return "loaded"


@pytest.fixture(scope="module")
def trained(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of the checkpoints, and what the uninterrupted run did."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run_world(train_and_save, 1, tiny_dir, folder)[0]


@pytest.mark.dist
@pytest.mark.parametrize("flatten", [False, True], ids=["native", "flattened"])
def test_a_factor_without_gradient_for_three_steps_goes_on_to_the_same_bits_in_a_fresh_process(
    tiny_dir: Path, trained: tuple[Path, Any], flatten: bool
) -> None:
    folder, whole = trained
    keys = dcp.FileSystemReader(str(folder / f"ours {flatten}")).read_metadata().state_dict_metadata
    assert {key for key in keys if key.startswith("model.") and "lora_" not in key} == set()
    assert whole["lacking"] == [f"{IDLE}.lora_{side}" for side in "AB"]
    (again,) = run_world(load_and_train, 1, tiny_dir, folder / f"ours {flatten}", LATE)
    assert again["start"] == whole["trajectory"][LATE - 1][1]
    assert again["trajectory"] == whole["trajectory"][LATE:]
    assert again["absent"] == ()
    # The late factor was used: it moved.
    name = f"{IDLE}.lora_B"
    assert len({state[name] for _, state in again["trajectory"]}) == STEPS - LATE


@pytest.mark.dist
@pytest.mark.parametrize("flatten", [False, True], ids=["native", "flattened"])
def test_without_the_zero_state_torch_cannot_load_and_we_load_zeros_with_a_log_line(
    tiny_dir: Path, trained: tuple[Path, Any], flatten: bool
) -> None:
    folder, whole = trained
    path = folder / f"torch {flatten}"
    (said,) = run_world(load_by_torch_alone, 1, tiny_dir, path, flatten)
    assert "Missing key in checkpoint state_dict: optim.state." in said
    assert "o_proj" in said
    (again,) = run_world(load_and_train, 1, tiny_dir, path, LATE)
    assert len(again["absent"]) == 2
    assert again["trajectory"] == whole["trajectory"][LATE:]


@pytest.mark.dist
def test_saved_before_the_first_step_it_starts_from_step_0_where_torch_alone_starts_from_1(
    tiny_dir: Path, trained: tuple[Path, Any]
) -> None:
    folder, whole = trained
    for flatten in (False, True):
        (again,) = run_world(load_and_train, 1, tiny_dir, folder / f"fresh {flatten}", 0)
        assert again["trajectory"] == whole["trajectory"]
    (wrong,) = run_world(load_and_train, 1, tiny_dir, folder / "fresh torch", 0)
    assert wrong["trajectory"][0][0] == whole["trajectory"][0][0]
    assert wrong["trajectory"][0][1] != whole["trajectory"][0][1]


# --- small models, in this process ------------------------------------------------------------------------------------------


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleDict(
        {"used": nn.Linear(2, 2, bias=False), "late": nn.Linear(2, 2, bias=False)}
    )
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("flatten", [False, True])
def test_partly_missing_entries_of_a_file_are_refused_by_name_and_a_foreign_file_too(
    tmp_path: Path, flatten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = pair()
    save_torch_state(tmp_path / "whole", model, optimizer, flatten=flatten)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    optim = get_optimizer_state_dict(model, optimizer, options=options)
    state = optim if flatten else optim["state"]["late.weight"]
    del state["state.late.weight.exp_avg_sq" if flatten else "exp_avg_sq"]
    parts = {"model": model.state_dict(), "optim": optim}
    dcp.save(parts, checkpoint_id=str(tmp_path / "part"))
    with pytest.raises(
        CheckpointError, match=r"part of the Adam state of late\.weight is missing: exp_avg_sq"
    ):
        load_torch_state(tmp_path / "part", *pair())
    del parts["model"]["used.weight"]
    dcp.save(parts, checkpoint_id=str(tmp_path / "foreign"))
    with pytest.raises(CheckpointError, match=r"used\.weight is not in it"):
        load_torch_state(tmp_path / "foreign", *pair())
    for key in [key for key in state if "late" in key or not flatten]:
        del state[key]
    if not flatten:
        del optim["state"]["late.weight"]
    parts["model"]["used.weight"] = model["used"].weight
    shutil.rmtree(tmp_path / "part")
    dcp.save(parts, checkpoint_id=str(tmp_path / "part"))
    with caplog.at_level(logging.WARNING):
        assert load_torch_state(tmp_path / "part", *pair()) == ("late.weight",)
    assert "no Adam state of 1 parameters, first late.weight: they start with zeros" in caplog.text
