"""Layouts that cannot be made right are refused before anything is built, with the reason and the nearest legal one.

One table: what was asked for, who refuses it, what the message must say. Nothing here needs a process group: a launch refuses
from its arguments and the model's ``config.json`` alone.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from megatron_xorl.config.layout import ParallelLayout, check_layout
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.config.stages import check_stage_starts, pipeline_stages
from megatron_xorl.errors import ConfigError, LayoutError
from megatron_xorl.parallel.groups import initialize
from tests.layouts.matrix import CHECKS, base_job
from tests.layouts.rows import BF16_ROWS, ROWS, Row
from tests.training.comparison import LIMITS

TINY, GLM = load_glm_config("tiny"), load_glm_config("glm-5.2")


def layout(glm: Any = TINY, **sizes: int) -> Callable[[], object]:
    return lambda: check_layout(glm, ParallelLayout(**sizes))


def arguments(**given: Any) -> Callable[[], object]:
    """Megatron's arguments as a launch has them after parsing, all as our entry sets them but ``given``."""

    def check() -> None:
        from megatron_xorl.training.arguments import RULES, check_arguments

        good = {rule.name: rule.allowed[0] for rule in RULES}
        good |= {"tensor_model_parallel_size": 1, "sequence_parallel": False, "num_layers": 4}
        good |= {"seq_length": 48, "context_parallel_size": 1}
        check_arguments(Namespace(**good))
        check_arguments(Namespace(**(good | given)))

    return check


