"""A rank reads its own part of the base from the Hugging Face directory, and nothing of the others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_xorl.config.layout import ParallelLayout
from megatron_xorl.config.model import load_glm_config
from megatron_xorl.plan.rank_bytes import Held, held
from megatron_xorl.weights.placement import OwnedTensor, owned_tensors
from tests.worlds import run_world

pytestmark = [pytest.mark.dist, pytest.mark.layouts]

SLACK = 0.05
"""What may be read beyond a rank's share and the parts that every rank holds: rank 0's fingerprint samples, headers."""


def bytes_read(directory: str, layout: dict[str, int], whole: bool) -> dict[str, int]:
    """Bytes of tensors that the reader gave out while this rank loaded its model, by how they were asked for."""
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.model import load_model
    from megatron_xorl.weights.checkpoint import Checkpoint

    use_cpu()
    initialize(**layout)
    read, raw = Checkpoint.read, Checkpoint.raw
    told = {"slices": 0, "raw": 0}

    def counted(self: Any, name: str, slices: Any = None) -> Tensor:
        value = read(self, name, None if whole else slices)
        told["slices"] += value.numel() * value.element_size()
        return value if not whole or slices is None else value[slices].clone()

    def counted_raw(self: Any, name: str) -> bytes:
        value = raw(self, name)
        told["raw"] += len(value)
        return value

    Checkpoint.read, Checkpoint.raw = counted, counted_raw
    load_model(directory)
    return told


def shares(directory: Path, layout: ParallelLayout, rank: int) -> tuple[int, int]:
    """Bytes of what is cut between ranks, this rank's part of it, and bytes of what it holds whole like all others."""
    glm = load_glm_config(directory)

    def total(cut: bool) -> int:
        rows = (own for own in owned_tensors(glm, layout, rank) if is_cut(own, layout) == cut)
        return sum((held(own) for own in rows), Held()).total

    return total(True), total(False)


def is_cut(own: OwnedTensor, layout: ParallelLayout) -> bool:
    """Whether a rank holds only part of what this tensor belongs to: a tensor part, or some experts of a bank."""
    if own.row.expert is not None:
        return layout.ep > 1 or layout.etp > 1
    return own.row.tp_axis is not None and layout.tp > 1


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(tp=2, world=2), ParallelLayout(ep=4, world=4)],
    ids=["tp2", "ep4"],
)
def test_a_rank_reads_its_share_and_what_all_hold(layout: ParallelLayout, model_dir: Path) -> None:
    sizes = {"tp": layout.tp, "ep": layout.ep}
    found = run_world(bytes_read, layout.world, str(model_dir), sizes, False, timeout=180)
    everything = sum(shares(model_dir, ParallelLayout(), 0))
    for rank, told in enumerate(found):
        share, copied = shares(model_dir, layout, rank)
        read = told["slices"] + told["raw"]
        print(
            f"rank {rank} of {sizes}: read {read:,} bytes ({told['raw']:,} of them for checks of small tensors); its share "
            f"{share:,} + replicated {copied:,} = {share + copied:,}; the base {everything:,}"
        )
        assert share + copied <= read <= (1 + SLACK) * (share + copied)
        assert read < everything


def test_a_rank_that_read_whole_tensors_would_be_seen(model_dir: Path) -> None:
    layout = ParallelLayout(tp=2, world=2)
    for rank, told in enumerate(
        run_world(bytes_read, 2, str(model_dir), {"tp": 2}, True, timeout=180)
    ):
        share, copied = shares(model_dir, layout, rank)
        assert told["slices"] > (1 + SLACK) * (share + copied)
