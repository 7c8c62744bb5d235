"""Queue policies: how many items a queue can contain, and whether a full queue drops an item or blocks the producer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

WhenFull = Literal["wait", "drop oldest"]

_MAX_SIZE = 1000  # frames: 3 GB of 1280x720


@dataclass(slots=True, frozen=True)
class QueuePolicy:
    """The size of a queue, and what happens when it is full."""

    size: int
    when_full: WhenFull

    @classmethod
    def parse(cls, text: str) -> QueuePolicy:
        """Parse a queue policy: `wait`, `newest` or `keep N`.

        With `wait`, a full queue blocks the producer. With `newest` or `keep N`, the queue contains only the newest
        item or the newest N items.

        Raises:
            ValueError: if the text is not a queue policy.
        """
        words = text.strip().lower()
        if words == "wait":
            return WAIT
        if words == "newest":
            return NEWEST
        if (match := re.fullmatch(r"keep\s+(\d{1,4})", words)) and 1 <= int(match[1]) <= _MAX_SIZE:
            return cls(int(match[1]), "drop oldest")
        raise ValueError(
            f"unknown queue policy '{text}': use 'wait', 'newest' or 'keep N' with N from 1 to {_MAX_SIZE}"
        )


def check_policy(text: str) -> str:
    """Check that a text is a valid queue policy, and return the text.

    Raises:
        ValueError: if the text is not a queue policy.
    """
    QueuePolicy.parse(text)
    return text


# Four frames absorb the jitter of decoding; more would only cost memory (25 MB each at 4K).
WAIT = QueuePolicy(4, "wait")
NEWEST = QueuePolicy(1, "drop oldest")
