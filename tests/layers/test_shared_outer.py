"""Shared factors once per token: the plain form's outputs and gradients on every layout, with less kept for backward.

The plain form (every factor on every dispatched row) and one process are the oracles of each other form and layout; fp64 with
every expert by itself and the shared factor expanded to it (``tests.layers.reference``) is the oracle of both. The limit of
1e-6 is the design's for two orders of the same fp32 sums.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_xorl.config.adapter import AdapterConfig
from tests.layers.reference import Reference
from tests.training.comparison import LIMITS, Outcome, beyond_limits, difference, relative
from tests.training.harness import Job, randomise, run_layout, use_one_process
from tests.worlds import run_world

LIMIT = 1e-6
LAYER, LENGTH, SAMPLES = 2, 12, 4
BANK = f"model.layers.{LAYER}.mlp.experts"
ADAPTER: dict[str, Any] = {"rank": {"routed_experts": 3, "default": 4}, "alpha": 8}
ONLY = {
    "gate": ["*.mlp.experts.gate_proj"],
    "up": ["*.mlp.experts.up_proj"],
    "down": ["*.mlp.experts.down_proj"],
}
LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "tp2 etp2": (2, {"tp": 2, "etp": 2}),
    "tp2 ep2": (4, {"tp": 2, "ep": 2, "etp": 1}),
}


def _tokens(kind: str) -> tuple[Tensor, Tensor]:
    """Hidden states and the gradient of the output, ``[s, samples, H]``; ``alike``: one token, so most experts see none."""
    generator = torch.Generator().manual_seed(17)
    x, dy = (torch.randn(LENGTH, SAMPLES, 128, generator=generator) for _ in range(2))
    return (x[:1, :1].expand_as(x).contiguous() if kind == "alike" else x), dy


def _load(directory: str | Path, **adapter: Any) -> Any:
    from megatron_xorl.training.model import load_model

    model = load_model(directory, AdapterConfig(**(ADAPTER | adapter)) if adapter else None)
    randomise(model)
    return model.train()


def _mlp(model: Any) -> Any:
    return model.decoder.layers[LAYER].mlp


def _run(model: Any, once: bool, x: Tensor, dy: Tensor) -> dict[str, Any]:
    """Output, input gradient, and the gradient pieces of the bank's factors."""
    from megatron_xorl.layers.attach import named_factors

    mlp = _mlp(model)
    mlp.experts.once_per_token = once
    model.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    y, _ = mlp(leaf)
    y.backward(dy)
    pieces = {
        name: (piece.ranges, parameter.grad.clone(), factor.shape)
        for name, (factor, piece, parameter) in named_factors(model).items()
        if name.startswith(BANK)
    }
    return {"y": y.detach(), "dx": leaf.grad, "factors": pieces}


def _on_a_rank(directory: str, layout: dict[str, int], kind: str) -> dict[str, Any]:
    """This rank's part of the tokens through both forms."""
    from megatron.core import parallel_state

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(**layout)
    model = _load(directory, **ADAPTER)
    tp, dp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    tps = parallel_state.get_tensor_model_parallel_world_size()
    dps = parallel_state.get_data_parallel_world_size()
    x, dy = (full.chunk(tps)[tp].chunk(dps, dim=1)[dp].contiguous() for full in _tokens(kind))
    found: dict[str, Any] = {form: _run(model, form == "once", x, dy) for form in ("once", "plain")}
    return found | {"place": (tp, dp)}


def _whole(ranks: list[dict[str, Any]], form: str) -> dict[str, Tensor]:
    """Outputs put together, and gradients as the sum of every rank's contribution in its place."""
    grid = {rank["place"]: rank[form] for rank in ranks}
    tps, dps = (1 + max(place[axis] for place in grid) for axis in (0, 1))
    full = {
        what: torch.cat(
            [torch.cat([grid[tp, dp][what] for dp in range(dps)], 1) for tp in range(tps)]
        )
        for what in ("y", "dx")
    }
    for rank in ranks:
        for name, (ranges, gradient, shape) in rank[form]["factors"].items():
            total = full.setdefault(name, torch.zeros(shape))
            total[tuple(slice(a, b) for a, b in ranges)] += gradient
    return full


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max((relative(found[name], value), name) for name, value in expected.items())


def _forms(model: Any, kind: str) -> dict[str, dict[str, Tensor]]:
    runs = {form: _run(model, form == "once", *_tokens(kind)) for form in ("once", "plain")}
    return {form: _whole([{form: run, "place": (0, 0)}], form) for form, run in runs.items()}


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> Any:
    use_one_process()
    return _load(tiny_dir, **ADAPTER)


@pytest.fixture(scope="module")
def one(model: Any) -> dict[str, dict[str, dict[str, Tensor]]]:
    return {kind: _forms(model, kind) for kind in ("unlike", "alike")}


