"""Admission: chooses the next queued request by stream, share, deadline and age.

A *stream* is the key that the requests of one camera share. A stream with `newest` queues one request; a newer one
supersedes it before any work is done. Other streams queue all requests in order. Requests without a key form one
stream.

Shares use weighted deficit round robin (Shreedhar and Varghese 1996): a request costs one credit per window. If no
runnable stream has a credit, all streams earn credits in proportion to their weights, including idle ones, up to
`most_credit` times their weight. Idle streams earn too, so that a camera of 5 frames/s is not at a disadvantage against
one of 30.

Among streams with a credit, requests other than frames come first, by deadline (EDF), then age. Frames of streams with
`owed_credit` come next, because these streams use less than their share. Then the newest frame is next. A frame older
than `fresh_s` yields its turn unless its stream would lose credit.

Simulated (`tests.support.engine.simulation`: `saccade bench cameras`, 64 cameras of mixed rates, deadlines of 250 ms,
step times of an H200, 1 ms of host time per step), without and with `owed_credit`:

| | offered | of closed-loop capacity | Jain's index | ages at launch, p50 and p99 |
|---|---|---|---|---|
| bf16 | 2 × | 100 %, 100 % | .964, .999 | 27 and 68 ms, 28 and 69 |
| FP8 | 2 × | 100 %, 100 % | .985, .9997 | 21 and 98 ms, 21 and 72 |
| FP8 | 7 × | 100 %, 100 % | .997, .9999 | 13 and 70 ms, 13 and 55 |

The service time of a stream's requests, from admission to result, is estimated from earlier requests. A request with a
nearer deadline ends at once. `AdmissionLead` computes how long before the end of a prefill the next images are
admitted. All parameters are in `EngineConfig`.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic

from saccade.engine.config import EngineConfig
from saccade.engine.core.request import ImageT, PrefillWindow, Request, State
from saccade.engine.errors import DeadlineError, SupersededError
from saccade.engine.tasks.task import DraftMemory

_TURN = 1 - 1e-9  # credit per window minus rounding errors


@dataclass(slots=True, frozen=True)
class StreamSettings:
    """Share of a stream in the engine; may change at any time.

    Attributes:
        weight: relative share; weight 4 allows four times as many requests as weight 1 while both have requests.
        max_fps: maximum number of requests started per second, or None for no limit.
        in_flight: maximum number of concurrent requests of a stream with `newest`.
        newest: a newer request supersedes the queued one; otherwise all requests run in order.

    Raises:
        ValueError: if a value is out of its range.
    """

    weight: float = 1.0
    max_fps: float | None = None
    in_flight: int = 2
    newest: bool = True

    def __post_init__(self) -> None:
        if not _is_number(self.weight) or not 0.001 <= self.weight <= 1000:
            raise ValueError(f"weight must be a number from 0.001 to 1000; got {self.weight!r}")
        if self.max_fps is not None and (not _is_number(self.max_fps) or not 0 < self.max_fps < math.inf):
            raise ValueError(f"max_fps must be a number above 0, or None; got {self.max_fps!r}")
        if not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise ValueError(f"in_flight must be an integer of at least 1; got {self.in_flight!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(slots=True, eq=False)
class ServiceTime:
    """Estimated time from admission to result: smoothed mean and deviation in seconds (Jacobson 1988)."""

    mean: float = 0.0
    deviation: float = 0.0

    @property
    def seconds(self) -> float:
        """Upper estimate for the next request in seconds; 0 before the first request."""
        return self.mean + 2 * self.deviation

    def measured(self, seconds: float) -> None:
        """Update the estimate with a finished request."""
        if not self.mean:
            self.mean, self.deviation = seconds, seconds / 8
            return
        error = seconds - self.mean
        self.mean += error / 8
        self.deviation += (abs(error) - self.deviation) / 8

    def doubt(self, factor: float) -> None:
        """Lower the estimate after it ended a request, so that one slow answer does not end all later requests."""
        self.mean *= factor
        self.deviation *= factor


@dataclass(slots=True, eq=False)
class Stream(Generic[ImageT]):
    """State of all requests with one stream key.

    Attributes:
        settings: share of the stream.
        waiting: queued requests in order, until their last window is admitted.
        running: number of requests in flight.
        credit: number of windows that the stream may start.
        next_at: time at which `max_fps` allows the next request.
        service: estimated time of its requests.
        memory: earlier answers by prompt, as draft tokens for later requests.
    """

    settings: StreamSettings
    waiting: deque[Request[ImageT]] = field(default_factory=deque)
    running: int = 0
    credit: float = 0.0
    next_at: float = -math.inf
    service: ServiceTime = field(default_factory=ServiceTime)
    memory: dict[Hashable, DraftMemory] = field(default_factory=dict)


class Admission(Generic[ImageT]):
    """Queued requests by stream. Not thread-safe: only the scheduler's thread calls it.

    Args:
        config: engine configuration.
        end: ends a request that is superseded or whose deadline cannot be met; it must call `over`.

    Attributes:
        late: number of requests that ended in the queue because their deadline could not be met.
    """

    def __init__(self, config: EngineConfig, end: Callable[[Request[ImageT], BaseException], None]) -> None:
        self._config, self._end = config, end
        unkeyed: Stream[ImageT] = Stream(StreamSettings(newest=False, in_flight=sys.maxsize))
        self._streams: dict[Hashable, Stream[ImageT]] = {None: unkeyed}
        self._passing: dict[Hashable, None] = {}  # streams without settings, in order of arrival
        self._backlog: dict[Stream[ImageT], None] = {}  # streams with queued requests
        self._arrived = self._length = self.late = 0
        # What may be admitted at a moment; kept while one after another is admitted, as each looks at all streams.
        self._ready: tuple[float, list[Request[ImageT]]] | None = None

    def __len__(self) -> int:
        """Return the number of queued windows that are known."""
        return self._length

    @property
    def kept(self) -> int:
        """Number of queued requests in streams without a rate limit that keep all requests."""
        streams = (stream for stream in self._backlog if not stream.settings.newest and stream.settings.max_fps is None)
        return sum(len(stream.waiting) for stream in streams)

    @property
    def requests(self) -> list[Request[ImageT]]:
        """All queued requests."""
        return [request for stream in self._backlog for request in stream.waiting]

    def remembered(self) -> tuple[int, int]:
        """Return the number of known streams, and of prompts with stored draft tokens. Thread-safe."""
        streams = list(self._streams.values())
        return len(streams), sum(len(stream.memory) for stream in streams)

    def stream(self, key: Hashable) -> Stream[ImageT]:
        """Return the stream of a key, creating it if necessary."""
        found = self._streams.get(key)
        if found is None:
            if len(self._passing) > self._config.passing_streams:
                for other in list(self._passing)[: self._config.passing_streams // 2]:
                    self._forget_idle(other)
            found = self._streams[key] = Stream(StreamSettings())
            self._passing[key] = None
        return found

    def configure(self, key: Hashable, settings: StreamSettings) -> None:
        """Set a stream's share from now on."""
        self.stream(key).settings = settings
        self._passing.pop(key, None)
        self._ready = None

    def forget(self, key: Hashable) -> None:
        """Remove a stream's settings and estimates; its queued requests still run."""
        stream = self._streams.get(key)
        if key is not None and stream is not None:
            stream.settings, stream.service, stream.memory = StreamSettings(), ServiceTime(), {}
            stream.credit, stream.next_at = 0.0, -math.inf
            self._passing[key] = self._ready = None
            self._forget_idle(key)

    def offer(self, request: Request[ImageT], key: Hashable, now: float = 0.0) -> None:
        """Queue a request; a frame supersedes the queued frame of its stream."""
        stream = self.stream(key)
        last = stream.waiting[-1] if stream.waiting else None
        if request.frame and last is not None and last.frame and last.begun_at is None:
            self._end(last, SupersededError())
        self._arrived += 1
        request.stream, request.number, request.arrived = key, self._arrived, now
        stream.waiting.append(request)
        self._length += request.n_waiting
        self._backlog[stream] = self._ready = None

    def planned(self, request: Request[ImageT]) -> None:
        """Count the windows of a queued request after planning."""
        self._length += request.n_waiting - 1

    def next(self, now: float) -> Request[ImageT] | None:
        """Return the request whose window is admitted next, or None."""
        if self._ready is None or self._ready[0] != now:
            firsts = [first for stream in list(self._backlog) if (first := self._first(stream, now)) is not None]
            self._ready = now, firsts
        ready = self._ready[1]
        if len(ready) > 1:
            # It is better to wait for a newer frame, while others have one and the stream loses nothing by it.
            ready = [one for one in ready if not self._may_wait(one, now)] or ready
        able = [one for one in ready if self._streams[one.stream].credit >= _TURN]
        if ready and not able:
            self._earn(ready)
            able = [one for one in ready if self._streams[one.stream].credit >= _TURN]
        return min(able, key=self._rank, default=None)

    def admit(self, request: Request[ImageT], now: float) -> PrefillWindow[ImageT]:
        """Take the next planned window of the request from `next`; its stream pays one credit."""
        stream, window = self._streams[request.stream], request.windows[request.n_admitted]
        request.n_admitted += 1
        self._length -= 1
        stream.credit -= 1
        if request.begun_at is None:
            request.begun_at, request.state = now, State.ADMITTED
            stream.running += 1
            if stream.settings.max_fps is not None:
                interval = 1 / stream.settings.max_fps
                late = min(interval / 2, now - stream.next_at)  # what the next one may make good
                stream.next_at = now + interval - (late if math.isfinite(stream.next_at) else 0)
        if request.n_admitted == len(request.windows):
            ready = self._ready
            self._remove(stream, request)
            if ready is not None and not stream.waiting:  # of other streams nothing has changed
                ready[1].remove(request)
                self._ready = ready
        return window

    def over(self, request: Request[ImageT], now: float, *, learn: bool) -> None:
        """Record that a request ended; with `learn`, its duration updates the stream's estimate."""
        stream = self._streams.get(request.stream)
        if stream is None or not request.number:  # it never came to wait
            return
        if request in stream.waiting:
            self._length -= request.n_waiting
            self._remove(stream, request)
        self._ready = None
        if request.begun_at is not None:
            stream.running -= 1
            if learn:
                stream.service.measured(now - request.begun_at)

    def wake_at(self, now: float) -> float:
        """Return the time at which a rate limit next allows a request, or infinity."""
        return min((stream.next_at for stream in self._backlog if stream.next_at > now), default=math.inf)

    def _earn(self, ready: list[Request[ImageT]]) -> None:
        """Give credits to all streams until a stream with a runnable request has one."""
        streams = (self._streams[one.stream] for one in ready)
        rounds = min((1 - stream.credit) / stream.settings.weight for stream in streams)
        for stream in self._streams.values():
            stream.credit = min(self._most_credit(stream), stream.credit + rounds * stream.settings.weight)

    def _may_wait(self, request: Request[ImageT], now: float) -> bool:
        stream = self._streams[request.stream]
        stale = request.frame and request.arrived < now - self._config.fresh_s
        return stale and stream.credit < self._most_credit(stream)

    def _most_credit(self, stream: Stream[ImageT]) -> float:
        """Return the maximum credit of a stream."""
        return self._config.most_credit * max(1.0, stream.settings.weight)

    def _first(self, stream: Stream[ImageT], now: float) -> Request[ImageT] | None:
        """Return the first admissible request of a stream; requests that cannot meet their deadline end."""
        while stream.waiting:
            first = stream.waiting[0]
            if first.begun_at is not None:
                return first
            if (first.frame and stream.running >= stream.settings.in_flight) or now < stream.next_at:
                return None
            if not first.frame or first.deadline - now >= stream.service.seconds:
                return first
            stream.service.doubt(self._config.service_doubt)
            self.late += 1
            self._end(first, DeadlineError(begun=False, answering_s=stream.service.seconds))
        return None

    def _rank(self, request: Request[ImageT]) -> tuple[bool, bool, float, int]:
        if request.frame:
            return True, self._streams[request.stream].credit < self._config.owed_credit, 0.0, -request.number
        return False, False, request.deadline, request.number

    def _remove(self, stream: Stream[ImageT], request: Request[ImageT]) -> None:
        stream.waiting.remove(request)
        self._ready = None
        if not stream.waiting:
            del self._backlog[stream]

    def _forget_idle(self, key: Hashable) -> None:
        stream = self._streams[key]
        if not stream.waiting and not stream.running:
            del self._streams[key], self._passing[key]


