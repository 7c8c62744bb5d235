"""The states of a live source and its patience: what follows what, how long to wait before the next attempt.

Pure: time and chance come in as arguments. Knows nothing of sockets, threads or decoders.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from saccade.sources.errors import Reason

State = Literal["connecting", "live", "stalled", "reconnecting", "ended"]
"""Not there yet; frames come; silent, about to be tried again; was live, being tried again; closed."""

SILENCE_S = 4.0  # a frozen camera shall be called stalled within 5 s; the rest is for noticing
NO_FRAME_S = 20.0  # packets may come without frames until the next key frame, which some cameras send every 10 s
FIRST_DELAY_S = 0.5
LAST_DELAY_S = 30.0
GOOD_S = 10.0


@dataclass(slots=True, frozen=True)
class LinkStatus:
    """How a live source is doing.

    Attributes:
        state: where it stands.
        reason: why it is not live; None when it is, or when nothing has gone wrong yet.
        connections: how often it has become live.
    """

    state: State
    reason: Reason | None
    connections: int

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


class Link:
    """The state machine of one live source. Times are seconds on one growing clock.

    connecting → live → stalled → reconnecting → live …, and `ended` from anywhere, for good. A source that was never
    live stays `connecting`: a camera that is down at the start is simply not there yet.

    Args:
        chance: gives numbers from 0 to 1, so that many cameras behind one switch do not come back in step.
    """

    __slots__ = ("_attempts", "_chance", "_connections", "_frame_at", "_heard_at", "_live_since", "_reason", "_state")

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._state: State = "connecting"
        self._reason: Reason | None = None
        self._attempts = 0
        self._connections = 0
        self._live_since = self._heard_at = self._frame_at = 0.0

    @property
    def status(self) -> LinkStatus:
        """How it is doing."""
        return LinkStatus(self._state, self._reason, self._connections)

    def attempt(self, now: float) -> None:
        """A connection is about to be tried."""
        if self._state != "ended":
            self._state = "reconnecting" if self._connections else "connecting"
        self._heard_at = self._frame_at = now

    def heard(self, now: float) -> None:
        """Something came from the other side."""
        self._heard_at = max(self._heard_at, now)

    def frame_arrived(self, now: float) -> None:
        """A frame came, good enough to hand on."""
        self._heard_at = self._frame_at = now
        if self._state == "ended":
            return
        if self._state != "live":
            self._state, self._reason, self._live_since = "live", None, now
            self._connections += 1
        elif now - self._live_since >= GOOD_S:
            self._attempts = 0

    def silent(self, now: float) -> bool:
        """Whether the connection has given nothing for too long; a live source is then stalled."""
        if now - self._heard_at < SILENCE_S and now - self._frame_at < NO_FRAME_S:
            return False
        if self._state == "live":
            self._state, self._reason = "stalled", "timeout"
        return True

    def failed(self, reason: Reason) -> float:
        """The connection, or the attempt at one, is over. Returns how long to wait before the next, in seconds.

        0.5 s, doubling to 30 s, a random quarter of it off; from the start again after 10 good seconds. A refused
        password waits 30 s at once, because cameras lock accounts after a few wrong ones.
        """
        if self._state != "ended":
            self._reason = reason
            if self._state == "live":
                self._state = "reconnecting"
        longest = min(LAST_DELAY_S, FIRST_DELAY_S * (1 << min(self._attempts, 16)))
        self._attempts += 1
        if reason == "auth failed":
            longest = LAST_DELAY_S
        return longest * (1 - 0.25 * self._chance())

    def end(self) -> None:
        """Nobody wants it any more."""
        self._state, self._reason = "ended", None
