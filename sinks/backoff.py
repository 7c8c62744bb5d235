"""How long to wait before something that failed is tried again. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_S = 0.5
LAST_S = 30.0


def backoff_s(failures: int, chance: Callable[[], float] = random.random) -> float:
    """Seconds to wait after the nth failure in a row, from 1: 0.5, doubling to 30, less up to a quarter at random."""
    longest = min(LAST_S, FIRST_S * (1 << min(failures - 1, 16)))
    return longest * (1 - 0.25 * chance())
