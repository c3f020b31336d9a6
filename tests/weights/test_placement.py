"""What a rank holds: all ranks together hold every tensor once a replica, and what the loader put there is what was said."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.config.layout import ParallelLayout, check_layout, rank_coordinates
from megatron_xorl.config.model import GlmConfig, load_glm_config
from megatron_xorl.config.stages import pipeline_stages
from megatron_xorl.weights import placement
from megatron_xorl.weights.names import hf_tensors, row_for
from megatron_xorl.weights.placement import (
    OwnedTensor,
    global_name,
    local_name,
    owned_experts,
    owned_tensors,
)
from tests.worlds import run_world

FP8 = load_glm_config("glm-5.2")
BF16 = dataclasses.replace(FP8, weight_block_size=None)

MIXED = ParallelLayout(tp=2, pp=2, ep=8, world=16)


def layout_case(*, slow: bool = True, **sizes: int) -> Any:
    name = ",".join(f"{key}{value}" for key, value in sizes.items())
    return pytest.param(ParallelLayout(**sizes), id=name, marks=[pytest.mark.slow] if slow else [])


LAYOUTS = [
    layout_case(tp=2, pp=2, ep=8, world=16, slow=False),
    layout_case(tp=4, ep=2, etp=2, world=4, slow=False),
    layout_case(world=1),
    layout_case(ep=16, world=16),
    layout_case(pp=4, world=4),
    layout_case(tp=2, pp=3, ep=4, etp=2, world=48),
]


def boxes(owned: OwnedTensor) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in owned.ranges)


def uncovered(config: GlmConfig, layout: ParallelLayout) -> list[str]:
    """Tensors that the ranks together do not hold exactly once a replica, in elements and in scale blocks."""
    held: dict[str, Counter[tuple[tuple[int, int], ...]]] = defaultdict(Counter)
    grids: dict[str, Counter[tuple[tuple[int, int], ...]]] = defaultdict(Counter)
    for rank in range(layout.world):
        for owned in owned_tensors(config, layout, rank):
            held[owned.row.hf][boxes(owned)] += 1
            if owned.scale_ranges is not None:
                grids[owned.row.hf][tuple((s.start, s.stop) for s in owned.scale_ranges)] += 1
    stage = layout.world // layout.pp
    faults = []
    for row in hf_tensors(config):
        if row.region == "mtp":
            faults += [row.hf] if row.hf in held else []
            continue
        # How many processes hold each part: those of the stage, divided over what cuts the tensor.
        cuts = 1 if row.tp_axis is None else layout.tp if row.expert is None else layout.etp
        copies = stage // (cuts * (1 if row.expert is None else layout.ep))
        wanted = [(held[row.hf], row.shape)]
        if row.scale_shape is not None:
            wanted.append((grids[row.hf], row.scale_shape))
        faults += [row.hf for parts, shape in wanted if not tiles(parts, shape, cuts, copies)]
    return faults


def tiles(
    parts: Counter[tuple[tuple[int, int], ...]], shape: tuple[int, ...], cuts: int, copies: int
) -> bool:
    """Whether ``cuts`` disjoint boxes fill ``shape``, each held ``copies`` times."""
    if len(parts) != cuts or set(parts.values()) != {copies}:
        return False
    ends = [
        sorted({box[axis] for box in parts})
        for axis in range(len(shape))
    ]  # fmt: skip
    joined = all(
        spans[0][0] == 0
        and spans[-1][1] == size
        and all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        for spans, size in zip(ends, shape, strict=True)
    )
    return joined and math.prod(len(spans) for spans in ends) == cuts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_hold_every_element_of_glm_52_once_a_replica(layout: ParallelLayout) -> None:
    check_layout(FP8, layout)
    assert uncovered(FP8, layout) == []


def test_bf16_tensors_are_placed_alike() -> None:
    assert uncovered(load_glm_config("glm-5"), ParallelLayout(ep=2, pp=2, world=4)) == []
    for quantised, plain in zip(
        owned_tensors(FP8, MIXED, 5), owned_tensors(BF16, MIXED, 5), strict=True
    ):
        assert (plain.megatron, plain.ranges) == (quantised.megatron, quantised.ranges)
        assert plain.scale_shape is None


def test_a_rank_that_takes_another_s_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = load_glm_config("tiny")
    layout = ParallelLayout(tp=2, ep=2, world=2)
    assert uncovered(tiny, layout) == []
    right = placement.owned_range
    monkeypatch.setattr(
        placement,
        "owned_range",
        lambda name, size, rank, world, **k: right(name, size, 0, world, **k),
    )
    faults = uncovered(tiny, layout)
    assert "model.layers.0.self_attn.o_proj.weight" in faults and "lm_head.weight" in faults
    monkeypatch.undo()
    monkeypatch.setattr(placement, "owned_experts", lambda *_: range(0, 4))
    assert all(".experts." in name for name in uncovered(tiny, layout))
    assert len(set(uncovered(tiny, layout))) == 3 * 8 * 3


def test_the_embedding_is_on_the_first_stage_alone_and_the_head_on_the_last() -> None:
    layout = ParallelLayout(pp=3, world=3)
    stages = pipeline_stages(FP8, 3)
    for rank, stage in enumerate(stages):
        owned = list(owned_tensors(FP8, layout, rank))
        outside = [item.megatron for item in owned if item.row.layer is None]
        expected = {0: ["embedding.word_embeddings.weight"], 1: []}
        last = ["decoder.final_layernorm.weight", "output_layer.weight"]
        assert outside == expected.get(rank, last)
        assert {item.row.layer for item in owned} - {None} == set(stage)


@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_all_59585_names_go_to_megatron_and_back_on_every_rank(config: GlmConfig) -> None:
    rows = hf_tensors(config)
    carried = {row.hf for row in rows if row.megatron is None}
    assert (len(rows), len(carried)) == (59_585, 791)
    layout = ParallelLayout(tp=2, pp=4, ep=8, world=64)
    back: dict[str, set[int]] = defaultdict(set)
    for rank in range(layout.world):
        where = rank_coordinates(layout, rank)
        if where.edp != 0:
            continue  # replicas hold the same names
        first = pipeline_stages(config, layout.pp)[where.pp].start
        experts = owned_experts(config, layout, where)
        seen = set()
        for item in owned_tensors(config, layout, rank):
            key = (item.megatron, item.row.part, item.bank)
            assert key not in seen
            seen.add(key)
            expert = None if item.bank is None else experts[item.bank]
            row = row_for(config, global_name(item.megatron, first), item.row.part, expert)
            assert row.hf == item.row.hf
            back[row.hf].add(where.ep)
    assert back.keys() | carried == {row.hf for row in rows}
    assert all(len(back[row.hf]) == 1 for row in rows if row.expert is not None and row.megatron)


def test_layers_are_counted_within_the_stage() -> None:
    name = "decoder.layers.38.self_attention.linear_proj.weight"
    assert local_name(name, 38) == "decoder.layers.0.self_attention.linear_proj.weight"
    assert global_name(local_name(name, 38), 38) == name
    assert local_name("decoder.final_layernorm.weight", 38) == "decoder.final_layernorm.weight"
    names = {item.megatron for item in owned_tensors(FP8, ParallelLayout(pp=2, world=2), 1)}
    layers = {int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")}
    assert layers == set(range(40))


def unlike_the_loader(directory: str, sizes: dict[str, int]) -> tuple[int, list[str]]:
    """How many tensors this rank holds, and those whose loaded bytes are not the file's in the ranges that placement names."""
    import torch
    import torch.distributed as dist

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.meta_model import model_tensors
    from megatron_xorl.training.model import load_model
    from megatron_xorl.weights.reader import HfCheckpoint

    use_cpu()
    initialize(**sizes)
    found = model_tensors(load_model(directory, dtype=torch.float32))
    checkpoint, glm = HfCheckpoint(directory), load_glm_config(directory)
    layout = ParallelLayout(**sizes, world=dist.get_world_size())
    faults, number = [], 0
    for item in owned_tensors(glm, layout, dist.get_rank()):
        number += 1
        pairs = [("codes" if item.scale_shape else "dense", item.row.hf, item.ranges)]
        if item.scale_ranges is not None:
            pairs.append(("scales", str(item.row.scale_name), item.scale_ranges))
        for form, name, ranges in pairs:
            expected = checkpoint.read(name, ranges)
            tensor = found[item.megatron][form]
            if item.bank is not None:
                tensor = tensor[item.bank]
            if item.row.part is not None:
                tensor = tensor.chunk(2)[item.row.part]
            expected = expected.view(torch.uint8) if form == "codes" else expected.to(tensor.dtype)
            if not torch.equal(tensor, expected):
                faults.append(f"{item.megatron} {form}")
    return number, faults


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (4, {"tp": 2, "pp": 2, "ep": 2}),
        pytest.param(2, {"tp": 2, "etp": 2}, marks=pytest.mark.slow),
    ],
    ids=["tp2,pp2,ep2", "tp2,etp2"],
)
def test_the_loader_puts_the_ranges_that_were_said_where_they_were_said(
    tiny_dir: Path, world: int, sizes: dict[str, int]
) -> None:
    for number, faults in run_world(unlike_the_loader, world, str(tiny_dir), sizes):
        assert number > 10
        assert faults == []


def test_placement_needs_no_torch() -> None:
    code = "import sys, megatron_xorl.weights.placement; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
