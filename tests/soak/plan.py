"""Which rank is killed when: drawn from a seed, so that a kill can be done again by its number.

By the clock: a moment inside a training step or a save, as a fraction of how long the undisturbed run took for it. By the call:
before the n-th file call of a save, which is the same place in every run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Kill", "plan_kills"]

LATE = 1.25  # of the undisturbed duration: some clocks end after the step or save


@dataclass(frozen=True)
class Kill:
    """One kill. ``place``: which step or save of the run, from 0; ``moment``: a fraction of its time or of its file calls."""

    number: int
    phase: str  # training, saving
    by: str  # clock, call
    victim: int | None  # None: all ranks
    place: int
    moment: float
    torchrun: bool = False


def plan_kills(count: int, seed: int, torchrun: int = 0) -> list[Kill]:
    """A third in training, the rest in saving (half of these by the call); the last ``torchrun`` of them under torchrun."""
    kills = []
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        phase = "training" if number % 3 == 0 else "saving"
        by = "call" if number % 6 in (1, 5) else "clock"
        under = number >= count - torchrun
        kills.append(
            Kill(
                number=number,
                phase=phase,
                by="clock" if under else by,
                victim=draw.choice((0, 1)) if by == "call" else draw.choice((0, 1, None)),
                place=draw.randrange(3 if phase == "training" else 2),
                moment=draw.uniform(0, LATE if by == "clock" else 1),
                torchrun=under,
            )
        )
    return kills
