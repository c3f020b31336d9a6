"""From target entries to projections.

The one idea: every entry is matched against logical names and must say exactly what it says. A bare
name (``q_a_proj``) matches the last component; an entry with ``.``, ``*``, ``?`` or ``[`` is an
fnmatch pattern over the full name, case-sensitive, ``*`` spans dots. A bank of experts is taken by
its own name or by all of its per-expert names. Refused: an entry that matches nothing (with the
nearest real names), one that takes some experts of a bank, a duplicate, an empty list, a promised
count that is not met.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_xorl.adapters.projections import Projection
from megatron_xorl.adapters.suggest import why_nothing
from megatron_xorl.config.adapter import TargetEntry
from megatron_xorl.errors import TargetError

__all__ = ["Selection", "is_pattern", "match_targets", "select_targets"]

Entry = str | TargetEntry


@dataclass(frozen=True, slots=True)
class Selection:
    """What the entries took: ``targets`` in model order, and by target name the entry that took it first and its own rank."""

    targets: tuple[Projection, ...]
    matched_by: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)


def is_pattern(entry: str) -> bool:
    """Whether ``entry`` is matched against full names instead of last components."""
    return any(mark in entry for mark in ".*?[")


def select_targets(
    projections: Sequence[Projection], entries: Sequence[Entry] | None
) -> tuple[Projection, ...]:
    """Return the projections that ``entries`` take, in model order; None takes all of them.

    Raises:
        TargetError: see the module's docstring.
    """
    return match_targets(projections, entries).targets


def match_targets(projections: Sequence[Projection], entries: Sequence[Entry] | None) -> Selection:
    """As :func:`select_targets`, with the entry and the manifest rank of each target.

    Raises:
        TargetError: see the module's docstring; also if two entries give one target different ranks.
    """
    if entries is None:
        return Selection(tuple(projections))
    if not entries:
        raise TargetError(
            "lora_target_modules is empty; name at least one target, or leave the key out to adapt every projection"
        )
    _refuse_duplicates(entries)
    matched_by: dict[str, str] = {}
    ranks: dict[str, int] = {}
    for entry in entries:
        pattern = entry if isinstance(entry, str) else entry.pattern
        taken = _match(pattern, projections)
        if not taken:
            raise TargetError(
                f"target {pattern!r} matches nothing{why_nothing(pattern, projections)}"
            )
        if isinstance(entry, TargetEntry):
            _keep_promises(entry, taken, ranks)
        for projection in taken:
            matched_by.setdefault(projection.name, pattern)
    return Selection(
        tuple(item for item in projections if item.name in matched_by), matched_by, ranks
    )


def _refuse_duplicates(entries: Sequence[Entry]) -> None:
    patterns = [entry if isinstance(entry, str) else entry.pattern for entry in entries]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise TargetError(
                f"target {pattern!r} is listed {patterns.count(pattern)} times; keep one"
            )


def _keep_promises(entry: TargetEntry, taken: Sequence[Projection], ranks: dict[str, int]) -> None:
    if entry.count is not None and len(taken) != entry.count:
        raise TargetError(
            f"target {entry.pattern!r} matches {len(taken)} targets, but its count says {entry.count}; correct one of them"
        )
    if entry.rank is None:
        return
    for projection in taken:
        if ranks.setdefault(projection.name, entry.rank) != entry.rank:
            raise TargetError(
                f"target {entry.pattern!r} gives {projection.name} rank {entry.rank}, but an earlier entry gives it rank "
                f"{ranks[projection.name]}; give each target one rank"
            )


def _match(pattern: str, projections: Sequence[Projection]) -> list[Projection]:
    if not is_pattern(pattern):
        return [item for item in projections if item.leaf == pattern]
    matches = re.compile(fnmatch.translate(pattern)).match
    # Without a digit, ? or [ in the pattern an expert's number can only fall under a *, so that one expert answers for all.
    uniform = not re.search(r"[0-9?\[]", pattern)
    taken = []
    for item in projections:
        if matches(item.name):
            taken.append(item)
        elif item.num_experts and (uniform or not _rules_out(pattern, item)):
            names = (item.expert_name(0),) if uniform else item.expert_names()
            hits = sum(matches(name) is not None for name in names)
            if hits == len(names):
                taken.append(item)
            elif hits:
                raise TargetError(_partial(pattern, item, hits))
    return taken


def _rules_out(pattern: str, bank: Projection) -> bool:
    """Whether the literal text of the pattern already differs from every per-expert name of the bank.

    Looks at the text before the first wildcard, after the last one, and at a layer number; only saves time.
    """
    layer = re.search(r"layers\.([0-9]+)\.", pattern)
    if layer and "[" not in pattern and int(layer[1]) != bank.layer:
        return True
    head = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    tail = re.split(r"[*?\]\[]", pattern)[-1]
    stem = bank.name.removesuffix(bank.leaf)  # "….mlp.experts."
    begins = head.startswith(stem) or stem.startswith(head)
    ending = f".{bank.leaf}"
    return not begins or not (tail.endswith(ending) or ending.endswith(tail))


def _partial(pattern: str, bank: Projection, hits: int) -> str:
    return (
        f"target {pattern!r} takes {hits} of the {bank.num_experts} experts of {bank.name}; a bank is adapted "
        f"as a whole, because its experts share the factor on the hidden side; use {bank.name!r} or '*.mlp.experts.*.{bank.leaf}'"
    )
