"""Every reduction axis of every factor has exactly one owner: counted on ranks, for every kind of factor and layout."""

from __future__ import annotations

import itertools

import pytest
from torch import nn, zeros

from megatron_xorl.adapters.inventory import Factor, build_inventory
from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.parallel.ownership import mark_ownership, ownership

# (tp, ep, etp, cp, dp): worlds of up to 16 ranks, expert groups included.
LAYOUTS = [
    (tp, ep, etp, cp, dp)
    for tp, ep, etp, cp, dp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4))
    if tp * cp * dp <= 16 and (tp * cp * dp) % (ep * etp) == 0
]
KINDS = {
    "replicated A": "model.layers.1.self_attn.q_a_proj.lora_A",
    "replicated B": "model.layers.1.self_attn.q_a_proj.lora_B",
    "column A": "model.layers.1.self_attn.kv_b_proj.lora_A",
    "column B": "model.layers.1.self_attn.kv_b_proj.lora_B",
    "row A": "model.layers.1.self_attn.o_proj.lora_A",
    "row B": "model.layers.1.self_attn.o_proj.lora_B",
    "head B": "lm_head.lora_B",
    "bank shared A": "model.layers.1.mlp.experts.gate_proj.lora_A",
    "bank own B": "model.layers.1.mlp.experts.gate_proj.lora_B",
    "bank own A": "model.layers.1.mlp.experts.down_proj.lora_A",
    "bank shared B": "model.layers.1.mlp.experts.down_proj.lora_B",
}


def _factor(name: str) -> Factor:
    return build_inventory(
        load_glm_config("tiny"), AdapterConfig(rank=4, alpha=8), dtype="float32"
    ).by_name[name]


def _place(factor: Factor, rank: int, layout: tuple[int, ...]) -> tuple[int, int]:
    """Which part of the factor a rank holds. Megatron's rank order: (expert-)tensor fastest, then expert, then data."""
    tp, ep, etp, _, _ = layout
    if len(factor.shape) == 2:
        return (rank % tp if factor.tp_axis is not None else 0, 0)
    return (
        rank % etp if factor.tp_axis is not None else 0,
        rank // etp % ep if factor.ep_axis is not None else 0,
    )


def _summed(marks: dict[str, object], rank: int, layout: tuple[int, ...]) -> list[int]:
    """Ranks whose contributions are in the gradient that ``rank`` ends with, as often as they are summed.

    DDP sums over data x context with ``allreduce``, over expert-data without; then the tensor group is summed where marked.
    """
    tp, ep, etp, cp, dp = layout
    peers = range(rank // tp * tp, rank // tp * tp + tp) if marks["sequence_parallel"] else [rank]
    stride = tp if marks["allreduce"] else etp * ep
    return [
        other for peer in peers for other in range(tp * cp * dp) if other % stride == peer % stride
    ]


def _faults(factor: Factor, marks: dict[str, object], layout: tuple[int, ...]) -> list[int]:
    """Ranks whose gradient is not the sum over exactly the ranks that hold the same part, each once."""
    tp, _, _, cp, dp = layout
    world = range(tp * cp * dp)
    place = [_place(factor, rank, layout) for rank in world]
    return [
        rank
        for rank in world
        if sorted(_summed(marks, rank, layout)) != [o for o in world if place[o] == place[rank]]
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_summed_once_over_every_rank_that_holds_the_same_part(kind: str) -> None:
    factor = _factor(KINDS[kind])
    assert len(LAYOUTS) > 80
    for layout in LAYOUTS:
        tp, ep, etp, _, _ = layout
        assert not _faults(factor, ownership(factor, tp=tp, ep=ep, etp=etp), layout), layout


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("bank shared A", {"allreduce": False}),
        ("bank shared B", {"sequence_parallel": False}),
        ("bank own B", {"allreduce": True}),
        ("bank own A", {"sequence_parallel": True}),
        ("replicated A", {"sequence_parallel": False}),
        ("column B", {"sequence_parallel": True}),
    ],
)
def test_a_wrong_mark_is_seen_by_the_same_count(kind: str, wrong: dict[str, bool]) -> None:
    factor = _factor(KINDS[kind])
    assert any(
        _faults(factor, ownership(factor, tp=tp, ep=ep, etp=etp) | wrong, (tp, ep, etp, cp, dp))
        for tp, ep, etp, cp, dp in LAYOUTS
    )


def test_one_process_needs_no_marks_but_the_data_parallel_one() -> None:
    for name in KINDS.values():
        marks = ownership(_factor(name), tp=1, ep=1, etp=1)
        assert marks["allreduce"] and not marks["sequence_parallel"]


def test_marks_are_written_on_the_parameter_under_megatron_s_names() -> None:
    parameter = nn.Parameter(zeros(2))
    mark_ownership(parameter, _factor(KINDS["bank own B"]), tp=2, ep=2, etp=1)
    assert parameter.allreduce is False and parameter.sequence_parallel is False
    assert parameter.tensor_model_parallel is True and parameter.partition_stride == 1
