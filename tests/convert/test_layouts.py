"""An imported checkpoint at every layout: Megatron's own loader fills each rank with the bytes that direct loading gives it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_xorl.convert.importer import import_checkpoint
from megatron_xorl.convert.tiny import make_tiny
from tests.worlds import run_world

LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep4": (4, {"ep": 4}),
    "tp2 x ep2": (2, {"tp": 2, "ep": 2}),
    "etp2": (2, {"tp": 2, "etp": 2}),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A Hugging Face directory and its import, FP8 and BF16."""
    root = tmp_path_factory.mktemp("layouts")
    pairs = {}
    for name, block in (("fp8", 32), ("bf16", None)):
        hf = make_tiny(root / f"hf-{name}", block=block)
        import_checkpoint(hf, root / f"megatron-{name}", hashed=False)
        pairs[name] = (hf, root / f"megatron-{name}")
    return pairs


def load_both_ways(
    hf: str, megatron: str, sizes: dict[str, int], dtype: torch.dtype
) -> tuple[int, list[str], list[str]]:
    """Return how many tensors this rank holds, and names that differ: by Megatron's loader, and by ours from that form."""
    import megatron_xorl as mx

    mx.use_cpu()
    mx.initialize(**sizes)
    from megatron_xorl.config.model import load_glm_config
    from megatron_xorl.layers.base_state import load_base_distributed
    from megatron_xorl.training.model import build_model, load_model

    glm = load_glm_config(hf)
    direct = tensors(load_model(hf, dtype=dtype))
    ours = tensors(load_model(megatron, dtype=dtype))
    model = build_model(glm, dtype=dtype)
    with torch.no_grad():
        for tensor in tensors(model).values():
            tensor.view(torch.uint8).fill_(17)
    load_base_distributed(model, glm, megatron)
    theirs = tensors(model)
    assert direct.keys() == ours.keys() == theirs.keys()
    return len(direct), differing(direct, theirs), differing(direct, ours)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in a
        if a[name].dtype != b[name].dtype
        or not torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_loads_the_import_of_fp8_as_direct_loading_does(layout, pair) -> None:
    world, sizes = LAYOUTS[layout]
    hf, megatron = map(str, pair["fp8"])
    for count, theirs, ours in run_world(load_both_ways, world, hf, megatron, sizes, torch.float32):
        assert count > 20
        assert (theirs, ours) == ([], [])


@pytest.mark.parametrize("layout", ["tp2", "tp2 x ep2"])
def test_megatron_loads_the_import_of_bf16_as_direct_loading_does(layout, pair) -> None:
    world, sizes = LAYOUTS[layout]
    hf, megatron = map(str, pair["bf16"])
    for count, theirs, ours in run_world(
        load_both_ways, world, hf, megatron, sizes, torch.bfloat16
    ):
        assert count > 20
        assert (theirs, ours) == ([], [])


def test_one_changed_byte_shows_at_the_rank_that_owns_it(pair, tmp_path) -> None:
    """Control: the comparison sees a single code."""
    import shutil

    from megatron_xorl.weights.opening import open_checkpoint

    hf, megatron = pair["fp8"]
    changed = tmp_path / "changed"
    shutil.copytree(megatron, changed)
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    checkpoint = open_checkpoint(changed)
    entry = checkpoint.entry(name)
    with open(changed / checkpoint.shard_of(name), "r+b") as file:
        file.seek(entry.start)
        byte = file.read(1)[0]
        file.seek(entry.start)
        file.write(bytes([byte ^ 1]))
    results = run_world(load_both_ways, 2, str(hf), str(changed), {"ep": 2}, torch.float32)
    assert [len(theirs) for _, theirs, _ in results] == [0, 1]
    assert [len(ours) for _, _, ours in results] == [0, 1]
