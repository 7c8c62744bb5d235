"""One object as a model says it, before it becomes a result. Pure values, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Found:
    """Score, centre and size; places are fractions of what was looked at, not clipped; size 0 for points."""

    score: float
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
