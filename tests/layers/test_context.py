"""Context parallelism: one sequence cut over ranks gives what one rank gives, packed documents and every split included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_xorl.errors import DataError, LayoutError
from tests.layers.context_case import FAULTS, ROWS, TOPK, Row, Told, start, tell
from tests.layers.parity_case import token_ids
from tests.training.comparison import relative
from tests.worlds import run_world

pytestmark = pytest.mark.dist

LOGITS = 1e-5
"""Of the largest logit: fp32 products of another number of rows."""
GRADIENT = 1e-5
"""rel-L2 of every factor, as between any two layouts: sums over tokens are taken in parts."""


def every_row(directory: str, layout: dict[str, int], rows: dict[str, Row]) -> dict[str, Told]:
    model = start(directory, layout)
    return {name: tell(model, row) for name, row in rows.items()}


@pytest.fixture(scope="module")
def one(tiny_dir: Path) -> dict[str, Told]:
    """What one process tells."""
    return run_world(every_row, 1, str(tiny_dir), {}, ROWS)[0]


def wrong(found: Told, expected: Told) -> dict[str, str]:
    """What differs beyond its limit."""
    gap = (found.logits - expected.logits).abs().max() / expected.logits.abs().max()
    # Over tensor ranks factors are in pieces, and some of their gradients too; the layouts' tests put those together.
    whole = expected.gradients if found.tensor_ranks == 1 else {}
    worst = max(
        ((relative(found.gradients[n], expected.gradients[n]), n) for n in whole), default=(0.0, "")
    )
    print(f"logits {gap:.1e} of the largest, gradients {worst[0]:.1e} {worst[1]}")
    out = {}
    if not gap <= LOGITS:
        out["logits"] = f"{gap:.1e}"
    if not worst[0] <= GRADIENT:
        out["gradients"] = f"{worst[0]:.1e} {worst[1]}"
    keys = {n: sets.shape[-1] for n, sets in expected.selected.items()}
    same = found.selected.keys() == expected.selected.keys() and all(
        # the padding that makes a row even is in nobody's sight and sees what it likes
        torch.equal(found.selected[n][: sets.shape[0], :, : keys[n]], sets)
        for n, sets in expected.selected.items()
    )
    return out if same else out | {"selected": "other keys"}


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 2},
        pytest.param({"cp": 4}, marks=pytest.mark.layouts),
        pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.layouts),
    ],
    ids=str,
)
def test_logits_gradients_and_selections_are_those_of_one_rank(
    tiny_dir: Path, one: dict[str, Told], layout: dict[str, int]
) -> None:
    world = layout["cp"] * layout.get("tp", 1)
    for told in run_world(every_row, world, str(tiny_dir), layout, ROWS, timeout=180):
        for name, row in told.items():
            print(name, end=": ")
            assert wrong(row, one[name]) == {}, name
    longest = one["two rows"].selected[3]
    assert longest.shape[0] > TOPK and int(longest[-1].sum(-1).max()) == TOPK


def with_faults(directory: str, row: Row) -> dict[str, Told]:
    model = start(directory, {"cp": 2})
    out = {}
    for name, (fault, _) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            out[name] = tell(model, row)
    out["none"] = tell(model, row)
    return out


def test_each_fault_is_seen_by_its_check(tiny_dir: Path, one: dict[str, Told]) -> None:
    found = run_world(with_faults, 2, str(tiny_dir), ROWS["documents"])[0]
    assert wrong(found.pop("none"), one["documents"]) == {}
    for name, told in found.items():
        seen = wrong(told, one["documents"])
        print(name, seen)
        assert FAULTS[name][1] in seen, name
    # This one is in backward alone, where no logit and no selection could show it.
    assert wrong(
        found["gradients of gathered keys not reduced"], one["documents"]
    ).keys() == {"gradients"}  # fmt: skip


def parts_of_a_batch(directory: str) -> list[bool]:
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatron_xorl.layers.context import own_part
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(cp=dist.get_world_size())
    tokens = token_ids(3, 48)
    batch = {
        "tokens": tokens,
        "position_ids": torch.arange(48).expand(3, 48),
        "loss_mask": tokens / 7,
    }
    theirs = get_batch_on_this_cp_rank(
        dict(batch), is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    ours = own_part(batch | {"sample": torch.arange(3)})
    assert ours.pop("sample").shape == (3,)
    assert ours["tokens"].shape == (3, 48 // dist.get_world_size())
    return [torch.equal(ours[name], theirs[name]) for name in batch]


@pytest.mark.parametrize("cp", [2, 4])
def test_a_batch_is_cut_as_megatron_cuts_it(tiny_dir: Path, cp: int) -> None:
    assert run_world(parts_of_a_batch, cp, str(tiny_dir)) == [[True] * 3] * cp


class _Group:
    """Stands for a process group of which only size and rank are asked."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


