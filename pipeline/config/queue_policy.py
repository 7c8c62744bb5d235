"""How many frames may wait, and what happens to one too many: `wait`, `newest` or `keep N`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

WhenFull = Literal["wait", "drop oldest"]

_MAX_SIZE = 1000  # frames: 3 GB of 1280x720


@dataclass(slots=True, frozen=True)
class QueuePolicy:
    """How many items a queue holds and what happens to one too many."""

    size: int
    when_full: WhenFull

    @classmethod
    def parse(cls, text: str) -> QueuePolicy:
        """Read `wait` (the producer waits), `newest` (only the newest is kept) or `keep N` (the newest N are kept).

        Raises:
            ValueError: if the text is none of these.
        """
        words = text.strip().lower()
        if words == "wait":
            return WAIT
        if words == "newest":
            return NEWEST
        if (match := re.fullmatch(r"keep\s+(\d{1,4})", words)) and 1 <= int(match[1]) <= _MAX_SIZE:
            return cls(int(match[1]), "drop oldest")
        raise ValueError(
            f"'{text}' is not a queue policy: use 'wait', 'newest' or 'keep N' with N from 1 to {_MAX_SIZE}"
        )


# Four frames ride out the jitter of decoding; more would only cost memory (25 MB each at 4K).
WAIT = QueuePolicy(4, "wait")
NEWEST = QueuePolicy(1, "drop oldest")
