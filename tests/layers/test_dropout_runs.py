"""Runs with dropout 0.1: layouts, recompute, scopes and a resume give what one plain process gives, since a mask is a function.

Controls: a mask drawn from a generator, and one that forgets where a rank's columns stand, are caught by the same comparisons.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_xorl.errors import AdapterError
from tests.layers import test_recompute as recompute
from tests.training import harness
from tests.training import test_pretrain as entry
from tests.training.comparison import Outcome, beyond_limits, difference
from tests.training.harness import Job, run_layout

pytestmark = pytest.mark.dist

ADAPTER = {"rank": {"routed_experts": 3, "default": 4}, "alpha": 8, "dropout": 0.1}
AT_RANDOM = {"steps": 1, "keep": ()}
"""One step, then gradients at random, equal factors: A and B non-zero everywhere."""


# ---- layouts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tiny_dir: Path) -> Outcome:
    """One process, twenty steps; 40 tokens of which a query sees at most ``index_topk``."""
    from megatron_xorl.config.model import load_glm_config

    job = Job(str(tiny_dir), ADAPTER)
    assert load_glm_config(tiny_dir).index_topk < job.seq
    return run_layout(job)


@pytest.fixture(scope="module")
def at_random(tiny_dir: Path) -> Outcome:
    return run_layout(Job(str(tiny_dir), ADAPTER, **AT_RANDOM))


LAYOUTS = {
    "tensor 2": ({"tp": 2}, 2),
    "tensor 2, expert 2": ({"tp": 2, "ep": 2}, 2),
    "expert tensor 2": ({"tp": 2, "etp": 2}, 2),
    "expert 2": ({"ep": 2}, 2),
    "data 2": ({}, 2),
    "pipeline 2": ({"pp": 2}, 2),
    "context 2": ({"cp": 2}, 2),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_a_layout_trains_as_one_process_does(name: str, tiny_dir: Path, one: Outcome) -> None:
    layout, world = LAYOUTS[name]
    job = Job(str(tiny_dir), ADAPTER, layout=layout, world=world)
    worst = difference(one, run_layout(job, states=one.states))
    print(name, worst)
    assert not beyond_limits(worst), worst


def test_tensor_ranks_have_the_gradients_of_one_process(tiny_dir: Path, at_random: Outcome) -> None:
    job = Job(str(tiny_dir), ADAPTER, **AT_RANDOM, layout={"tp": 2, "etp": 2}, world=2)
    worst = difference(at_random, run_layout(job))
    print(worst)
    assert beyond_limits(worst).keys() <= {"drift"}, worst  # which one step of Adam is too few for


def without_dropout_at_all(job: Job, states: Any) -> dict[str, Any]:
    from megatron_xorl.layers import dropout

    dropout.Drop.kept = lambda self, rows, columns: torch.ones(
        self.states[rows].shape[0], columns, dtype=torch.bool
    )
    return harness.run_rank(job, states)


def drawn(job: Job, states: Any) -> dict[str, Any]:
    """One rank whose masks come from torch's generator, the same seed on every rank."""
    from megatron_xorl.layers import dropout

    masks: dict[Any, Tensor] = {}

    def kept(self: Any, rows: slice, columns: int) -> Tensor:
        # Remembered for the backward, as a generator's state would be.
        key = (self.states[rows].numpy().tobytes(), self.first)
        if key not in masks:
            masks[key] = torch.rand(self.states[rows].shape[0], columns) >= self.p
        return masks[key]

    dropout.Drop.kept = kept
    return harness.run_rank(job, states)


