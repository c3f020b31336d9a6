"""Where the pipeline may be cut, and the cut that is proposed.

The one idea: a layer that shares an indexer attends by a selection that an earlier layer made, so a
stage begins on a layer that owns an indexer, or the selection would have to cross to another rank.
Between those layers the cut is chosen, not asked for: the largest stage has as few layers as any
legal cut allows, among such cuts the sum of the squared sizes is the smallest, and among those the
earlier stages are the smaller ones, since under Megatron's schedule they hold more microbatches.

With virtual stages a stage here is a chunk: chunk ``i`` is virtual stage ``i // pp`` of pipeline rank
``i % pp``, as Megatron lists them. The MTP layer is not built and has no place in a layout.

    megatron-xorl inspect glm-5.2 --pp 4
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache

from megatron_xorl.config.model import GlmConfig
from megatron_xorl.errors import LayoutError

__all__ = [
    "check_stage_starts",
    "interleaving_problem",
    "megatron_layout",
    "nearest_legal",
    "pipeline_problem",
    "pipeline_stages",
]


def nearest_legal(found: int, legal: Iterable[int]) -> str:
    """Return up to three of ``legal`` that are nearest to ``found``, in rising order, for a message."""
    close = sorted(sorted(legal, key=lambda size: (abs(size - found), size))[:3])
    return ", ".join(map(str, close))


def pipeline_problem(config: GlmConfig, pp: int, vpp: int = 1) -> str | None:
    """Return why ``pp`` ranks of ``vpp`` virtual stages are too many for ``config``, None if they are not."""
    owners = len(config.full_indexer_layers)
    if pp * vpp <= owners:
        return None
    stages = f"pp {pp}" if vpp == 1 else f"pp {pp} with {vpp} virtual stages each"
    return (
        f"{stages}: a stage must begin on a layer that owns an indexer, and there are {owners} such layers; "
        f"nearest legal{'' if vpp == 1 else f' pp with {vpp} virtual stages'}: "
        f"{nearest_legal(pp, range(1, owners // vpp + 1)) or 'none'}"
    )


def interleaving_problem(microbatches: int, pp: int, vpp: int) -> str | None:
    """Return why ``microbatches`` of a step cannot run through ``vpp`` virtual stages on each of ``pp`` ranks; None if not."""
    if vpp == 1:
        return None
    if pp == 1:
        return f"vpp {vpp} with pp 1: virtual stages are for two pipeline ranks or more; use vpp 1"
    if microbatches % pp == 0:
        return None
    below = microbatches // pp * pp
    return (
        f"{microbatches} microbatches a step on pp {pp} with {vpp} virtual stages each: the interleaved schedule takes them in "
        f"groups of {pp}; nearest legal: {nearest_legal(microbatches, [n for n in (below, below + pp) if n])} microbatches "
        "(global batch / micro batch / data-parallel size)"
    )


def pipeline_stages(config: GlmConfig, pp: int, vpp: int = 1) -> tuple[range, ...]:
    """Return the layers of each of ``pp * vpp`` stages, in model order: the cut described at the top of this file.

    Raises:
        LayoutError: there are fewer full-indexer layers than stages.
    """
    problem = pipeline_problem(config, pp, vpp)
    if problem:
        raise LayoutError(problem)
    starts = _best_starts(config.full_indexer_layers, config.num_hidden_layers, pp * vpp)
    return tuple(
        range(first, last)
        for first, last in itertools.pairwise((*starts, config.num_hidden_layers))
    )


@lru_cache(maxsize=256)
def _best_starts(legal: tuple[int, ...], layers: int, stages: int) -> tuple[int, ...]:
    """Starts of the best cut; ``legal`` begins with 0 and has at least ``stages`` entries."""
    limit = min(size for size in range(1, layers + 1) if _fits(legal, layers, stages, size))
    # best[i]: of legal[i]'s layers to the end in so many stages, (sum of squares, sizes); a later stage was added first.
    best: list[tuple[int, tuple[int, ...]] | None] = [
        ((layers - start) ** 2, (layers - start,)) if layers - start <= limit else None
        for start in legal
    ]
    for _ in range(stages - 1):
        longer: list[tuple[int, tuple[int, ...]] | None] = []
        for index, start in enumerate(legal):
            found = []
            for after in range(index + 1, len(legal)):
                size, rest = legal[after] - start, best[after]
                if size > limit:
                    break
                if rest is not None:
                    found.append((size**2 + rest[0], (size, *rest[1])))
            longer.append(min(found, default=None))
        best = longer
    assert best[0] is not None
    return (0, *itertools.accumulate(best[0][1][:-1]))


def _fits(legal: tuple[int, ...], layers: int, stages: int, size: int) -> bool:
    """Whether stages of at most ``size`` layers exist: taking as much as fits needs the fewest stages, more are always found."""
    start, needed = 0, 0
    while start < layers:
        after = [end for end in (*legal, layers) if start < end <= start + size]
        if not after:
            return False
        start, needed = after[-1], needed + 1
    return needed <= stages


def check_stage_starts(config: GlmConfig, starts: Sequence[int], stages: int | None = None) -> None:
    """Return if pipeline stages may begin on the layers ``starts`` (the first is 0, each larger than the one before).

    Args:
        config: the model.
        starts: first layer of each stage that has layers.
        stages: number of stages, those without layers included; all have layers by default.

    Raises:
        LayoutError: naming both layers of the first illegal cut, the nearest legal cuts and a whole legal layout.
    """
    if not starts or starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        raise LayoutError(
            f"pipeline stages begin on layers {list(starts)}, expected 0 first and each larger than the one before"
        )
    for start in starts:
        source = config.indexer_source(start)
        if source != start:
            raise LayoutError(_refusal(config, start, source, stages or len(starts)))


def _refusal(config: GlmConfig, start: int, source: int, stages: int) -> str:
    cuts = [full for full in config.full_indexer_layers if full > 0]
    below = [full for full in cuts if full < start][-1:]
    above = [full for full in cuts if full > start][:1]
    near = " or ".join(f"between {full - 1} and {full}" for full in below + above)
    words = (
        f"the pipeline is cut between layers {start - 1} and {start}: layer {start} uses the selection of layer "
        f"{source}, which is on the stage before; "
    )
    if not near:
        return words + "this model has no legal cut; use one pipeline stage"
    words += f"nearest legal cuts: {near}; "
    if (problem := pipeline_problem(config, stages)) is not None:
        return f"{words}no layout of {stages} stages is legal: {problem}"
    return f"{words}a legal layout of {stages} stages: {megatron_layout(pipeline_stages(config, stages))}"


def megatron_layout(stages: Sequence[range]) -> str:
    """Return Megatron's ``--pipeline-model-parallel-layout`` for ``stages``: ``Et*38|t*40L``."""
    parts = [f"t*{len(stage)}" if len(stage) > 1 else "t" * len(stage) for stage in stages]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)
