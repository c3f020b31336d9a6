"""What to say about a target entry that matches nothing.

The one idea: most such entries are one component away from a real name, so each component is
compared with the components that exist (``shared_expert`` → ``shared_experts``), and a repaired
entry is offered only if it matches something. Modules that nothing adapts, and fused names of other
frameworks, get their reason instead.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Sequence

from megatron_xorl.adapters.projections import Projection
from megatron_xorl.errors import nearest

__all__ = ["why_nothing"]

_NEVER = {
    "gate": "the router never trains",
    "indexer": "the indexer is not adapted (see the key indexer)",
    "wq_b": "the indexer is not adapted (see the key indexer)",
    "wk": "the indexer is not adapted (see the key indexer)",
    "weights_proj": "the indexer is not adapted (see the key indexer)",
    "embed_tokens": "the embedding is not adapted",
}
_FUSED = {
    "gate_up_proj": "gate_proj and up_proj",
    "linear_fc1": "gate_proj and up_proj",
    "linear_fc2": "down_proj",
    "linear_qkv": "q_a_proj, q_b_proj, kv_a_proj_with_mqa and kv_b_proj",
    "linear_proj": "o_proj",
    "qkv_proj": "q_a_proj, q_b_proj, kv_a_proj_with_mqa and kv_b_proj",
    "q_proj": "q_a_proj and q_b_proj",
}


def why_nothing(pattern: str, projections: Sequence[Projection]) -> str:
    """Return the end of the sentence "target 'x' matches nothing": the reason if known, and the nearest real names."""
    parts = pattern.split(".")
    for part in reversed(parts):
        if part in _NEVER:
            return f": {_NEVER[part]}; remove it{_layers_note(parts, projections)}"
        if part in _FUSED:
            return f": names here are Hugging Face's, one projection each; write {_FUSED[part]}"
    beyond = _layers_note(parts, projections)
    if beyond:
        return beyond
    repaired = _repair(parts, projections)
    if repaired:
        return f"; did you mean {repaired!r}?"
    inside = f"{pattern}.*"
    if len(parts) > 1 and any(fnmatch.fnmatchcase(item.name, inside) for item in projections):
        return f": it names a module, not a projection; did you mean {inside!r}?"
    names = {item.name for item in projections} | {item.leaf for item in projections}
    close = nearest(pattern, sorted(names))
    return (
        f"; the nearest names are {', '.join(close)}"
        if close
        else f"; projections are {_leaves(projections)}"
    )


def _leaves(projections: Sequence[Projection]) -> str:
    return ", ".join(dict.fromkeys(item.leaf for item in projections))


def _layers_note(parts: Sequence[str], projections: Sequence[Projection]) -> str:
    count = 1 + max((item.layer for item in projections if item.layer is not None), default=-1)
    for before, part in itertools.pairwise(parts):
        if before == "layers" and part.isdecimal() and int(part) >= count:
            return f"; the layers are 0 to {count - 1} (a multi-token-prediction layer after them is kept, not adapted)"
    return ""


def _repair(parts: Sequence[str], projections: Sequence[Projection]) -> str | None:
    """Return the entry with each unknown component replaced by the nearest known one, if that matches a projection."""
    known = sorted(
        {part for item in projections for part in item.name.split(".") if not part.isdecimal()}
    )
    fixed = [_nearest_part(part, known) for part in parts]
    if fixed == list(parts):
        return None
    entry = ".".join(fixed)
    if len(fixed) == 1 and not any(mark in entry for mark in "*?["):
        return entry if any(item.leaf == entry for item in projections) else None
    real = any(fnmatch.fnmatchcase(name, entry) for item in projections for name in _names(item))
    return entry if real else None


def _names(item: Projection) -> tuple[str, ...]:
    return (item.name, item.expert_name(0)) if item.num_experts else (item.name,)


def _nearest_part(part: str, known: Sequence[str]) -> str:
    if part in known or part.isdecimal():
        return part
    core = part.strip("*")
    if any(mark in core for mark in "*?[") or not core:
        return part
    if core != part and any(fnmatch.fnmatchcase(name, part) for name in known):
        return part
    by_case = {name.lower(): name for name in known}
    best = [by_case[core.lower()]] if core.lower() in by_case else nearest(core, known, n=1)
    if not best:
        return part
    return part.replace(core, best[0]) if core != part else best[0]
