"""An imported checkpoint at every layout: Megatron's own loader fills each rank with the bytes that direct loading gives it, and
what the ranks own, put together again, is the Hugging Face checkpoint it came from, file by file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.convert.importer import import_checkpoint
from megatron_xorl.convert.tiny import make_tiny
from megatron_xorl.weights.keys import CARRIED_PREFIX, key_table
from megatron_xorl.weights.opening import open_checkpoint
from tests.worlds import run_world

LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep4": (4, {"ep": 4}),
    "tp2 x ep2": (2, {"tp": 2, "ep": 2}),
    "etp2": (2, {"tp": 2, "etp": 2}),
}
OFTEN = ("pp2", "tp2 x ep2")  # the others, of the same code, are slow tests
CASES = [(name, "fp8") for name in LAYOUTS] + [("tp2", "bf16"), ("tp2 x ep2", "bf16")]


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
    hf: str, megatron: str, sizes: dict[str, int], out: str
) -> tuple[int, list[str], list[str]]:
    """Return how many tensors this rank holds, and names that differ: by Megatron's loader, and by ours from that form.

    What Megatron's loader gave this rank, and no other rank owns, is written into ``out``.
    """
    import megatron_xorl as mx

    mx.use_cpu()
    mx.initialize(**sizes)
    from megatron_xorl.layers.base_state import base_sharded_state_dict, load_base_distributed
    from megatron_xorl.training.model import build_model, load_model

    glm, dtype = load_glm_config(hf), torch.bfloat16
    direct = tensors(load_model(hf, dtype=dtype))
    ours = tensors(load_model(megatron, dtype=dtype))
    model = build_model(glm, dtype=dtype)
    with torch.no_grad():
        for tensor in tensors(model).values():
            tensor.view(torch.uint8).fill_(17)
    load_base_distributed(model, glm, megatron)
    theirs = tensors(model)
    owned = [
        (key, shard.global_shape, shard.global_offset, shard.data.clone())
        for key, shard in base_sharded_state_dict(model, glm).items()
        if not any(shard.replica_id)
    ]
    torch.save(owned, f"{out}/{torch.distributed.get_rank()}.pt")
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


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        pytest.param(*case, marks=() if case[1] == "fp8" and case[0] in OFTEN else pytest.mark.slow)
        for case in CASES
    ],
)
def test_loaded_at_a_layout_the_import_is_what_it_came_from(layout, form, pair, tmp_path) -> None:
    world, sizes = LAYOUTS[layout]
    hf, megatron = pair[form]
    results = run_world(load_both_ways, world, str(hf), str(megatron), sizes, str(tmp_path))
    for count, theirs, ours in results:
        assert count > 20
        assert (theirs, ours) == ([], [])
    again = to_hugging_face(tmp_path, world, hf, megatron)
    source = open_checkpoint(hf)
    assert again.keys() == set(source.names())
    (tmp_path / "back").mkdir()
    for shard in source.shards():
        names = source.header(shard)
        save_file({n: again[n] for n in names}, tmp_path / "back" / shard, {"format": "pt"})
        assert (tmp_path / "back" / shard).read_bytes() == (hf / shard).read_bytes()


def to_hugging_face(folder: Path, world: int, hf: Path, megatron: Path) -> dict[str, torch.Tensor]:
    """Put the parts of all ranks together, each element once, and cut them by Hugging Face name; what no rank loads is read."""
    wholes: dict[str, torch.Tensor] = {}
    filled: dict[str, int] = {}
    for rank in range(world):
        for key, shape, offset, part in torch.load(folder / f"{rank}.pt"):
            whole = wholes.setdefault(key, torch.zeros(shape, dtype=part.dtype))
            cut = tuple(slice(at, at + n) for at, n in zip(offset, part.shape, strict=True))
            whole.view(torch.uint8 if part.dtype.itemsize == 1 else part.dtype)[cut] = (
                part.view(torch.uint8) if part.dtype.itemsize == 1 else part
            )
            filled[key] = filled.get(key, 0) + part.numel()
    assert filled == {key: whole.numel() for key, whole in wholes.items()}
    source, result = open_checkpoint(megatron), {}
    for name, chunk in key_table(load_glm_config(hf)).items():
        if name not in source:
            continue
        if chunk.key.startswith(CARRIED_PREFIX):
            result[name] = source.read(name)
            continue
        cut = tuple(slice(at, at + n) for at, n in zip(chunk.offset, chunk.size, strict=True))
        result[name] = wholes[chunk.key][cut].reshape(source.shape(name)).contiguous()
    return result


def test_one_changed_byte_shows_at_the_rank_that_owns_it(pair, tmp_path) -> None:
    """Control: the comparison sees a single code."""
    import shutil

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
    arguments = (str(hf), str(changed), {"ep": 2}, str(tmp_path))
    results = run_world(load_both_ways, 2, *arguments)
    assert [len(theirs) for _, theirs, _ in results] == [0, 1]
    assert [len(ours) for _, _, ours in results] == [0, 1]
    again = to_hugging_face(tmp_path, 2, hf, changed)
    source = open_checkpoint(hf)
    differ = [n for n in again if not torch.equal(bits(again[n]), bits(source.read(n)))]
    assert differ == [name]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
