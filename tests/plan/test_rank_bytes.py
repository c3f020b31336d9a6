"""What a rank's share costs: each form in its own bytes, and two accounts of one model compared name by name."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_xorl.config.layout import ParallelLayout
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.plan.checkpoint_bytes import checkpoint_bytes
from megatron_xorl.plan.rank_bytes import Held, differences, held, held_by, held_report
from megatron_xorl.weights.names import hf_tensors
from megatron_xorl.weights.placement import owned_tensors

GLM = load_glm_config("glm-5.2")


def row(shape: tuple[int, ...], dtype: str, scale_shape: tuple[int, ...] | None) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype=dtype, scale_shape=scale_shape, region="attention")


def test_codes_are_a_byte_scales_four_the_rest_two_or_four() -> None:
    assert held(row((576, 6144), "fp8", (5, 48))) == Held(
        576 * 6144, fp8_codes=576 * 6144, fp8_scales=4 * 5 * 48
    )
    assert held(row((256,), "fp32", None)) == Held(256, fp32=1024)
    assert held(row((2, 3), "bf16", None)) == Held(6, bf16=12)


def test_one_rank_of_one_holds_the_checkpoint_without_its_mtp_layer() -> None:
    rows = [item for item in hf_tensors(GLM) if item.region != "mtp"]
    report = held_report(held_by(owned_tensors(GLM, ParallelLayout(), 0), lambda own: own.region))
    expected = checkpoint_bytes(rows)
    assert report["parameters"] == expected["parameters"]
    assert report["bytes"]["total"] == expected["bytes"]["total"]
    for region, forms in report["bytes"]["by_region"].items():
        assert sum(forms.values()) == expected["bytes"]["by_region"][region]


def test_ranks_of_a_stage_hold_as_much_and_all_ranks_the_model_and_their_replicas() -> None:
    layout = ParallelLayout(tp=2, pp=2, ep=4, world=8)
    sums = [
        held_by(owned_tensors(GLM, layout, rank), lambda own: own.region)
        for rank in range(layout.world)
    ]
    assert all(found == sums[0] for found in sums[:4])
    assert all(found == sums[4] for found in sums[4:])
    whole = held_by(owned_tensors(GLM, ParallelLayout(), 0), lambda own: own.region)
    experts = sum((found["routed_experts"] for found in sums), Held())
    assert experts == whole["routed_experts"]
    # Cut in two and held by both data-parallel replicas of each stage.
    shared = sum((found["shared_experts"] for found in sums), Held())
    assert shared.parameters == 2 * whole["shared_experts"].parameters
    assert all("lm_head" in found for found in sums[4:])
    assert not any("lm_head" in found for found in sums[:4])


def test_the_published_sizes_of_a_rank() -> None:
    # 256 experts of 3 x 2048 x 6144 in 75 layers over 16 ranks.
    one = held_by(owned_tensors(GLM, ParallelLayout(ep=16, world=16), 3), lambda own: own.region)[
        "routed_experts"
    ]
    assert one.parameters == one.fp8_codes == 16 * 75 * 3 * 2048 * 6144
    assert one.fp8_scales == 16 * 75 * 3 * 16 * 48 * 4


def test_a_difference_is_named_with_both_figures() -> None:
    expected = {"a": Held(4, fp8_codes=4, fp8_scales=4), "b": Held(2, bf16=4), "c": Held(1, fp32=4)}
    found = {"a": expected["a"], "b": Held(3, bf16=6), "d": Held(1000, bf16=2000)}
    assert differences(expected, found) == (
        "b: 2 parameters, 4 bytes bf16 by arithmetic, 3 parameters, 6 bytes bf16 in the modules",
        "c: 1 parameters, 4 bytes fp32 by arithmetic, the modules have none",
        "d: 1,000 parameters, 2,000 bytes bf16 in the modules, none by arithmetic",
    )
    assert differences(expected, expected) == ()