def without_the_offset(job: Job, states: Any) -> dict[str, Any]:
    """One rank that numbers its columns from 0, whichever part of the input it holds."""
    from megatron_xorl.layers import dropout

    original = dropout._drop
    dropout._drop = lambda pair, keys, name: replace(original(pair, keys, name), first=0)
    return harness.run_rank(job, states)


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        (drawn, {"tp": 2}),
        pytest.param(drawn, {"ep": 2}, marks=pytest.mark.slow),
        (without_the_offset, {"tp": 2, "etp": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_mask_that_depends_on_the_layout_is_noticed(
    fault: Any, layout: dict[str, int], tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "run_rank", fault)
    job = Job(str(tiny_dir), ADAPTER, **AT_RANDOM)
    single = run_layout(job)
    faulty = run_layout(replace(job, layout=layout, world=2))
    worst, where = difference(single, faulty)["gradient"]
    print(worst, where)
    assert worst > 1e-2


def test_the_comparison_would_see_that_dropout_is_off(
    tiny_dir: Path, at_random: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "run_rank", without_dropout_at_all)
    off = run_layout(Job(str(tiny_dir), ADAPTER, **AT_RANDOM))
    assert difference(at_random, off)["gradient"][0] > 1e-2


# ---- recompute -----------------------------------------------------------------------------------


def dropping(directory: Path, **overrides: Any) -> Any:
    """The recompute tests' model, every pair with a dropout."""
    from megatron_xorl.layers.attach import lora_pairs

    model = recompute._model(directory, **overrides)
    for pair in lora_pairs(model):
        pair.dropout = 0.1
    return model


def loss_of(model: Any, seed: int) -> Tensor:
    from megatron_xorl.layers.token_keys import dropout_keys

    ids = torch.randint(0, 256, (2, 57), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(56).expand(2, 56)
    keys = dropout_keys(torch.tensor([seed, seed + 100]), places)
    result: Tensor = model(ids[:, :-1], places, keys, labels=ids[:, 1:]).mean()
    return result


def in_flight(model: Any) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Forward 0, forward 1, backward 0, backward 1: keys that were left on a module would be the other's."""
    losses = [loss_of(model, seed) for seed in (9, 10)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses], recompute._gradients(model)


@pytest.fixture(scope="module")
def plain(tiny_dir: Path) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    model, losses = dropping(tiny_dir), []
    for seed in (9, 10):
        loss = loss_of(model, seed)
        loss.backward()
        losses.append(loss.detach())
    return losses, recompute._gradients(model)


@pytest.mark.parametrize("form", list(recompute.FORMS))
def test_recompute_in_every_form_has_the_same_masks(
    form: str, tiny_dir: Path, plain: tuple[list[Tensor], dict[str, Tensor | None]]
) -> None:
    losses, gradients = in_flight(dropping(tiny_dir, **recompute.FORMS[form]))
    assert all(a.equal(b) for a, b in zip(losses, plain[0], strict=True))
    assert not recompute._differing(gradients, plain[1])


def test_a_region_that_does_not_take_its_keys_along_is_refused(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.layers import moe

    monkeypatch.setattr(moe, "bound", lambda function: function)
    loss = loss_of(dropping(tiny_dir, **recompute.FORMS["selective moe"]), 9)
    with pytest.raises(AdapterError, match="not told which samples"):
        loss.backward()


# ---- scopes, resume, scripts -----------------------------------------------------------------------


@pytest.mark.slow
def test_keeping_or_dropping_frozen_factors_trains_the_same_bits(tiny_dir: Path) -> None:
    scope = ADAPTER | {"glm52_lora_scope": "routed_experts"}
    kept, left = (
        run_layout(Job(str(tiny_dir), scope | {"frozen_factors": frozen}, keep=()))
        for frozen in ("keep", "drop")
    )
    assert len(kept.losses) == 20 and kept.losses == left.losses
    assert left.end.keys() < kept.end.keys()
    assert all(torch.equal(value, kept.end[name]) for name, value in left.end.items())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = entry.inputs.__wrapped__(tmp_path_factory)
    (folder / "adapter.yaml").write_text(entry.ADAPTER + "dropout: 0.1\n")
    return folder


def argv(inputs: Path, model: Path, folder: Path) -> list[str]:
    return [*entry.arguments(inputs, model, folder, 5), "--expert-model-parallel-size", "2"]


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_equals_the_uninterrupted_one(
    inputs: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    entry.run(entry.ours, 2, argv(inputs, tiny_dir, tmp_path / "whole"))
    broken = argv(inputs, tiny_dir, tmp_path / "broken")
    entry.killed(entry.ours, 2, broken, die_at=3)
    entry.run(entry.ours, 2, broken)
    lines = {line["iteration"]: line for line in entry.metrics(tmp_path / "broken")}
    whole = entry.metrics(tmp_path / "whole")
    assert list(lines.values()) == whole and len(whole) == 5
    last = "checkpoints/iter_0000005"
    assert not entry.differing(tmp_path / "whole" / last, tmp_path / "broken" / last)


@pytest.mark.slow
def test_a_script_that_tells_no_samples_is_refused_with_what_to_do(
    inputs: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=r"mx\.dropout_keys\(samples, position_ids"):
        entry.run(entry.foreign, 2, entry.saving(tmp_path), env=entry.environment(inputs, tiny_dir))
