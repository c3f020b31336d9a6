"""The layouts that are held to one process, one a line.

The one idea: a layout is a line of :data:`ROWS`. Whatever can be set about a run (sizes of the groups, fields of Megatron's
transformer config, of DDP's config, dtype) can be set on it; ``test_matrix.py`` runs it and the table at the end of
``bash tests/run.sh -m layouts`` has one line for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["ALLGATHER", "BF16_ROWS", "FULL", "OVERLAP", "ROWS", "SELECTIVE", "Row"]

SIZES = ("tp", "pp", "vpp", "ep", "etp", "cp")


@dataclass(frozen=True)
class Row:
    """One layout; ``world`` processes, so data parallel over what the sizes leave."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    samples: int = 0
    """Of a step, each a microbatch; 0: as few as the layout needs."""
    note: str = ""

    @property
    def layout(self) -> dict[str, int]:
        """Arguments of ``initialize``."""
        return {name: getattr(self, name) for name in SIZES}

    @property
    def batch(self) -> int:
        """Samples of a step: one for each data rank, two where that is one rank, and four to keep a pipeline busy."""
        return self.samples or max(2, self.dp, 4 if self.pp > 1 else 0)

    @property
    def dp(self) -> int:
        """Data-parallel size, of all but the experts."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def name(self) -> str:
        """``tp2 pp2 dp2 ep4 overlap``: dense axes, expert axes, what else is set."""
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "cp": self.cp, "dp": self.dp}
        edp = self.world // (self.etp * self.ep * self.pp)
        sizes |= {"ep": self.ep, "etp": self.etp, "edp": edp if self.ep > 1 or self.etp > 1 else 1}
        words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        return " ".join([*words, *filter(None, [self.note])]) or "one process"


FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
BLOCK = FULL | {"recompute_method": "block", "recompute_num_layers": 2}
SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mla_up_proj", "layernorm", "moe"],
}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}
"""A bucket is a small part of the factors here, so that there are several to overlap."""

ROWS = (
    # The tensor axes; sequence parallelism is on above 1.
    Row(2, tp=2),
    Row(2, tp=2, etp=2),
    Row(2, etp=2),
    Row(4, tp=4),
    Row(4, tp=4, etp=2),
    # The pipeline, cut as config.stages proposes; five layers, the fourth shares an indexer.
    Row(2, pp=2),
    Row(3, pp=3),
    Row(2, pp=2, vpp=2),
    # Experts and data.
    Row(2, ep=2, samples=4),
    Row(4, ep=4),
    Row(2, samples=4),
    Row(4, ep=2),
    Row(8, ep=4),
    Row(4, ep=2, etp=2),
    # Context.
    Row(2, cp=2),
    Row(4, cp=4),
    # Experts folded over context, DP 1: 16 x H100 in small.
    Row(2, cp=2, ep=2),
    Row(4, cp=4, ep=4),
    # What users combine.
    Row(2, tp=2, ep=2),
    Row(4, tp=2, ep=2),
    Row(4, tp=2, ep=4),
    Row(4, tp=2, etp=2, ep=2),
    Row(4, tp=4, ep=2),
    Row(4, tp=2, pp=2),
    Row(4, tp=2, pp=2, etp=2),
    Row(4, pp=2, ep=2),
    Row(6, pp=3, ep=2),
    Row(4, pp=2),
    Row(4, pp=2, vpp=2, ep=2),
    Row(4, pp=2, vpp=2, tp=2),
    Row(4, tp=2, pp=2, ep=2),
    Row(8, tp=2, pp=2, ep=2),
    Row(4, tp=2),
    Row(4, cp=2),
    Row(4, cp=2, tp=2),
    Row(4, cp=2, pp=2),
    Row(4, cp=2, ep=4),
    Row(4, cp=2, tp=2, ep=4),
    # The same layouts in other ways.
    Row(1, fields=FULL, note="full recompute"),
    Row(1, fields=BLOCK, note="block recompute"),
    Row(1, fields=SELECTIVE, note="selective recompute"),
    Row(2, pp=2, fields=FULL, note="full recompute"),
    Row(2, tp=2, ep=2, fields=FULL, note="full recompute"),
    Row(2, ep=2, fields=ALLGATHER, note="allgather"),
    Row(2, etp=2, fields=ALLGATHER, note="allgather"),
    Row(2, tp=2, ep=2, fields=ALLGATHER, note="allgather"),
    Row(4, tp=2, etp=2, ep=2, fields=ALLGATHER, note="allgather"),
    Row(4, ep=2, ddp=OVERLAP, note="overlap"),
    Row(4, ep=4, fields=ALLGATHER, note="allgather"),
    Row(4, tp=2, etp=2, ddp=OVERLAP, note="overlap"),
    Row(4, pp=2, ddp=OVERLAP, note="overlap"),
    Row(4, pp=2, vpp=2, ddp=OVERLAP, note="overlap"),
    Row(4, cp=2, ddp=OVERLAP, note="overlap"),
    Row(2, ddp=OVERLAP, fields=FULL, note="overlap, full recompute"),
    Row(2, ddp=OVERLAP, fields=SELECTIVE, note="overlap, selective recompute"),
)

BF16_ROWS = (
    Row(2, tp=2),
    Row(2, ep=2),
    Row(2, pp=2, samples=2),
    Row(2, cp=2),
    Row(4, tp=2, ep=2),
    Row(2, ep=2, ddp={"grad_reduce_in_fp32": True}, note="fp32 gradients"),
)