def _fp64(directory: Path, model: Any, kind: str) -> dict[str, Tensor]:
    """Every expert on every token in fp64, the shared factors expanded, the gradients by autograd."""
    full = randomise(model)
    leaves = {name: value.double().requires_grad_() for name, value in full.items()}
    scales = {f.target: ADAPTER["alpha"] / f.rank for f in model.inventory.factors}
    reference = Reference(directory, leaves, scales)
    x, dy = (value.double() for value in _tokens(kind))
    x.requires_grad_()
    y = reference._experts(x, LAYER)
    y.backward(dy)
    bank = {name: leaf.grad for name, leaf in leaves.items() if name.startswith(BANK)}
    return {"y": y.detach(), "dx": x.grad} | bank


# ---- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unlike", "alike"])
def test_both_forms_equal_fp64_and_each_other(
    tiny_dir: Path, model: Any, one: Any, kind: str
) -> None:
    expected = _fp64(tiny_dir, model, kind)
    assert len(expected) == 2 + 6
    for form in ("once", "plain"):
        assert _apart(one[kind][form], expected)[0] <= LIMIT, form
    assert 0 < _apart(one[kind]["once"], one[kind]["plain"])[0] <= LIMIT


def test_experts_without_tokens_get_zeros_in_both_forms(one: Any) -> None:
    for form in ("once", "plain"):
        own = one["alike"][form][f"{BANK}.gate_proj.lora_B"].flatten(1).norm(dim=1)
        assert (own > 0).sum() == 2 and own.isfinite().all()


@pytest.mark.parametrize("only", ONLY)
def test_a_bank_with_one_adapted_projection_equals_its_plain_form(
    tiny_dir: Path, only: str
) -> None:
    use_one_process()
    model = _load(tiny_dir, lora_target_modules=ONLY[only])
    forms = _forms(model, "unlike")
    assert len(forms["once"]) == 2 + 2
    assert _apart(forms["once"], forms["plain"])[0] <= LIMIT


def test_a_bank_without_adapters_gets_no_columns(tiny_dir: Path, monkeypatch: Any) -> None:
    from megatron_xorl.layers.shared_outer import Outer

    use_one_process()
    model = _load(tiny_dir, lora_target_modules=["lm_head"])
    assert _mlp(model).experts.outer is None
    monkeypatch.setattr(Outer, "widen", None)
    _run(model, True, *_tokens("unlike"))


@pytest.mark.parametrize(
    "option",
    [
        {"moe_shared_expert_overlap": True},
        {"moe_token_dispatcher_type": "allgather"},
        {"moe_latent_size": 64},
    ],
)
def test_where_rows_cannot_carry_columns_the_plain_form_serves(
    option: dict[str, Any], model: Any
) -> None:
    from types import SimpleNamespace

    from megatron_xorl.layers.moe import rows_can_carry_columns

    names = ("moe_token_dispatcher_type", "moe_shared_expert_overlap", "moe_latent_size")
    fields = {name: getattr(model.config, name) for name in (*names, "cuda_graph_impl")}
    assert rows_can_carry_columns(model.config)
    assert rows_can_carry_columns(SimpleNamespace(**fields))
    assert not rows_can_carry_columns(SimpleNamespace(**(fields | option)))


def test_a_factor_of_each_expert_stays_with_the_rows(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_mlp(model).experts, "once_per_token", True)
    outer = _mlp(model).experts.outer
    assert [pair.target for pair in outer.before] == [f"{BANK}.gate_proj", f"{BANK}.up_proj"]
    assert [pair.target for pair in outer.after] == [f"{BANK}.down_proj"]
    assert outer.columns == 6
    from megatron_xorl.layers.shared_outer import outer_of

    # Seen from the other side no factor is shared: gate and up have one B an expert, down one A.
    experts = _mlp(model).experts
    assert outer_of(experts.linear_fc2, experts.linear_fc1) is None


