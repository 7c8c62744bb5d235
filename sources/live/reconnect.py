"""State machine of the connection to a live source: states, timeouts and retry delays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from saccade.sources.errors import Reason

State = Literal["connecting", "live", "stalled", "reconnecting", "ended"]
"""connecting: no frame yet; live: frames arrive; stalled: no data; reconnecting: being retried; ended: closed."""

SILENCE_S = 4.0  # a frozen camera must count as stalled within 5 s; the rest is polling
NO_PACKETS_S = 20.0  # limit before the first frame while the server still answers
FIRST_FRAME_S = 75.0  # packets may arrive without frames until the next keyframe; some cameras send one a minute
NO_FRAME_S = 20.0  # the same limit after the first frame; reconnecting brings most cameras to send a keyframe sooner
FIRST_DELAY_S = 0.5
NETWORK_DELAY_S = 4.0  # a camera that returns is live within 5 s; an attempt costs one packet
LAST_DELAY_S = 30.0  # for errors that only a person can fix
REFUSED_DELAY_S = 2700.0  # cameras lock accounts for 30 minutes after a few wrong passwords
STABLE_S = 1.0
_FORGET_S = 30.0  # half-life of the longest interval, since some cameras slow down while nothing moves


@dataclass(slots=True, frozen=True)
class LinkStatus:
    """The connection status of a live source.

    Attributes:
        state: "connecting", "live", "stalled" (no data), "reconnecting" or "ended".
        reason: category of the failure; None while the source is live or before any failure.
        connections: number of times that the source has become live.
        retry_s: delay before the next attempt in seconds; None during an attempt.
        message: description of the failure in one line, without credentials; None if only `reason` is known.
    """

    state: State
    reason: Reason | None
    connections: int
    retry_s: float | None = None
    message: str | None = None

    @property
    def explanation(self) -> str | None:
        """Reason for the failure, or None if there is no failure. A long delay of the next attempt is included."""
        if not self.reason:
            return None
        later = f", next attempt in {self.retry_s / 60:.0f} min" if self.retry_s and self.retry_s >= 60 else ""
        return f"{self.reason}{later}"

    def __str__(self) -> str:
        return f"{self.state} ({self.explanation})" if self.reason else self.state


class Link:
    """Connection state machine of one live source.

    The states are connecting → live → stalled → reconnecting → live and so on; `ended` is the final state. Times are
    seconds on one monotonic clock.

    Args:
        chance: function that returns random numbers from 0 to 1, for the jitter of the retry delays.
    """

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._state: State = "connecting"
        self._reason: Reason | None = None
        self._message: str | None = None
        self._retry_s: float | None = None
        self._attempts = 0
        self._connections = 0
        self.frames_only = False
        """Whether only frames show that the connection is alive. RTSP also has replies and reports."""
        self._interval_s: float | None = None  # longest recent interval between two frames; None if unknown
        self._attempted_at = self._live_since = self._heard_at = self._media_at = self._frame_at = 0.0

    @property
    def status(self) -> LinkStatus:
        """Current connection status of the live source."""
        return LinkStatus(self._state, self._reason, self._connections, self._retry_s, self._message)

    def attempt(self, now: float) -> None:
        """Update the state at the start of a connection attempt, at time `now` in seconds."""
        if self._state != "ended":
            self._state = "reconnecting" if self._connections else "connecting"
        self._retry_s = None
        self._attempted_at = self._heard_at = self._media_at = self._frame_at = now

    def heard(self, at: float, media_at: float | None = None) -> None:
        """Record that data arrived.

        Args:
            at: arrival time of the newest data, in seconds.
            media_at: arrival time of the newest video data, in seconds; None if it equals `at`.
        """
        self._heard_at = max(self._heard_at, at)
        self._media_at = max(self._media_at, at if media_at is None else media_at)

    def frame_arrived(self, now: float) -> None:
        """Set the state to `live`, because a decoded frame has arrived at time `now` in seconds."""
        if self._state == "ended":
            return
        if self._state != "live":
            self._state, self._reason, self._message, self._live_since = "live", None, None, now
            self._connections += 1
        else:
            passed = now - self._frame_at
            self._interval_s = max(passed, 0.5 ** (passed / _FORGET_S) * (self._interval_s or 0.0))
            if now - self._live_since >= STABLE_S:
                self._attempts = 0
        self._heard_at = self._media_at = self._frame_at = now

    def silent(self, now: float) -> bool:
        """Return whether the connection has timed out. A live source then becomes `stalled`.

        The timeout is four frame intervals, but at least 4 s without packets or 20 s without decoded frames. It is
        longer until the frame interval is known.
        """
        patience = 1 << min(self._attempts, 2)
        if self._state == "live":
            own = NO_PACKETS_S * patience if self._interval_s is None else max(SILENCE_S, 4 * self._interval_s)
            frame_limit = max(NO_FRAME_S, own)
            first_s = NO_PACKETS_S if self.frames_only else SILENCE_S
            quiet = self._interval_s is None and now - self._heard_at >= first_s * patience
        else:
            own = NO_PACKETS_S if self._media_at <= self._attempted_at else FIRST_FRAME_S
            frame_limit = FIRST_FRAME_S
            quiet = now - self._heard_at >= SILENCE_S * patience
        if not quiet and now - self._media_at < own and now - self._frame_at < frame_limit:
            return False
        if self._state == "live":
            self._state, self._reason, self._message = "stalled", "timeout", None
            self._interval_s = None  # the camera may use another interval after it returns
        return True

    def failed(
        self, reason: Reason, message: str | None = None, *, refused: bool = False, now: float | None = None
    ) -> float:
        """Record a failure. Return the delay before the next connection attempt, in seconds.

        The delay starts at 0.5 s and doubles with each failure, up to 4 s for network errors and 30 s for other
        errors. If the server has rejected the password, the delay is over 30 minutes, because cameras lock accounts.
        """
        took = 0.0 if now is None or self._state in ("live", "stalled") else now - self._attempted_at
        if self._state != "ended":
            self._reason, self._message = reason, message
            if self._state == "live":
                self._state = "reconnecting"
        network = reason in ("connection failed", "timeout")
        last = NETWORK_DELAY_S if network else LAST_DELAY_S
        longest = min(last, FIRST_DELAY_S * (1 << min(self._attempts, 16)))
        self._attempts += 1
        if refused:
            longest = REFUSED_DELAY_S
        elif reason == "auth failed":
            longest = LAST_DELAY_S
        if network:
            longest = max(min(longest, FIRST_DELAY_S), longest - took)
        self._retry_s = longest * (1 - 0.25 * self._chance())
        return self._retry_s

    def end(self) -> None:
        """Set the state to `ended`, after the user has closed the source."""
        self._state, self._reason, self._message, self._retry_s = "ended", None, None, None
