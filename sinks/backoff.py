"""Retry delays after failures (exponential backoff)."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_S = 0.5
LAST_S = 30.0


def backoff_s(failures: int, chance: Callable[[], float] = random.random) -> float:
    """Return the retry delay in seconds after a number of consecutive failures.

    The delay starts at 0.5 s and doubles up to 30 s. A random jitter of up to 25 % is subtracted.
    """
    longest = min(LAST_S, FIRST_S * (1 << min(failures - 1, 16)))
    return longest * (1 - 0.25 * chance())