def _slots(size: int, rank: int, length: int, kind: str, bounds: list[int] | None = None) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_xorl.layers.context import ContextSplit

    packed = None
    if bounds is not None:
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds))
    split = ContextSplit(_Group(size, rank), kind)  # type: ignore[arg-type]
    slots = split.place(length, torch.device("cpu"), packed).slots
    return None if slots is None else slots.tolist()


def test_slots_written_by_hand() -> None:
    assert _slots(1, 0, 7, "zigzag") is None
    assert _slots(2, 0, 8, "zigzag") == [0, 1, 6, 7]
    assert _slots(2, 1, 8, "zigzag") == [2, 3, 4, 5]
    assert _slots(2, 1, 8, "zigzag", [0, 3, 8]) == [2, 3, 4, 5]  # documents do not move the cut
    assert _slots(2, 1, 6, "contiguous") == [3, 4, 5]
    assert _slots(2, 0, 16, "documents", [0, 4, 12, 12]) == [0, 3, 4, 5, 10, 11, 12, 15]
    assert _slots(2, 1, 16, "documents", [0, 4, 12, 12]) == [1, 2, 6, 7, 8, 9, 13, 14]
    assert _slots(3, 2, 12, "zigzag") == [4, 5, 6, 7]


def test_zigzag_gives_every_rank_as_many_pairs_of_query_and_key() -> None:
    seen = {
        kind: [sum(slot + 1 for slot in _slots(4, rank, 64, kind)) for rank in range(4)]
        for kind in ("zigzag", "contiguous")
    }
    assert len(set(seen["zigzag"])) == 1
    assert max(seen["contiguous"]) / sum(seen["contiguous"]) > 0.43  # 7/16 of all at the last rank


