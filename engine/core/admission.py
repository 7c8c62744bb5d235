"""Which request is run next, and when: streams, what waits in them, their shares. Pure bookkeeping, no torch.

A *stream* is what requests of one camera have in common: a key. Of a stream that keeps the newest, one request waits at
a time: a newer one supersedes it, and nothing has been done for the older. Other streams, and requests without a
key, which are one stream of their own, wait in order of arrival.

Shares are kept by weighted deficit round robin (Shreedhar and Varghese 1996): a request costs one credit for each
of its windows. While no stream that could go on has one, all streams earn in proportion to their weights, those that
have nothing to run at the moment, too, but never more than `most_credit` times their weight: a camera of 5 frames a
second is not behind one of 30 for having no frame at the very moment at which credits are given out. Of the streams
with a credit, requests that are no frames come first, by their deadlines (EDF), then by age. Of frames, which a newer
one would supersede, those of streams with `owed_credit` come first: such a stream asks for less than its share, and a
turn that it misses is lost to it, where the others have another frame soon. Then the newest is next; one older than
`fresh_s` leaves its turn to others until its stream would lose credit by it.

Simulated (`tests.support.engine.simulation`: `saccade bench cameras`, 64 cameras of mixed rates, deadlines of 250 ms,
an H200's step times, 1 ms of the host a step), without and with `owed_credit`:

| | offered | of closed-loop capacity | Jain's index | ages at launch, p50 and p99 |
|---|---|---|---|---|
| bf16 | 2 × | 100 %, 100 % | .964, .999 | 27 and 68 ms, 28 and 69 |
| FP8 | 2 × | 100 %, 100 % | .985, .9997 | 21 and 98 ms, 21 and 72 |
| FP8 | 7 × | 100 %, 100 % | .997, .9999 | 13 and 70 ms, 13 and 55 |

What a stream's requests take, from admission to result, is learned from those before; one whose deadline is nearer than
that ends before anything is done for it. `AdmissionLead` says how long before a prefill ends the next are admitted.
All numbers are in `EngineConfig`.
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
from saccade.engine.tasks.output_state import DraftMemory

_TURN = 1 - 1e-9  # credit for a window, but for what rounding takes


@dataclass(slots=True, frozen=True)
class StreamSettings:
    """How a stream shares the engine with others; may change at any time.

    Attributes:
        weight: its share: with 4 it may run four times as many requests as a stream with 1, while both have them.
        max_fps: most requests begun a second; None for no limit.
        in_flight: most requests that are run at a time, of a stream that keeps the newest.
        newest: while a request waits, a newer one supersedes it; else all of them are run, in order.

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

    def doubt(self, factor: float) -> None:
        """Note that a request ended for it, which is trusted less from then on: one slow answer must not end all."""
        self.mean *= factor
        self.deviation *= factor


@dataclass(slots=True, eq=False)
class Stream(Generic[ImageT]):
    """What requests of one key have in common, and what their stream has earned.

    Attributes:
        settings: its share.
        waiting: its requests, the next one first, until their last window is admitted.
        running: requests begun and not over.
        credit: windows that it may begin, see above.
        next_at: when `max_fps` lets it begin the next request.
        service: what its requests take.
        memory: what its answers leave for drafts of those to come, by what was asked.
    """

    settings: StreamSettings
    waiting: deque[Request[ImageT]] = field(default_factory=deque)
    running: int = 0
    credit: float = 0.0
    next_at: float = -math.inf
    service: ServiceTime = field(default_factory=ServiceTime)
    memory: dict[Hashable, DraftMemory] = field(default_factory=dict)


