"""What one target entry matches.

The one idea: a bare name (``q_a_proj``) matches the last component; an entry with ``.``, ``*``, ``?`` or ``[`` is an fnmatch
pattern over the full name, case-sensitive, ``*`` spans dots. A bank of experts is taken by its own name or by all of its
per-expert names. Refused: an entry that takes some experts of a bank and not all.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from megatron_xorl.adapters.projections import Projection
from megatron_xorl.errors import TargetError

__all__ = ["WHOLE_BANK", "is_pattern", "matching"]

WHOLE_BANK = "a bank is adapted as a whole, because its experts share the factor on the hidden side"


def is_pattern(entry: str) -> bool:
    """Whether ``entry`` is matched against full names instead of last components."""
    return any(mark in entry for mark in ".*?[")


def matching(pattern: str, projections: Sequence[Projection]) -> list[Projection]:
    """Return the projections that one entry takes, in the order given; an empty list if there is none.

    Raises:
        TargetError: the entry takes a part of a bank.
    """
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
        f"target {pattern!r} takes {hits} of the {bank.num_experts} experts of {bank.name}; {WHOLE_BANK}; "
        f"use {bank.name!r} or '*.mlp.experts.*.{bank.leaf}'"
    )