@pytest.mark.parametrize(
    ("length", "kind", "bounds", "says"),
    [
        (10, "zigzag", None, "a row has 10 tokens, which do not cut into 4 equal parts"),
        (3, "zigzag", None, "nearest: 4"),
        (9, "contiguous", None, "nearest: 8 or 10"),
        (16, "documents", [0, 4, 10, 16], "the document of tokens 4 to 10 has 6 tokens"),
        (16, "documents", [0, 4, 20], r"cu_seqlens_q is \[0, 4, 20\]"),
    ],
)
def test_what_cannot_be_cut_evenly_is_refused(
    length: int, kind: str, bounds: list[int] | None, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        _slots(2, 0, length, kind, bounds)


def test_another_split_is_refused() -> None:
    with pytest.raises(LayoutError, match="'ring', expected one of zigzag"):
        _slots(2, 0, 8, "ring")


def summed_in_fp32() -> float:
    from megatron.core import parallel_state

    from megatron_xorl.layers.context import ContextSplit
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize

    use_cpu()
    initialize(cp=4)
    place = ContextSplit(parallel_state.get_context_parallel_group()).place(8, torch.device("cpu"))
    x = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    mine = 256.0 if dist.get_rank() == 0 else 1.0
    (place.whole(x) * mine).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    return float(x.grad[0, 0, 0])


def test_gradients_of_bf16_keys_are_summed_in_fp32() -> None:
    # 256 + 1 is 256 in bf16, at each of three additions; 259 rounds to 260.
    assert run_world(summed_in_fp32, 4) == [260.0] * 4


def in_dtype(directory: str, layout: dict[str, int], dtype: str) -> Told:
    return tell(start(directory, layout, getattr(torch, dtype)), ROWS["two rows"])


@pytest.mark.layouts
def test_in_bf16_the_split_adds_little_to_what_the_dtype_does(
    tiny_dir: Path, one: dict[str, Told]
) -> None:
    """Bound: a tenth of the distance between bf16 and fp32 on one rank.

    Queries are computed alike on every layout; what differs is the number of rows of a product, so the order of its sums, and
    where sums over tokens are rounded. That is one of bf16's many roundings and must stay an order below all of them together. A
    selection that it turns is followed by later layers, so the same holds of selections.
    """
    exact = one["two rows"]
    alone = run_world(in_dtype, 1, str(tiny_dir), {}, "bfloat16")[0]
    for cp in (2, 4):
        for told in run_world(in_dtype, cp, str(tiny_dir), {"cp": cp}, "bfloat16"):
            for name, read in _READ.items():
                power = 2 if name == "selections" else 1  # of zeros and ones: their number
                split = (read(told) - read(alone)).norm() ** power
                rounding = (read(alone) - read(exact)).norm() ** power
                print(f"cp {cp} {name}: {split / rounding:.3f} of what bf16 does")
                assert split <= 0.1 * rounding, name


_READ: dict[str, Callable[[Told], Tensor]] = {
    "logits": lambda told: told.logits.double(),
    "gradients": lambda told: torch.cat([g.double().flatten() for g in told.gradients.values()]),
    "selections": lambda told: torch.cat(
        [sets[:109, :, :109].double().flatten() for _, sets in sorted(told.selected.items())]
    ),
}


RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "all of ours": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mla_up_proj", "layernorm", "moe"],
    },
}


def recomputed(directory: str) -> dict[str, tuple[Tensor, dict[str, Tensor], int]]:
    """Losses and gradients of this rank in every form, two microbatches in flight; how many whole rows of keys were kept."""
    import megatron_xorl.training.model as library
    from megatron_xorl.layers.attach import named_factors
    from megatron_xorl.layers.context import own_part

    plain, out = library.transformer_config, {}
    for name, options in RECOMPUTE.items():
        library.transformer_config = partial(plain, **options)
        model = start(directory, {"cp": 2}).train()
        losses: list[Tensor] = []
        shapes: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(_note, shapes), lambda x: x):
            for seed in (9, 10):
                ids = token_ids(2, 57, seed)
                row = own_part({"ids": ids[:, :-1], "next": ids[:, 1:]})
                losses.append(model(row["ids"], row["ids"], None, labels=row["next"]).sum())
        width = model.glm_config.kv_lora_rank + model.glm_config.qk_rope_head_dim
        rows = shapes.count(torch.Size([56, 2, width]))
        for loss in losses:
            loss.backward()
        gradients = {n: p.grad.clone() for n, (_, _, p) in named_factors(model).items()}
        out[name] = (torch.stack(losses).detach(), gradients, rows)
    return out


def _note(shapes: list[torch.Size], kept: Tensor) -> Tensor:
    shapes.append(kept.shape)
    return kept


def test_recompute_gathers_the_keys_again_and_gives_the_same_bits(tiny_dir: Path) -> None:
    for rank in run_world(recomputed, 2, str(tiny_dir)):
        losses, gradients, rows = rank.pop("none")
        assert len(gradients) == 84 and all(g.any() for g in gradients.values())
        assert rows == 8  # of two microbatches in four layers
        for name, (again, found, rows) in rank.items():
            assert rows == 0, name
            assert torch.equal(again, losses), name
            assert [n for n, g in gradients.items() if not torch.equal(found[n], g)] == [], name
