"""The real model of any rank on meta: nothing allocated, what arithmetic says, quick, and the process can go on."""

from __future__ import annotations

import dataclasses
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_xorl.config.layout import ParallelLayout
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.config.stages import pipeline_stages
from tests.worlds import run_world

pytestmark = pytest.mark.dist

GLM = load_glm_config("glm-5.2")
# (sizes, rank): one of each kind of cut; every first and last rank of more layouts in the long test.
FULL_SIZE = [
    ({"world": 1}, 0),
    ({"ep": 16, "world": 16}, 15),
    ({"tp": 2, "pp": 2, "ep": 8, "world": 16}, 9),
    ({"tp": 4, "etp": 2, "world": 4}, 3),
]
MANY = [
    (sizes, rank)
    for sizes in (
        *(sizes for sizes, _ in FULL_SIZE),
        {"pp": 4, "world": 4},
        {"pp": 21, "world": 21},
        {"tp": 8, "pp": 8, "ep": 32, "world": 256},
    )
    for rank in sorted({0, sizes["world"] // 2, sizes["world"] - 1})
]


def account(quantised: bool, cases: list[tuple[dict[str, int], int]]) -> list[dict[str, Any]]:
    """Build GLM-5.2 for each layout and rank; say what was found of it."""
    from megatron_xorl.cli.inspection import compare
    from megatron_xorl.training.meta_model import build_on_meta, model_tensors

    glm = GLM if quantised else dataclasses.replace(GLM, weight_block_size=None)
    build_on_meta(
        load_glm_config("tiny"), ParallelLayout(), 0
    )  # what the first build imports is not timed
    told = []
    for sizes, rank in cases:
        layout = ParallelLayout(**sizes)
        start = time.perf_counter()
        model = build_on_meta(glm, layout, rank)
        seconds = time.perf_counter() - start
        tensors = [*model.named_parameters(), *model.named_buffers()]
        by_region, faults = compare(glm, layout, rank, model_tensors(model))
        told.append(
            {
                "sizes": sizes,
                "stage": rank * layout.pp // layout.world,
                "seconds": seconds,
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "real": [name for name, tensor in tensors if not tensor.is_meta],
                "tensors": len(tensors),
                "parameters": sum(held.parameters for held in by_region.values()),
                "codes": sum(held.fp8_codes for held in by_region.values()),
                "layers": [layer.layer_number - 1 for layer in model.decoder.layers],
                "faults": faults,
            }
        )
    return told


@pytest.mark.parametrize(
    ("quantised", "cases"),
    [
        pytest.param(True, FULL_SIZE, id="fp8"),
        pytest.param(False, FULL_SIZE[:1], id="bf16"),
        pytest.param(True, MANY, id="fp8, many", marks=pytest.mark.slow),
        pytest.param(False, MANY, id="bf16, many", marks=pytest.mark.slow),
    ],
)
def test_glm_52_at_full_size_on_meta_is_what_arithmetic_says(
    quantised: bool, cases: list[tuple[dict[str, int], int]]
) -> None:
    (found,) = run_world(account, 1, quantised, cases, process_group=False, timeout=120)
    for one in found:
        assert one["tensors"] > 10
        assert one["real"] == [], one["sizes"]
        assert one["faults"] == (), one["sizes"]
        assert one["seconds"] < 10 and one["peak"] < 4 * 2**30
        assert (one["codes"] > 0) == quantised
        # Megatron numbers the layers of each stage as the proposed cut does.
        stages = pipeline_stages(GLM, one["sizes"].get("pp", 1))
        assert one["layers"] == list(stages[one["stage"]])
    # The published whole, without the MTP layer.
    assert found[0]["parameters"] == 753_329_940_480 - 9_952_920_576


def wrong_accounts() -> dict[str, tuple[str, ...]]:
    """Compare the real tiny model with accounts of it that are wrong on purpose."""
    from megatron_xorl.cli import inspection
    from megatron_xorl.weights import placement

    glm, layout = load_glm_config("tiny"), ParallelLayout(tp=2, ep=2, etp=2, world=4)

    def faults() -> tuple[str, ...]:
        return inspection.add_built(glm, layout, inspection.layout_report(glm, layout, 1))

    told = {"right": faults()}
    right = placement.owned_range
    placement.owned_range = lambda name, size, *_, **__: right(name, size, 0, 1)
    told["uncut"] = faults()
    placement.owned_range = right
    experts = inspection.owned_tensors
    inspection.owned_tensors = lambda *a: (x for x in experts(*a) if ".k_norm." not in x.row.hf)
    told["no norm"] = faults()
    return told


def test_a_wrong_account_is_seen_and_named() -> None:
    (told,) = run_world(wrong_accounts, 1, process_group=False)
    assert told["right"] == ()
    assert any("decoder.layers.0.self_attention.linear_proj.weight" in x for x in told["uncut"])
    assert any("decoder.layers.1.mlp.experts.linear_fc1.weight" in x for x in told["uncut"])
    assert not any("linear_q_down_proj" in fault for fault in told["uncut"])
    assert len(told["no norm"]) == 2 * 2
    assert all("k_norm" in x and "none by arithmetic" in x for x in told["no norm"])


def positions(sizes: dict[str, int]) -> list[str]:
    """Ranks whose coordinates are not those of Megatron's own groups."""
    from megatron.core import parallel_state as state

    from megatron_xorl.config.layout import rank_coordinates
    from megatron_xorl.training.meta_model import fake_world

    layout = ParallelLayout(**sizes)
    wrong = []
    for rank in range(layout.world):
        with fake_world(layout, rank):
            megatron = {
                "tp": state.get_tensor_model_parallel_rank(),
                "cp": state.get_context_parallel_rank(),
                "dp": state.get_data_parallel_rank(),
                "pp": state.get_pipeline_model_parallel_rank(),
                "etp": state.get_expert_tensor_parallel_rank(),
                "ep": state.get_expert_model_parallel_rank(),
                "edp": state.get_expert_data_parallel_rank(),
            }
        ours = dataclasses.asdict(rank_coordinates(layout, rank))
        wrong += [f"{rank}: {megatron} {ours}"] if megatron | {"rank": rank} != ours else []
    return wrong


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "pp": 2, "ep": 4, "world": 16},
        {"tp": 2, "pp": 3, "ep": 2, "etp": 2, "world": 24},
        {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 1, "world": 16},
    ],
    ids=str,
)
def test_every_rank_stands_where_megatron_puts_it(sizes: dict[str, int]) -> None:
    assert run_world(positions, 1, sizes, process_group=False) == [[]]


