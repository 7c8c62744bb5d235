"""Adapts the bit rate of a viewer's video to the packet loss that the viewer's receiver reports."""

from __future__ import annotations

HIGH_LOSS, LOW_LOSS = 0.1, 0.02
"""Packet loss above which the bit rate falls, and below which it rises, from draft-ietf-rmcat-gcc-02, section 6."""
MOST_HALVINGS = 3
FALL_S = 2.0
"""Minimum time between two decreases of the bit rate, in seconds. The first reports after a decrease still refer to the
old bit rate."""
RAISE_S, RAISE_MOST_S = 10.0, 160.0
"""Seconds of low loss before the bit rate rises: initial and maximum value. The time is doubled each time that an
increase causes loss again."""


class LossControl:
    """Chooses the bit rate of one viewer's video from the reported packet loss.

    Attributes:
        halvings: from 0 to `MOST_HALVINGS`. The bit rate is the maximum bit rate divided by 2 to the power of
            `halvings`.
    """

    def __init__(self) -> None:
        self.halvings = 0
        self._raise_s = RAISE_S
        self._changed_at = float("-inf")
        self._raised_at = float("-inf")
        self._low_since: float | None = None

    def report(self, lost: float, now: float) -> int:
        """Update the bit rate after an RTCP receiver report. Return the new value of `halvings`.

        Args:
            lost: fraction of packets lost since the last report, from 0 to 1.
            now: current time on a monotonic clock, in seconds.
        """
        if lost >= LOW_LOSS:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        if lost > HIGH_LOSS and self.halvings < MOST_HALVINGS and now - self._changed_at >= FALL_S:
            failed = now - self._raised_at < RAISE_S
            self._raise_s = min(2 * self._raise_s, RAISE_MOST_S) if failed else RAISE_S
            self.halvings += 1
            self._changed_at = now
        elif self.halvings and self._low_since is not None and now - self._low_since >= self._raise_s:
            self.halvings -= 1
            self._changed_at = self._raised_at = self._low_since = now
        return self.halvings
