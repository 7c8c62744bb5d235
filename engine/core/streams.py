"""What waits for admission: streams, their settings, the requests that wait in them, and what is learned of them.

Plain values, no torch: who is next says `admission`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol

from saccade.engine.core.step import ImageRequest, ImageT
from saccade.engine.tasks.output_state import DraftMemory

MOST_CREDIT = 3.0
"""With 1, a stream that has no fresh frame at the wrong moment loses its turn; more allows bursts."""
_DOUBT = 0.95  # times the estimate after each request that ended for it: one slow answer must not end all others


@dataclass(slots=True, frozen=True)
class StreamSettings:
    """How a stream shares the engine with others; may change at any time.

    Attributes:
        weight: its share: with 4 it may run four times as many requests as a stream with 1, while both have them.
        max_fps: most requests begun a second; None for no limit.
        in_flight: most requests that are run at a time, of a stream that keeps the newest.
        newest: while a request waits, a newer one takes its place; else all of them are run, in order.

    Raises:
        ValueError: if one of them is out of its range.
    """

    weight: float = 1.0
    max_fps: float | None = None
    in_flight: int = 2
    newest: bool = True

    def __post_init__(self) -> None:
        if not _is_number(self.weight) or not 0.001 <= self.weight <= 1000:
            raise ValueError(f"weight is a number from 0.001 to 1000; got {self.weight!r}")
        if self.max_fps is not None and (not _is_number(self.max_fps) or not 0 < self.max_fps < math.inf):
            raise ValueError(f"max_fps is a number above 0, or None; got {self.max_fps!r}")
        if not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise ValueError(f"in_flight is a whole number of 1 or more; got {self.in_flight!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Submission(Protocol[ImageT]):
    """A request whose image is not cut, and whose prompts are not read, before it is admitted."""

    @property
    def deadline(self) -> float:
        """As in `ImageRequest`."""
        ...

    def plan(self) -> Sequence[ImageRequest[ImageT]]:
        """The parts to run, called once, at admission. What it raises ends the request."""
        ...

    def end(self, error: BaseException) -> None:
        """It is over, before any part was run."""
        ...


@dataclass(slots=True, eq=False)
class ServiceTime:
    """Seconds from admission to result: a smoothed mean and deviation (Jacobson 1988), which together few exceed."""

    mean: float = 0.0
    deviation: float = 0.0

    @property
    def seconds(self) -> float:
        """What the next one takes; 0 before the first."""
        return self.mean + 2 * self.deviation

    def measured(self, seconds: float) -> None:
        """Learn from a request that is over."""
        if not self.mean:
            self.mean, self.deviation = seconds, seconds / 8
            return
        error = seconds - self.mean
        self.mean += error / 8
        self.deviation += (abs(error) - self.deviation) / 8

    def doubt(self) -> None:
        """Note that a request ended for it: it is trusted a little less from then on."""
        self.mean *= _DOUBT
        self.deviation *= _DOUBT


@dataclass(slots=True, eq=False)
class Stream(Generic[ImageT]):
    """A stream, what waits in it, and what it has earned.

    Attributes:
        key: that its requests are submitted with; None for those without.
        settings: its share.
        waiting: its requests, the next one first.
        running: requests begun and not over.
        credit: parts that it may begin, see `admission`.
        most_credit: what it may save of them.
        next_at: when `max_fps` lets it begin the next request.
        service: what its requests take.
        memory: what its answers leave for drafts of those to come, by what was asked.
    """

    key: Hashable
    settings: StreamSettings
    waiting: deque[Waiting[ImageT]] = field(default_factory=deque)
    running: int = 0
    credit: float = 0.0
    most_credit: float = MOST_CREDIT
    next_at: float = -math.inf
    service: ServiceTime = field(default_factory=ServiceTime)
    memory: dict[Hashable, DraftMemory] = field(default_factory=dict)

    def configure(self, settings: StreamSettings) -> None:
        """Set its share. It may save some rounds of what it earns: with less, a heavy one would lose some of them."""
        self.settings, self.most_credit = settings, MOST_CREDIT * max(1.0, settings.weight)


@dataclass(slots=True, eq=False)
class Waiting(Generic[ImageT]):
    """A request that waits in its stream, until its last part is admitted.

    Attributes:
        stream: its stream.
        submission: what it is made from; None if its parts came as they are.
        deadline: as in `ImageRequest`.
        number: in order of arrival.
        arrived: when, in seconds.
        parts: what is to be admitted of it yet; None before it is planned.
        begun_at: when its first part was admitted; None before that.
        left: parts that are not over.
        measured: whether what its parts need is known.
    """

    stream: Stream[ImageT]
    submission: Submission[ImageT] | None
    deadline: float
    number: int
    arrived: float = 0.0
    parts: deque[ImageRequest[ImageT]] | None = None
    begun_at: float | None = None
    left: int = 0
    measured: bool = False
