"""Which parallel layouts this model can be cut into.

The one idea: a layout is legal or it is refused with the reason and the nearest legal values,
before any process starts. Names are Megatron's: tp (tensor), pp (pipeline), ep (expert), etp
(expert tensor), cp (context). Refused: sizes that do not divide the world, the experts or the
heads; a tensor cut inside a block of the FP8 scale grid; more pipeline stages than ``stages.py``
beside this file can cut; a sequence that context and tensor ranks cannot share evenly; a world larger
than any machine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_xorl.config.indexer import shown
from megatron_xorl.config.model import GlmConfig
from megatron_xorl.config.stages import nearest_legal, pipeline_problem
from megatron_xorl.errors import LayoutError

__all__ = [
    "MOST_BUILT",
    "MOST_WORLD",
    "ParallelLayout",
    "RankCoordinates",
    "check_layout",
    "layout_problems",
    "rank_coordinates",
    "sequence_problem",
    "sequence_unit",
    "smallest_world",
]

MOST_WORLD = 2**20
"""Processes, and size of any group: ten times the largest machines there are."""
MOST_BUILT = 4096
"""Processes of a layout whose modules are built: Megatron lists every group of the world, in seconds up to here."""


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the parallel groups; ``world`` is the number of processes."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    world: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel size of everything but the experts."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world // (self.etp * self.ep * self.pp)


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """Position of one process in every group: ``tp, cp, dp, pp`` for all but the experts, ``etp, ep, edp, pp`` for them."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


def smallest_world(*, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, cp: int = 1) -> int:
    """Return the fewest processes that both the dense and the expert groups divide."""
    return math.lcm(tp * pp * cp, etp * ep * pp)


def rank_coordinates(layout: ParallelLayout, rank: int) -> RankCoordinates:
    """Return where ``rank`` stands in Megatron's order ``tp-cp-ep-dp-pp``: tp (for experts etp) varies fastest, pp slowest.

    Raises:
        LayoutError: there is no such rank.
    """
    if not 0 <= rank < layout.world:
        raise LayoutError(f"rank {rank} does not exist; expected 0 to {layout.world - 1}")
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    rest, etp = divmod(rank, layout.etp)
    rest, ep = divmod(rest, layout.ep)
    return RankCoordinates(rank, tp, cp, dp, pp, etp, ep, rest % layout.edp)


def check_layout(config: GlmConfig, layout: ParallelLayout) -> None:
    """Return if ``config`` can be cut as ``layout`` says.

    Raises:
        LayoutError: with every reason and the nearest legal values.
    """
    problems = layout_problems(config, layout)
    if problems:
        raise LayoutError("; ".join(problems))


def layout_problems(config: GlmConfig, layout: ParallelLayout) -> tuple[str, ...]:
    """Return the reasons why ``layout`` is not legal for ``config``; empty if it is."""
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "ep", "etp", "cp", "world")}
    wrong = [
        f"{name} is {size!r}, expected a whole number of at least 1"
        for name, size in sizes.items()
        if not _is_count(size)
    ] or [
        f"{name} is {shown(size)}, expected at most {MOST_WORLD}"
        for name, size in sizes.items()
        if size > MOST_WORLD
    ]
    if wrong:
        return tuple(wrong)
    return tuple(
        problem
        for problem in (
            _world("tp × pp × cp", layout.tp * layout.pp * layout.cp, layout.world),
            _world("etp × ep × pp", layout.etp * layout.ep * layout.pp, layout.world),
            _experts(config, layout.ep),
            _tensor(config, layout.tp),
            _expert_tensor(config, layout.etp),
            pipeline_problem(config, layout.pp),
        )
        if problem
    )


