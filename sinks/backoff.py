"""Retry delays after failures (exponential backoff)."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_S = 0.5
LAST_S = 30.0


def backoff_s(failures: int, chance: Callable[[], float] = random.random) -> float:
    """Return the delay in seconds after the nth consecutive failure: 0.5 s, doubling to 30 s, minus up to a quarter."""
    longest = min(LAST_S, FIRST_S * (1 << min(failures - 1, 16)))
    return longest * (1 - 0.25 * chance())