def afterwards(directory: str) -> dict[str, Any]:
    """Build on meta, then run the tiny model for real in the same process; then try to build on meta again."""
    import torch
    import torch.distributed as dist

    from megatron_xorl.errors import LayoutError
    from megatron_xorl.parallel.groups import initialize, shutdown
    from megatron_xorl.training.meta_model import build_on_meta
    from megatron_xorl.training.model import forward_logits, load_model

    glm = load_glm_config(directory)
    told: dict[str, Any] = {}

    def refused(layout: ParallelLayout, rank: int) -> str:
        try:
            build_on_meta(glm, layout, rank)
        except LayoutError as error:
            return str(error)
        return ""

    told["no such rank"] = refused(ParallelLayout(ep=2, world=2), 2)
    told["off the grid"] = refused(ParallelLayout(tp=8, world=8), 0)
    meta = build_on_meta(glm, ParallelLayout(tp=2, pp=2, ep=2, world=4), 3, dtype=torch.float32)
    told["groups left"] = dist.is_initialized()
    told["dtype"] = str(meta.decoder.final_layernorm.weight.dtype)
    initialize()
    told["while groups exist"] = refused(ParallelLayout(), 0)
    told["logits"] = forward_logits(load_model(directory), torch.arange(40).view(1, 40)).shape
    told["device"] = str(torch.get_default_device())
    shutdown()
    told["again"] = refused(ParallelLayout(), 0)
    return told


def test_the_process_can_go_on_and_a_process_with_groups_is_refused(tiny_dir: Path) -> None:
    (told,) = run_world(afterwards, 1, str(tiny_dir), process_group=False)
    assert "rank 2 does not exist; expected 0 to 1" in told["no such rank"]
    assert "3.5 FP8 blocks of 32" in told["off the grid"]
    assert (told["groups left"], told["device"], told["again"]) == (False, "cpu", "")
    assert told["dtype"] == "torch.float32"
    assert "process groups already" in told["while groups exist"]
    assert tuple(told["logits"]) == (1, 40, 320)


def example() -> tuple[int, ...]:
    """Run the lines that the module's docstring shows, for the tiny model."""
    from megatron_xorl.training import meta_model

    assert meta_model.__doc__ is not None
    lines = [line[4:] for line in meta_model.__doc__.splitlines() if line.startswith("    ")]
    names = {"glm": load_glm_config("tiny"), "ParallelLayout": ParallelLayout}
    exec("\n".join(lines[:-1]), names)
    return tuple(eval(lines[-1], names))


def test_the_lines_in_the_docstring_run() -> None:
    # o_proj [128, 8 heads of 64], its columns cut by two
    assert run_world(example, 1, process_group=False) == [(128, 256)]