def _is_count(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _world(what: str, product: int, world: int) -> str | None:
    if world % product == 0:
        return None
    return (
        f"world size {world} is not a multiple of {what} = {product}; "
        f"start {product} processes (or a multiple), or lower one of them"
    )


def _legal(whole: int, problem: Callable[[int], str | None]) -> list[int]:
    """Legal sizes of a group that must divide ``whole``: its divisors are tried, 17 million sizes would take seconds."""
    small = [size for size in range(1, math.isqrt(whole) + 1) if whole % size == 0]
    return [size for size in {*small, *(whole // size for size in small)} if problem(size) is None]


def sequence_unit(*, tp: int, cp: int) -> int:
    """Return what the tokens of a sequence must be a multiple of.

    Context parallelism cuts a sequence into ``2 * cp`` parts (``layers.context``), sequence parallelism what a context rank holds
    into tp.
    """
    return tp if cp == 1 else cp * math.lcm(2, tp)


def sequence_problem(seq_length: int, *, tp: int, cp: int) -> str | None:
    """Return why sequences of ``seq_length`` tokens cannot be cut over cp and then tp ranks; None if they can."""
    unit = sequence_unit(tp=tp, cp=cp)
    if seq_length % unit == 0:
        return None
    below = seq_length // unit * unit
    legal = [length for length in (below, below + unit) if length]
    return (
        f"seq_length {seq_length} does not cut evenly over cp {cp} and tp {tp}: it must be a multiple of {unit}; "
        f"nearest legal: {nearest_legal(seq_length, legal)}"
    )


def _experts(config: GlmConfig, ep: int) -> str | None:
    experts = config.n_routed_experts
    if experts % ep == 0:
        return None
    legal = _legal(experts, lambda _: None)
    return (
        f"ep {ep} does not divide the {experts} experts; nearest legal: {nearest_legal(ep, legal)}"
    )


def _tensor(config: GlmConfig, tp: int) -> str | None:
    reason = _tensor_reason(config, tp)
    if reason is None:
        return None
    legal = _legal(config.num_attention_heads, lambda size: _tensor_reason(config, size))
    return f"tp {tp}: {reason}; nearest legal: {nearest_legal(tp, legal)}"


def _tensor_reason(config: GlmConfig, tp: int) -> str | None:
    heads = config.num_attention_heads
    if heads % tp:
        return f"{heads} attention heads are not divisible by it"
    if config.vocab_size % tp:
        return f"{config.vocab_size} vocabulary rows are not divisible by it"
    block_rows, block_columns = config.weight_block_size or (1, 1)
    shared = config.moe_intermediate_size * config.n_shared_experts
    cuts = [
        ("q_b_proj rows", heads * config.qk_head_dim, block_rows),
        ("kv_b_proj rows", heads * (config.qk_nope_head_dim + config.v_head_dim), block_rows),
        ("o_proj columns", heads * config.v_head_dim, block_columns),
    ]
    if config.first_k_dense_replace:
        cuts += _mlp_cuts("mlp", config.intermediate_size, block_rows, block_columns)
    if config.first_k_dense_replace < config.num_hidden_layers:
        cuts += _mlp_cuts("mlp.shared_experts", shared, block_rows, block_columns)
    return _first_off_grid(cuts, tp)


def _expert_tensor(config: GlmConfig, etp: int) -> str | None:
    block_rows, block_columns = config.weight_block_size or (1, 1)
    cuts = _mlp_cuts("mlp.experts", config.moe_intermediate_size, block_rows, block_columns)

    def reason(size: int) -> str | None:
        return _first_off_grid(cuts, size)

    if reason(etp) is None:
        return None
    legal = _legal(config.moe_intermediate_size, reason)
    return f"etp {etp}: {reason(etp)}; nearest legal: {nearest_legal(etp, legal)}"


def _mlp_cuts(
    name: str, width: int, block_rows: int, block_columns: int
) -> list[tuple[str, int, int]]:
    return [
        (f"{name} gate_proj and up_proj rows", width, block_rows),
        (f"{name} down_proj columns", width, block_columns),
    ]


def _first_off_grid(cuts: Sequence[tuple[str, int, int]], size: int) -> str | None:
    for name, extent, block in cuts:
        if extent % size:
            return f"{extent} {name} are not divisible by it"
        if size > 1 and (extent // size) % block:
            return (
                f"it cuts {extent} {name} into {extent // size}, which is {extent / size / block:g} "
                f"FP8 blocks of {block}; a cut must lie on the block grid"
            )
    return None
