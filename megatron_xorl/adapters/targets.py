"""From a list of target entries to projections.

The one idea: every entry says exactly what it says, and an entry with promises (``count``, ``rank``: a manifest) keeps them.
Entries may take the same target, as long as they do not give it two ranks and do not both count it: the counts of a manifest add
up to what is adapted. What one entry matches is in ``matching.py``.

Refused: an entry that matches nothing (with the nearest real names), one that takes some experts of a bank, a duplicate, an
empty list, a count that is not met, two ranks for one target, a target that is counted twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_xorl.adapters.matching import matching
from megatron_xorl.adapters.projections import Projection
from megatron_xorl.adapters.suggest import why_nothing
from megatron_xorl.config.adapter import TargetEntry
from megatron_xorl.errors import TargetError

__all__ = ["Selection", "match_targets", "select_targets"]

Entry = str | TargetEntry

# Far above any list that is of use (GLM-5.2 has 850 targets) and any real name (49 letters): each entry meets every name.
MOST_ENTRIES, LONGEST_ENTRY = 1000, 256


@dataclass(frozen=True, slots=True)
class Selection:
    """What the entries took: ``targets`` in model order, and by target name the entry that took it first and its own rank.

    ``counts`` is the number of targets that each entry takes, in the order of the list. All three mappings are empty where
    there is no list and everything is adapted.
    """

    targets: tuple[Projection, ...]
    matched_by: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


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
        TargetError: see the module's docstring.
    """
    if entries is None:
        return Selection(tuple(projections))
    _check_list(entries)
    promises = _Promises()
    matched_by: dict[str, str] = {}
    counts: dict[str, int] = {}
    by_name = {item.name: item for item in projections}
    for entry in entries:
        pattern = _pattern(entry)
        exact = by_name.get(pattern)
        taken = [exact] if exact else matching(pattern, projections)
        if not taken:
            raise TargetError(
                f"target {pattern!r} matches nothing{why_nothing(pattern, projections)}"
            )
        if isinstance(entry, TargetEntry):
            promises.keep(entry, taken)
        counts[pattern] = len(taken)
        for projection in taken:
            matched_by.setdefault(projection.name, pattern)
    targets = tuple(item for item in projections if item.name in matched_by)
    ranks = {name: rank for name, (rank, _) in promises.ranks.items()}
    return Selection(targets, matched_by, ranks, counts)


def _pattern(entry: Entry) -> str:
    return entry if isinstance(entry, str) else entry.pattern


def _check_list(entries: Sequence[Entry]) -> None:
    if not entries:
        raise TargetError(
            "lora_target_modules is empty; name at least one target, or leave the key out to adapt every projection"
        )
    number = Counter(map(_pattern, entries))
    pattern, times = number.most_common(1)[0]
    if times > 1:
        raise TargetError(f"target {pattern!r} is listed {times} times; keep one")
    if len(entries) > MOST_ENTRIES:
        raise TargetError(
            f"lora_target_modules has {len(entries)} entries (the first is {pattern[:60]!r}), expected at most {MOST_ENTRIES}; "
            "use patterns, for example '*.mlp.experts.*'"
        )
    longest = max(number, key=len)
    if len(longest) > LONGEST_ENTRY:
        raise TargetError(
            f"target '{longest[:60]}...' has {len(longest)} letters, expected at most {LONGEST_ENTRY}; "
            "write one list entry for each name or pattern"
        )


class _Promises:
    """Counts and ranks that manifest entries promise, checked entry by entry."""

    def __init__(self) -> None:
        self.ranks: dict[str, tuple[int, str]] = {}
        self.counted: dict[str, str] = {}

    def keep(self, entry: TargetEntry, taken: Sequence[Projection]) -> None:
        """Note what ``entry`` promises for the targets it takes.

        Raises:
            TargetError: its count is not met, or an earlier entry promises otherwise.
        """
        pattern = entry.pattern
        if entry.count is not None:
            if len(taken) != entry.count:
                raise TargetError(_wrong_count(entry, taken))
            for item in taken:
                if (other := self.counted.setdefault(item.name, pattern)) != pattern:
                    raise TargetError(
                        f"targets {other!r} and {pattern!r} both count {item.name}; counts must add up to what is adapted; "
                        "narrow one of the two patterns, or leave out a count"
                    )
        if entry.rank is not None:
            for item in taken:
                rank, other = self.ranks.setdefault(item.name, (entry.rank, pattern))
                if rank != entry.rank:
                    raise TargetError(
                        f"targets {other!r} and {pattern!r} give {item.name} ranks {rank} and {entry.rank}; "
                        "give each target one rank"
                    )


def _wrong_count(entry: TargetEntry, taken: Sequence[Projection]) -> str:
    names = ", ".join(item.name for item in taken[:3])
    return (
        f"target {entry.pattern!r} matches {len(taken)} target{'s' if taken[1:] else ''}, but its count says {entry.count}; "
        f"it takes {names}{', ...' if taken[3:] else ''}; write count: {len(taken)}, or correct the pattern"
    )
