"""Adapts a viewer's bit rate to the packet loss that its receiver reports. Time is passed by the caller."""

from __future__ import annotations

HIGH_LOSS, LOW_LOSS = 0.1, 0.02
"""Losses above and below which the bit rate falls and rises, from draft-ietf-rmcat-gcc-02, section 6."""
MOST_HALVINGS = 3
FALL_S = 2.0
"""Seconds between two falls: the loss that is reported first is that of the old bit rate."""
RAISE_S, RAISE_MOST_S = 10.0, 160.0
"""Seconds of low loss before the bit rate rises; doubled each time that a rise brings the loss back."""


class LossControl:
    """Chooses how often the highest bit rate is halved for one viewer.

    Attributes:
        halvings: current choice, from 0 to `MOST_HALVINGS`.
    """

    def __init__(self) -> None:
        self.halvings = 0
        self._raise_s = RAISE_S
        self._changed_at = float("-inf")
        self._raised_at = float("-inf")
        self._low_since: float | None = None

    def report(self, lost: float, now: float) -> int:
        """Process a receiver report and return `halvings`.

        Args:
            lost: share of the packets since the last report that were lost, from 0 to 1.
            now: current time in seconds.
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