class AdmissionLead:
    """Computes how long before the end of a prefill the next images are admitted and prepared.

    Late admission keeps images new. Preparing 8 images takes several milliseconds of the GIL, though, which delays
    decode steps of 1.5 ms. During a prefill of 30 ms the host is idle. The lead is therefore the time that nearly all
    images need. Simulated with FP8, 3 ms per 640×360 image and 30 ms per 4K image: 99.8 % of the maximum rate with a
    lead and 92 % without.

    If there are almost no decode steps between prefills (drafted answers), the next prefill is launched before the
    current one ends.

    Args:
        config: engine configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._prefills: dict[int, deque[float]] = {}
        self._prepare, self._launch = ServiceTime(), ServiceTime()
        # Decode steps between two prefills, and since the last one.
        self._between, self._decoded = float(config.decodes_busy), 0

    @property
    def follow(self) -> bool:
        """Whether prefills are consecutive, with almost no decode steps between them."""
        return self._between < self._config.follow_decodes

    def launched(self, seconds: float) -> None:
        """Record the host time of a prefill launch in seconds."""
        self._launch.measured(seconds)

    def prefilled(self, images: int, seconds: float, *, late: bool = False) -> None:
        """Record the duration of a prefill; the minimum counts, because admitting too early costs less than too late.

        Args:
            images: number of images in the prefill.
            seconds: time from its start until the loop read it.
            late: whether it ended before the loop waited for it, so that `seconds` is too long.
        """
        if late:
            seconds *= self._config.lead_late
        self._between += (self._decoded - self._between) / 8
        self._decoded = 0
        self._prefills.setdefault(images, deque(maxlen=self._config.lead_prefills)).append(seconds)

    def decoded(self) -> None:
        """Count a decode step."""
        self._decoded += 1

    def prepared(self, seconds: float) -> None:
        """Record the seconds from admission to preparation of an image."""
        self._prepare.measured(seconds)

    def admit_at(self, images: int, begun: float) -> float:
        """Return when to admit the next images during a prefill, or infinity for after it.

        Args:
            images: number of images in the prefill.
            begun: start of the prefill in seconds.
        """
        known, lead = self._prefills.get(images), self._prepare.seconds
        if self.follow:
            lead += self._launch.seconds
        return begun + max(0.0, min(known) - lead) if known and lead > 0 else math.inf

    def launch_at(self, images: int, begun: float) -> float:
        """Return when to launch the next images during a prefill, or infinity for after it."""
        known = self._prefills.get(images)
        if not known or not self.follow:
            return math.inf
        return begun + max(0.0, min(known) - self._launch.seconds)
