"""The states of a live source, when it counts as silent, and how long to wait before the next attempt (backoff).

Pure: time and chance are passed in. Knows nothing of sockets, threads or decoders.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from saccade.sources.errors import Reason

State = Literal["connecting", "live", "stalled", "reconnecting", "ended"]
"""Not live yet; frames arrive; silent, about to be tried again; was live, being tried again; closed."""

SILENCE_S = 4.0  # a frozen camera shall be called stalled within 5 s; the rest is for noticing
NO_PACKETS_S = 20.0  # before the first frame, while the server answers
FIRST_FRAME_S = 75.0  # packets may arrive without frames until the next key frame, which some cameras send every minute
NO_FRAME_S = 20.0  # the same once frames came; then a new connection brings a key frame sooner on most cameras
FIRST_DELAY_S = 0.5
NETWORK_DELAY_S = 4.0  # a camera that comes back is live within 5 s; an attempt costs one packet
LAST_DELAY_S = 30.0  # for what only a person can mend
REFUSED_DELAY_S = 2700.0  # cameras lock accounts for 30 minutes after a few wrong passwords
STABLE_S = 1.0
_FORGET_S = 30.0  # in which half of a long interval is forgotten: some cameras are slow while nothing moves


@dataclass(slots=True, frozen=True)
class LinkStatus:
    """How a live source is doing.

    Attributes:
        state: where it stands.
        reason: why it is not live; None when it is, or when nothing has gone wrong yet.
        connections: how often it has become live.
        retry_s: how long is waited before the next attempt, in seconds; None while one is under way.
        message: what the failure was exactly, in one line without credentials; None where only `reason` is known.
    """

    state: State
    reason: Reason | None
    connections: int
    retry_s: float | None = None
    message: str | None = None

    @property
    def explanation(self) -> str | None:
        """The reason, and when the next attempt is if that is more than a minute away; None when all is well."""
        if not self.reason:
            return None
        later = f", next attempt in {self.retry_s / 60:.0f} min" if self.retry_s and self.retry_s >= 60 else ""
        return f"{self.reason}{later}"

    def __str__(self) -> str:
        return f"{self.state} ({self.explanation})" if self.reason else self.state


class Link:
    """The state machine of one live source. Times are seconds on one growing clock.

    connecting → live → stalled → reconnecting → live …, and `ended` from anywhere, for good. A source that was never
    live stays `connecting`: a camera that is down at the start is simply not there yet.

    Args:
        chance: gives numbers from 0 to 1, so that many cameras behind one switch do not reconnect in step.
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
        """Whether frames are the only sign of life that the connection has: RTSP also has replies and reports."""
        self._interval_s: float | None = None  # between two frames, the longest of late; None when unknown
        self._attempted_at = self._live_since = self._heard_at = self._media_at = self._frame_at = 0.0

    @property
    def status(self) -> LinkStatus:
        """How it is doing."""
        return LinkStatus(self._state, self._reason, self._connections, self._retry_s, self._message)

    def attempt(self, now: float) -> None:
        """A connection is about to be tried."""
        if self._state != "ended":
            self._state = "reconnecting" if self._connections else "connecting"
        self._retry_s = None
        self._attempted_at = self._heard_at = self._media_at = self._frame_at = now

    def heard(self, at: float, media_at: float | None = None) -> None:
        """Something arrived at `at`, be it a reply or a report; a part of the video at `media_at`, else the same."""
        self._heard_at = max(self._heard_at, at)
        self._media_at = max(self._media_at, at if media_at is None else media_at)

    def frame_arrived(self, now: float) -> None:
        """A frame arrived, good enough to hand on."""
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
        """Whether the connection has given nothing for too long; a live source is then stalled.

        Of a live source: no video for 4 s or four of its own intervals, or no frame for 20 s. While the interval is not
        known: nothing at all for 4 s, or 20 s with `frames_only`. Before the first frame: nothing for 4 s. The limits
        without an interval are doubled with each failed attempt, up to four times as much, so that a camera which sends
        an image a minute is waited for in the end.
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
            self._interval_s = None  # it may be another from now on
        return True

    def failed(
        self, reason: Reason, message: str | None = None, *, refused: bool = False, now: float | None = None
    ) -> float:
        """The connection, or the attempt at one, is over. Returns how long to wait before the next, in seconds.

        0.5 s, doubling up to 4 s for what a network does and to 30 s for the rest, with up to a quarter off at random;
        from the start again once frames flowed for a second. A refused password waits more than 30 minutes, because
        cameras lock accounts after a few wrong ones. What an attempt took that a network let fail, up to `now`, is part
        of the wait: a camera that thaws while its request is lost would else be live after 8.4 s.
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
        """The source is closed."""
        self._state, self._reason, self._message, self._retry_s = "ended", None, None, None