REFUSALS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "tp cuts a block": (
        layout(tp=8, world=8),
        ["it cuts 896 kv_b_proj rows into 112, which is 3.5 FP8 blocks of 32", "nearest legal: 1, 2, 4"],
    ),
    "tp cuts a block of GLM-5.2": (
        layout(GLM, tp=32, world=32),
        ["FP8 blocks of 128", "nearest legal: 4, 8, 16"],
    ),
    "etp cuts a block": (
        layout(etp=8, world=8),
        ["etp 8", "128 mlp.experts gate_proj and up_proj rows into 16", "nearest legal: 1, 2, 4"],
    ),
    "ep does not divide the experts": (
        layout(ep=3, world=3),
        ["ep 3 does not divide the 8 experts", "nearest legal: 1, 2, 4"],
    ),
    "a vocabulary that tp does not divide": (
        layout(dataclasses.replace(TINY, vocab_size=322), tp=4, world=4),
        ["322 vocabulary rows are not divisible", "nearest legal: 1, 2"],
    ),
    "heads that tp does not divide": (layout(tp=3, world=3), ["8 attention heads are not divisible"]),
    "a world that the dense axes do not divide": (
        layout(tp=2, pp=2, world=6),
        ["world size 6 is not a multiple of tp × pp × cp = 4; start 4 processes (or a multiple)"],
    ),
    "a world that the expert axes do not divide": (
        layout(tp=2, ep=4, world=2),
        ["world size 2 is not a multiple of etp × ep × pp = 4; start 4 processes"],
    ),
    "the same, by the library": (
        lambda: initialize(tp=2, pp=2),
        ["world size 1 is not a multiple of tp*pp*cp = 4", "start a multiple of 4 processes"],
    ),
    "more stages than the indexer allows": (
        lambda: pipeline_stages(TINY, 3),
        ["pp 3: a stage must begin on a layer that owns an indexer", "nearest legal: 1, 2"],
    ),
    "a cut between layers 6 and 7": (
        lambda: check_stage_starts(GLM, [0, 7]),
        ["cut between layers 6 and 7: layer 7 uses the selection of layer 6",
         "nearest legal cuts: between 5 and 6 or between 9 and 10",
         "a legal layout of 2 stages: Et*38|t*40L"],
    ),
    "virtual stages without a pipeline": (lambda: initialize(vpp=2), ["vpp=2 with pp=1", "use vpp=1"]),
    "sequence parallelism off": (
        arguments(tensor_model_parallel_size=2),
        ["sequence_parallel is off at tensor_model_parallel_size > 1", "pass --sequence-parallel"],
    ),
    "a sequence that the ranks cannot share": (
        arguments(tensor_model_parallel_size=2, sequence_parallel=True, seq_length=47),
        ["seq_length 47 does not cut evenly over cp 1 and tp 2", "nearest legal: 46, 48"],
    ),
    "a loss that depends on the layout": (
        arguments(calculate_per_token_loss=False),
        ["changes the objective with the layout", "pass --calculate-per-token-loss"],
    ),
    "the dispatcher's overlap with the shared expert": (
        arguments(moe_shared_expert_overlap=True),
        ["moe_shared_expert_overlap is True", "leave it out"],
    ),
    "the overlap of expert communication with other microbatches": (
        arguments(overlap_moe_expert_parallel_comm=True),
        ["overlap_moe_expert_parallel_comm is True", "leave it out"],
    ),
    "gathering within the optimizer's step": (
        arguments(overlap_param_gather_with_optimizer_step=True),
        ["overlap_param_gather_with_optimizer_step is True", "not proven", "leave it out"],
    ),
    "overlap in the tensor group": (arguments(tp_comm_overlap=True), ["tp_comm_overlap is True"]),
    "several instances of the distributed optimizer": (
        arguments(num_distributed_optimizer_instances=2),
        ["num_distributed_optimizer_instances is 2", "not proven"],
    ),
    "tokens dropped at a capacity": (
        arguments(moe_expert_capacity_factor=1.25),
        ["dropping tokens changes the model that was trained"],
    ),
    "a dispatcher that was not compared": (
        arguments(moe_token_dispatcher_type="flex"),
        ["moe_token_dispatcher_type is 'flex'", "--moe-token-dispatcher-type alltoall"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_layout_that_is_not_right_is_refused_with_the_reason(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.parallel import groups

    monkeypatch.setattr(groups, "is_cpu_platform", lambda: True)
    monkeypatch.setattr(groups, "_current", None)
    monkeypatch.setattr(groups, "_rank_and_world", lambda: (0, 1))
    ask, words = REFUSALS[case]
    with pytest.raises((LayoutError, ConfigError)) as refused:
        ask()
    for said in words:
        assert said in str(refused.value), refused.value


def test_the_table_has_the_layouts_that_are_promised() -> None:
    names = [row.name for row in ROWS]
    assert (
        len(names) == len(set(names))
        and len({str(row.layout) + str(row.world) for row in ROWS}) >= 24
    )
    sizes = {axis: {getattr(row, axis) for row in ROWS} for axis in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")}  # fmt: skip
    assert sizes["tp"] == sizes["ep"] == sizes["cp"] == {1, 2, 4} and sizes["pp"] == {1, 2, 3}
    assert sizes["etp"] == sizes["vpp"] == {1, 2} and {1, 2} <= sizes["dp"]
    assert {row.world for row in ROWS} == {1, 2, 3, 4, 6, 8}
    # EP folded over CP with world = EP = CP, DP 1; EP over data ranks, with copies of the experts.
    assert {(2, 2, 2), (4, 4, 4)} <= {(row.world, row.ep, row.cp) for row in ROWS}
    assert any(row.ep == 4 and row.world == 8 and row.dp == 8 for row in ROWS)
    assert len(BF16_ROWS) >= 4 and set(LIMITS) < set(CHECKS)
    # A selection leaves keys out, and is shared by a later layer.
    assert base_job("").seq > TINY.index_topk and "shared" in five_layers().indexer_types


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace(" ", "-"))
def test_every_row_is_legal_and_cuts_on_a_block_boundary(row: Row) -> None:
    """A cut of a weight is on the grid of its FP8 blocks, and what one rank holds another does not."""
    from megatron_xorl.weights.placement import owned_tensors

    glm = five_layers()
    plan = ParallelLayout(tp=row.tp, pp=row.pp, ep=row.ep, etp=row.etp, cp=row.cp, world=row.world)
    check_layout(glm, plan)
    first, last = (list(owned_tensors(glm, plan, rank)) for rank in (0, row.world - 1))
    held = [{(own.row.hf, str(own.ranges)) for own in rank} for rank in (first, last)]
    assert (held[0] != held[1]) == (row.tp * row.pp * row.ep * row.etp > 1)
    parted = 0
    for own in last:
        for part, size, scale in zip(
            own.ranges, own.row.shape, own.scale_ranges or (), strict=False
        ):
            assert part.start % 32 == 0 and (part.stop % 32 == 0 or part.stop == size)
            assert scale.start == part.start // 32
            parted += part.start > 0
    # With part of a weight a rank has whole blocks, not the first ones of it.
    assert bool(parted) == (row.tp > 1 or row.etp > 1)
    assert len(pipeline_stages(glm, row.pp, row.vpp)) == row.pp * row.vpp


def five_layers() -> Any:
    """The miniature of the matrix, by its config alone."""
    from megatron_xorl.config.model import GlmConfig
    from megatron_xorl.convert.tiny import tiny_config
    from tests.training.test_virtual_stages import SCHEDULE

    raw = tiny_config() | {"indexer_types": SCHEDULE, "num_hidden_layers": len(SCHEDULE)}
    for key in ("index_topk_freq", "index_skip_topk_offset", "mlp_layer_types", "layer_types"):
        raw.pop(key, None)
    return GlmConfig.from_dict(raw, "test")
