"""Turns a decoder's timestamps into ones that are never missing and grow strictly.

Pure integer arithmetic: knows nothing of files or decoders.
"""

from __future__ import annotations

from fractions import Fraction


class Timeline:
    """Places frames on one growing clock and leaves every timestamp alone that is already right.

    - A missing timestamp is interpolated from the last known one at the nominal rate, without accumulating rounding.
    - A timestamp that repeats or falls back a little becomes the last one plus 1.
    - A fall of `jump` units or more is a clock that began again (joined recordings, a wrapped counter): it and all
      that follow are moved on by the same amount, so that intervals stay exact.

    Args:
        step: nominal units from one frame to the next, more than 0.
        jump: how far a timestamp must fall back, in units, to count as a clock that began again.
        first: timestamp of the first frame should it have none.
    """

    __slots__ = ("_anchor", "_jump", "_last", "_missing", "_shift", "_step")

    def __init__(self, step: Fraction, jump: int, first: int = 0) -> None:
        self._step = step
        self._jump = jump
        self._anchor = first  # what missing timestamps are counted from
        self._missing = 0
        self._last: int | None = None
        self._shift = 0

    def place(self, pts: int | None) -> int:
        """Return the timestamp of the next frame, whose own is `pts` units or None."""
        last = self._last
        if pts is None:
            placed = self._anchor + round(self._missing * self._step)
            if last is not None:
                placed = max(placed, last + 1)
            self._missing += 1
        else:
            placed = pts + self._shift
            if last is not None and placed <= last:
                if last - placed >= self._jump:
                    self._shift = last + max(1, round(self._step)) - pts
                    placed = pts + self._shift
                else:
                    placed = last + 1
            self._anchor, self._missing = placed, 1
        self._last = placed
        return placed
