"""The table of layouts that a session prints at its end: a line each."""

from __future__ import annotations

from tests.layouts.matrix import CHECKS, Verdict
from tests.training.comparison import LIMITS

__all__ = ["line", "lines"]


def lines(verdicts: list[Verdict]) -> list[str]:
    """The limits, a line for each layout, and how many passed."""
    width = max(len(verdict.row) for verdict in verdicts)
    limits = ", ".join(f"{kind} {limit:.0e}" for kind, limit in LIMITS.items())
    bounds = [verdict.bounds for verdict in verdicts if verdict.bounds]
    failed = sum(bool(verdict.failed) for verdict in verdicts)
    heads = [f"{kind:>9s}" for kind in LIMITS]
    heads += ["flips", "  copies", "replicas", "seconds", "  cpu s", "verdict"]
    told = [f"fp32 limits: {limits}; no flip; copies of a factor equal to the bit"]
    told += [f"{'layout':{width}s} {' '.join(heads)}"]
    told += [f"{verdict.row:{width}s} {line(verdict)}" for verdict in verdicts]
    if bounds:
        own = " ".join(f"{bounds[0][kind]:9.1e}" for kind in LIMITS)
        told += [
            f"{'bf16 limits':{width}s} {own}  (one process, bf16 against fp32; four times that for free runs)"
        ]
    return [*told, f"{len(verdicts)} layouts, {len(verdicts) - failed} pass, {failed} fail"]


def line(verdict: Verdict) -> str:
    """Figures and outcome of one layout; ``copies`` are elements that several ranks hold."""
    figures = [f"{verdict.figures.get(kind, float('nan')):9.1e}" for kind in LIMITS]
    equal = "differ" if "replicas" in verdict.failed else "equal"
    checks = ", ".join(check for check in CHECKS if check in verdict.failed)
    return " ".join(
        [
            *figures,
            f"{verdict.flips:5d} {verdict.copies:8d} {equal:>8s}",
            f"{verdict.seconds:7.1f} {verdict.cpu_seconds:7.1f}",
            f"FAIL {checks}" if checks else "pass",
        ]
    )