class Admission(Generic[ImageT]):
    """Requests that wait, by streams. Not thread-safe: one thread schedules.

    Args:
        config: the engine's.
        end: ends a request that a newer one supersedes, or whose deadline cannot be met; it calls `over`.

    Attributes:
        late: requests that ended before they began, as their deadline could not be met.
    """

    def __init__(self, config: EngineConfig, end: Callable[[Request[ImageT], BaseException], None]) -> None:
        self._config, self._end = config, end
        unkeyed: Stream[ImageT] = Stream(StreamSettings(newest=False, in_flight=sys.maxsize))
        self._streams: dict[Hashable, Stream[ImageT]] = {None: unkeyed}
        self._passing: dict[Hashable, None] = {}  # streams that nobody has given settings, in order of arrival
        self._backlog: dict[Stream[ImageT], None] = {}  # streams in which something waits
        self._arrived = self._length = self.late = 0
        # What may be admitted at a moment; kept while one after another is admitted, as each looks at all streams.
        self._ready: tuple[float, list[Request[ImageT]]] | None = None

    def __len__(self) -> int:
        """Windows that wait, as far as they are known."""
        return self._length

    @property
    def kept(self) -> int:
        """Requests that wait, of streams without a rate whose newer ones do not supersede them."""
        streams = (stream for stream in self._backlog if not stream.settings.newest and stream.settings.max_fps is None)
        return sum(len(stream.waiting) for stream in streams)

    @property
    def requests(self) -> list[Request[ImageT]]:
        """Everything that waits."""
        return [request for stream in self._backlog for request in stream.waiting]

    def remembered(self) -> tuple[int, int]:
        """How many streams are known, and prompts whose last answers are kept for drafts. Called in any thread."""
        streams = list(self._streams.values())
        return len(streams), sum(len(stream.memory) for stream in streams)

    def stream(self, key: Hashable) -> Stream[ImageT]:
        """The stream of a key; made with the first request or the first settings."""
        found = self._streams.get(key)
        if found is None:
            if len(self._passing) > self._config.passing_streams:
                for other in list(self._passing)[: self._config.passing_streams // 2]:
                    self._forget_idle(other)
            found = self._streams[key] = Stream(StreamSettings())
            self._passing[key] = None
        return found

    def configure(self, key: Hashable, settings: StreamSettings) -> None:
        """Set how a stream shares, from now on."""
        self.stream(key).settings = settings
        self._passing.pop(key, None)
        self._ready = None

    def forget(self, key: Hashable) -> None:
        """Forget a stream's settings, and what was learned of it; what waits in it is run all the same."""
        stream = self._streams.get(key)
        if key is not None and stream is not None:
            stream.settings, stream.service, stream.memory = StreamSettings(), ServiceTime(), {}
            stream.credit, stream.next_at = 0.0, -math.inf
            self._passing[key] = self._ready = None
            self._forget_idle(key)

    def offer(self, request: Request[ImageT], key: Hashable, now: float = 0.0) -> None:
        """Let a request wait; a frame supersedes the one that waits in its stream."""
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
        """Count the windows of a request that waits, now that they are known."""
        self._length += request.n_waiting - 1

    def next(self, now: float) -> Request[ImageT] | None:
        """The request of which a window is to be admitted next; None if none may be."""
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
        """Take the next window of what `next` gave, once that is planned; its stream pays for it."""
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
        """Note that a request is over; with `learn`, the time that it took tells of the next one's."""
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
        """When a stream may begin a request that it may not begin `now`; infinity if time alone changes nothing."""
        return min((stream.next_at for stream in self._backlog if stream.next_at > now), default=math.inf)

    def _earn(self, ready: list[Request[ImageT]]) -> None:
        """Give credits to all until one of those that could go on has one."""
        streams = (self._streams[one.stream] for one in ready)
        rounds = min((1 - stream.credit) / stream.settings.weight for stream in streams)
        for stream in self._streams.values():
            stream.credit = min(self._most_credit(stream), stream.credit + rounds * stream.settings.weight)

    def _may_wait(self, request: Request[ImageT], now: float) -> bool:
        stream = self._streams[request.stream]
        stale = request.frame and request.arrived < now - self._config.fresh_s
        return stale and stream.credit < self._most_credit(stream)

    def _most_credit(self, stream: Stream[ImageT]) -> float:
        """What a stream may save up: some rounds of what it earns, or a heavy one would lose some of them."""
        return self._config.most_credit * max(1.0, stream.settings.weight)

    def _first(self, stream: Stream[ImageT], now: float) -> Request[ImageT] | None:
        """What could be admitted of a stream; ends what cannot be in time."""
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
    """How long before a prefill ends the next images are admitted, so that they are prepared when it does.

    Admitted when a prefill is done, images are as new as can be. But to prepare 8 takes the interpreter some
    milliseconds, and behind a prefill it is wanted for steps that take the device 1.5 ms each: the device waits for
    them. While a prefill of 30 ms runs there is nothing else to do. So the lead is what nearly all images take, not
    less by the decode steps. Simulated (`tests.support.engine.simulation`), FP8, 3 ms for an image of 640×360 and 30 in
    4K: 92 % of a closed loop's rate without a lead, frames at launch 22 ms old in the median, 78 at the 99th
    percentile; 99.8 % with it, 29 and 72 ms.

    Where next to no decode steps come between two prefills, as answers are drafted, the next prefill is launched before
    the one ahead ends: else the device waits while the host reads one and launches the other.

    Args:
        config: the engine's.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._prefills: dict[int, deque[float]] = {}
        self._prepare, self._launch = ServiceTime(), ServiceTime()
        # Decode steps between two prefills, and since the last one.
        self._between, self._decoded = float(config.decodes_busy), 0

    @property
    def follow(self) -> bool:
        """Whether prefills follow each other, with next to no decode steps between."""
        return self._between < self._config.follow_decodes

    def launched(self, seconds: float) -> None:
        """Learn from how long the host took to launch a prefill."""
        self._launch.measured(seconds)

    def prefilled(self, images: int, seconds: float, *, late: bool = False) -> None:
        """Learn the duration of a prefill. The shortest one counts: too early is better than too late.

        Args:
            images: how many images the prefill took.
            seconds: time from its start until the loop read it.
            late: whether it had ended before the loop waited for it, so that `seconds` is too long.
        """
        if late:
            seconds *= self._config.lead_late
        self._between += (self._decoded - self._between) / 8
        self._decoded = 0
        self._prefills.setdefault(images, deque(maxlen=self._config.lead_prefills)).append(seconds)

    def decoded(self) -> None:
        """Note a decode step."""
        self._decoded += 1

    def prepared(self, seconds: float) -> None:
        """Learn from an image, from its admission on."""
        self._prepare.measured(seconds)

    def admit_at(self, images: int, begun: float) -> float:
        """When, during a prefill, the next images are to be admitted; infinity: behind it.

        Args:
            images: of the prefill.
            begun: when it began, in seconds.
        """
        known, lead = self._prefills.get(images), self._prepare.seconds
        if self.follow:
            lead += self._launch.seconds
        return begun + max(0.0, min(known) - lead) if known and lead > 0 else math.inf

    def launch_at(self, images: int, begun: float) -> float:
        """When the next images are to be launched, likewise, after they are admitted; infinity: behind it."""
        known = self._prefills.get(images)
        if not known or not self.follow:
            return math.inf
        return begun + max(0.0, min(known) - self._launch.seconds)
