"""Which slice a rank owns: cuts on the FP8 block grid, and the refusal of every other, up to loading a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_xorl.config.layout import ParallelLayout, check_layout
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.errors import LayoutError
from megatron_xorl.weights.names import hf_tensors
from megatron_xorl.weights.slices import legal_cuts, owned_range, scale_range
from tests.training.harness import use_one_process


@pytest.mark.parametrize(
    ("size", "world", "block"), [(896, 4, 32), (28672, 8, 128), (320, 5, None), (144, 1, 32)]
)
def test_the_ranges_of_all_ranks_cover_the_axis_once(
    size: int, world: int, block: int | None
) -> None:
    parts = [owned_range("w", size, rank, world, block=block) for rank in range(world)]
    covered = [index for part in parts for index in range(part.start, part.stop)]
    assert covered == list(range(size))


def test_codes_and_scales_cut_alike_dequantise_to_the_cut_of_the_whole() -> None:
    codes, scales = torch.arange(896.0)[:, None], torch.rand(28, 1)
    whole = codes * scales.repeat_interleave(32, 0)
    for rank in range(4):
        part = owned_range("w", 896, rank, 4, block=32)
        own = codes[part] * scales[scale_range(part, 32)].repeat_interleave(32, 0)
        assert torch.equal(own, whole[part])


def test_the_scale_range_of_a_ragged_end_includes_its_part_block() -> None:
    assert scale_range(slice(0, 144), 32) == slice(0, 5)
    assert scale_range(slice(64, 144), 32) == slice(2, 5)


@pytest.mark.parametrize(
    ("size", "world", "block", "says"),
    [
        (
            896,
            8,
            32,
            "an axis of 896 cannot be cut 8 ways into blocks of 32; legal sizes: 1, 2, 4, 7",
        ),
        (144, 2, 32, "legal sizes: 1"),
        (320, 3, None, "cannot be cut 3 ways into whole elements; legal sizes: 1, 2, 4, 5"),
        (576, 2, 128, "legal sizes: 1"),
    ],
)
def test_a_cut_off_the_grid_is_refused_with_the_sizes_that_are_legal(
    size: int, world: int, block: int | None, says: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        owned_range("model.layers.0.self_attn.kv_b_proj.weight", size, 0, world, block=block)
    assert says in str(refused.value)
    assert str(refused.value).startswith("model.layers.0.self_attn.kv_b_proj.weight: ")


def test_legal_cuts_are_exactly_those_that_are_not_refused() -> None:
    for size, block in ((896, 32), (512, 32), (144, 32), (320, None), (2048, 128), (28672, 128)):
        accepted = []
        for world in range(1, 65):
            try:
                owned_range("w", size, 0, world, block=block)
            except LayoutError:
                continue
            accepted.append(world)
        assert accepted == legal_cuts(size, block)


def test_the_layout_check_and_the_slices_agree_on_every_tensor_of_the_tiny_model() -> None:
    glm = load_glm_config("tiny")
    assert glm.weight_block_size is not None
    cut = [r for r in hf_tensors(glm) if r.tp_axis is not None and r.expert is None and r.megatron]
    for tp in (1, 2, 4, 8):
        refused = set()
        for row in cut:
            block = glm.weight_block_size[row.tp_axis] if row.quantized else None
            try:
                owned_range(row.hf, row.shape[row.tp_axis], 0, tp, block=block)
            except LayoutError:
                refused.add(row.hf.rpartition(".layers.")[2].split(".", 1)[-1])
        if tp < 8:
            check_layout(glm, ParallelLayout(tp=tp, world=tp))
            assert not refused
        else:
            with pytest.raises(LayoutError, match=r"nearest legal: .*4"):
                check_layout(glm, ParallelLayout(tp=tp, world=tp))
            assert "self_attn.kv_b_proj.weight" in refused


def test_loading_refuses_a_tensor_rank_whose_part_cuts_a_block(tiny_dir: Path) -> None:
    use_one_process()
    from megatron_xorl.config.model import load_glm_config as load_config
    from megatron_xorl.layers.base import load_base
    from megatron_xorl.training.model import build_model
    from megatron_xorl.weights.reader import HfCheckpoint

    glm = load_config(tiny_dir)
    model = build_model(glm, dtype=torch.float32)
    one_of_eight = SimpleNamespace(rank=lambda: 3, size=lambda: 8)
    model.decoder.layers[1].self_attention.linear_kv_up_proj.tp_group = one_of_eight
    with pytest.raises(LayoutError) as refused:
        load_base(model, HfCheckpoint(tiny_dir), glm)
    assert "model.layers.1.self_attn.kv_b_proj.weight" in str(refused.value)
    assert "legal sizes: 1, 2, 4, 7" in str(refused.value)