def test_twenty_steps_of_both_forms_stay_close(tiny_dir: Path) -> None:
    from megatron_xorl.layers.attach import named_factors

    use_one_process()
    ids = torch.randint(0, 256, (1, 41), generator=torch.Generator().manual_seed(5))
    ended, losses = {}, {}
    for form in ("once", "plain"):
        model = _load(tiny_dir, glm52_lora_scope="routed_experts")
        for layer in model.decoder.layers[1:]:
            layer.mlp.experts.once_per_token = form == "once"
        start = {n: p.detach().clone() for n, (_, _, p) in named_factors(model).items()}
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), foreach=False)
        losses[form] = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(ids[:, :-1], torch.arange(40)[None], None, labels=ids[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            losses[form].append(loss.item())
        ended[form] = {n: p.detach() - start[n] for n, (_, _, p) in named_factors(model).items()}
    assert losses["once"][-1] < losses["once"][0]
    for once, plain in zip(losses["once"], losses["plain"], strict=True):
        assert abs(once - plain) <= LIMITS["loss"] * plain
    assert _apart(ended["once"], ended["plain"])[0] <= LIMITS["drift"]


def _kept(model: Any, once: bool) -> list[int]:
    """Bytes of every storage that the layer's forward keeps for backward, weights aside."""
    mlp, kept = _mlp(model), {}
    mlp.experts.once_per_token = once
    weights = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    x = _tokens("unlike")[0].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = mlp(x)[0]
    assert y.requires_grad
    return sorted(size for size, _ in kept.values())


def test_the_dispatched_rows_are_not_kept(model: Any) -> None:
    tokens, hidden, topk = LENGTH * SAMPLES, 128, 2
    once, plain = _kept(model, True), _kept(model, False)
    rows = topk * tokens * hidden * 4
    print(f"\nkept: {sum(once)} bytes once per token, {sum(plain)} plain, rows {rows}")
    assert plain.count(rows) - once.count(rows) == 1
    # The rows, and B's input of down: a row each in the plain form, a token each here.
    assert sum(plain) - sum(once) == rows - tokens * 3 * 4


# ---- several processes ----------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_one_process_s_outputs_and_gradients_in_both_forms(
    tiny_dir: Path, one: Any, layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    # One token over and over: at EP 4 at least two ranks have no row at all.
    for kind in ("unlike", "alike") if layout == "ep4" else ("unlike",):
        ranks = run_world(_on_a_rank, world, str(tiny_dir), sizes, kind)
        once, plain = _whole(ranks, "once"), _whole(ranks, "plain")
        assert _apart(once, plain)[0] <= LIMIT
        assert _apart(once, one[kind]["plain"])[0] <= LIMIT
        assert _apart(plain, one[kind]["plain"])[0] <= LIMIT


@pytest.mark.dist
def test_a_rank_left_out_of_the_sum_is_seen(tiny_dir: Path, one: Any) -> None:
    ranks = run_world(_on_a_rank, 2, str(tiny_dir), {"ep": 2}, "unlike")
    name = f"{BANK}.gate_proj.lora_A"
    ranks[1]["once"]["factors"].pop(name)
    assert relative(_whole(ranks, "once")[name], one["unlike"]["plain"][name]) > 0.1


@pytest.fixture(scope="module")
def megatron_one(tiny_dir: Path) -> Outcome:
    return run_layout(Job(str(tiny_dir), ADAPTER, steps=1, keep=()))


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "tp2 ep2" else pytest.mark.slow) for name in LAYOUTS],
)
def test_megatron_s_reductions_sum_every_rank_s_own_tokens_once(
    tiny_dir: Path, megatron_one: Outcome, layout: str
) -> None:
    # Before, a rank's share of a shared factor's gradient was that of the rows sent to it, now of the tokens it holds.
    world, sizes = LAYOUTS[layout]
    job = Job(str(tiny_dir), ADAPTER, steps=1, keep=(), layout=sizes, world=world)
    if layout == "ep4":
        job = replace(job, global_batch=4)
        megatron_one = run_layout(replace(job, layout={}, world=1))
    worst = difference(megatron_one, run_layout(job))
    worst.pop("drift")  # of one step of Adam: the sign of gradients that are nearly zero
    assert worst["gradient"][0] > 0 and not beyond_limits(worst), worst


# ---- the comparison sees mistakes -----------------------------------------------------------------


def _another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.shared_outer import Outer

    real = Outer.widen

    def widen(self: Any, x: Tensor) -> Tensor:
        rows = real(self, x)
        return torch.cat([x, rows[..., self.hidden :].roll(1, 0)], -1)

    monkeypatch.setattr(Outer, "widen", widen)


def _gate_for_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.shared_outer import Outer

    real = Outer.split

    def split(self: Any, rows: Tensor) -> Any:
        x, given, keys = real(self, rows)
        return x, dict(zip(given, reversed(given.values()), strict=True)), keys

    monkeypatch.setattr(Outer, "split", split)


def _weighted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.experts import ExpertBank
    from megatron_xorl.layers.shared_outer import Outer

    forward, join, weights = ExpertBank.forward, Outer.join, []

    def keep(self: Any, x: Tensor, counts: Tensor, probs: Tensor) -> Any:
        weights.append(probs)
        return forward(self, x, counts, probs)

    monkeypatch.setattr(ExpertBank, "forward", keep)
    monkeypatch.setattr(
        Outer, "join", lambda self, y, us: join(self, y, [u * weights[-1][:, None] for u in us])
    )


def _unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.shared_outer import Outer

    real = Outer.narrow
    monkeypatch.setattr(
        Outer, "narrow", lambda self, rows: real(self, torch.cat([rows[..., :128], 2 * rows[..., 128:]], -1))
    )  # fmt: skip


@pytest.mark.parametrize("fault", [_another_token, _gate_for_up, _weighted_twice, _unscaled])
def test_a_mistake_in_the_algebra_is_seen(
    model: Any, one: Any, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert _apart(_forms(model, "unlike")["once"], one["unlike"]["plain"])[0] > 1000 * LIMIT
