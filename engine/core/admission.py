"""Which request is run next: streams, what waits in them, and their shares. Pure bookkeeping, no torch.

A *stream* is what requests of one camera have in common: a key. Of a stream that keeps the newest, one request waits at
a time: a newer one takes its place, and nothing has been done for the older. Other streams, and requests without a
key, which are one stream of their own, wait in order of arrival.

Shares are kept by weighted deficit round robin (Shreedhar and Varghese 1996): a request costs one credit for each part
of its image. While no stream that could go on has one, all streams earn in proportion to their weights, those that
have nothing to run at the moment, too, but never more than `MOST_CREDIT` times their weight: a camera of 5 frames a
second is not behind one of 30 for having no frame at the very moment at which credits are given out. Of the streams
with a credit, requests that nothing replaces come first, by their deadlines (EDF), then by age. Of frames that a newer
one would replace, those of streams with `_OWED` credits come first: such a stream asks for less than its share, and a
turn that it misses is lost to it, where the others have another frame soon. Then the newest is next; one older than
`_FRESH_S` leaves its turn to others until its stream would lose credit by it.

Simulated (`tests.support.engine.simulation`: `saccade bench cameras`, 64 cameras of mixed rates, deadlines of 250 ms,
an H200's step times, 1 ms of the host a step), without and with `_OWED`:

| | offered | of closed-loop capacity | Jain's index | ages at launch, p50 and p99 |
|---|---|---|---|---|
| bf16 | 2 × | 100 %, 100 % | .964, .999 | 27 and 68 ms, 28 and 69 |
| FP8 | 2 × | 100 %, 100 % | .985, .9997 | 21 and 98 ms, 21 and 72 |
| FP8 | 7 × | 100 %, 100 % | .997, .9999 | 13 and 70 ms, 13 and 55 |

What a stream's requests take, from admission to result, is learned from those before; one whose deadline is nearer than
that ends before anything is done for it.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic

from saccade.engine.core.step import ImageRequest, ImageT
from saccade.engine.core.streams import Stream, StreamSettings, Submission, Waiting
from saccade.engine.errors import DeadlineError, SupersededError

_TURN = 1 - 1e-9  # credit for a part, but for what rounding takes
_OWED = 2.0  # one for the next turn, and one that the stream has not used
_FRESH_S = 0.05  # of a prefill of 8 images on an H200: of a camera of 5 frames a second, each has one such chance
_MOST_PASSING = 4096  # streams without settings that are remembered though nothing of them waits or runs


class Admission(Generic[ImageT]):
    """Requests that wait, by streams. Not thread-safe: one thread schedules.

    Args:
        cancel: ends a part of a request that has ended after it was planned: it may hold something already.

    Attributes:
        superseded: requests whose place a newer one took.
        late: requests that ended before they began, as their deadline could not be met.
    """

    def __init__(
        self, cancel: Callable[[ImageRequest[ImageT], BaseException], None] = lambda part, error: None
    ) -> None:
        self._cancel = cancel
        self._streams: dict[Hashable, Stream[ImageT]] = {}
        self._backlog: dict[Stream[ImageT], None] = {}  # streams in which something waits
        self._unkeyed: Stream[ImageT] = Stream(None, StreamSettings(newest=False, in_flight=sys.maxsize))
        self._streams[None] = self._unkeyed
        self._passing: dict[Hashable, None] = {}  # streams that nobody has given settings, in order of arrival
        self._arrived = self._length = 0
        # What may be admitted at a moment; kept while one after another is admitted, as each looks at all streams.
        self._ready: tuple[float, list[Waiting[ImageT]]] | None = None
        self.superseded = self.late = 0

    def __len__(self) -> int:
        return self._length

    @property
    def kept(self) -> int:
        """Requests that wait, of streams without a rate whose newer ones do not replace them."""
        streams = (stream for stream in self._backlog if not stream.settings.newest and stream.settings.max_fps is None)
        return sum(len(stream.waiting) for stream in streams)

    @property
    def requests(self) -> list[Waiting[ImageT]]:
        """Everything that waits."""
        return [waiting for stream in self._backlog for waiting in stream.waiting]

    def stream(self, key: Hashable) -> Stream[ImageT]:
        """The stream of a key; made with the first request or the first settings."""
        found = self._streams.get(key)
        if found is None:
            if len(self._passing) > _MOST_PASSING:
                self._forget_idle()
            found = self._streams[key] = Stream(key, StreamSettings())
            self._passing[key] = None
        return found

    def configure(self, key: Hashable, settings: StreamSettings) -> None:
        """Set how a stream shares, from now on."""
        self.stream(key).configure(settings)
        self._passing.pop(key, None)
        self._ready = None

    def forget(self, key: Hashable) -> None:
        """Forget a stream's settings, and what was learned of it; what waits in it is run all the same."""
        if key is not None:
            self._streams.pop(key, None)
            self._passing.pop(key, None)

    def offer(self, submission: Submission[ImageT], key: Hashable, now: float = 0.0) -> None:
        """Let a request wait; in a stream that keeps the newest, the one that waits there ends."""
        stream = self.stream(key)
        last = stream.waiting[-1] if stream.waiting else None
        if stream.settings.newest and last is not None and last.begun_at is None:
            self.superseded += 1
            self.end(last, SupersededError())
        self._append(stream, Waiting(stream, submission, submission.deadline, self._next_number(), now))

    def add(self, request: ImageRequest[ImageT], key: Hashable = None) -> None:
        """Let a part wait that is ready to run; nothing takes its place."""
        stream = self.stream(key)
        waiting = Waiting(
            stream, None, request.deadline, self._next_number(), parts=deque([request]), left=1, measured=True
        )
        request.waiting = waiting
        self._append(stream, waiting)

    def next(self, now: float) -> Waiting[ImageT] | None:
        """The request that is to be admitted next, with its parts; None if none may be."""
        while (chosen := self._choose(now)) is not None:
            if chosen.parts is not None:
                return chosen
            assert chosen.submission is not None
            try:
                parts = deque(chosen.submission.plan())
            except Exception as error:  # a task's mistake is its own request's
                self.end(chosen, error)
                continue
            if not parts:
                self._remove(chosen)
                continue
            for part in parts:
                part.waiting = chosen
            chosen.parts, chosen.left = parts, len(parts)
            return chosen
        return None

    def admit(self, waiting: Waiting[ImageT], now: float) -> ImageRequest[ImageT]:
        """Take the first part of what `next` gave, which the stream pays for."""
        stream, parts = waiting.stream, waiting.parts
        assert parts
        part = parts.popleft()
        part.live = stream.settings.newest
        stream.credit -= 1
        if waiting.begun_at is None:
            waiting.begun_at = now
            stream.running += 1
            if stream.settings.max_fps is not None:
                interval = 1 / stream.settings.max_fps
                late = min(interval / 2, now - stream.next_at)  # what the next one may make good
                stream.next_at = now + interval - (late if math.isfinite(stream.next_at) else 0)
        if not parts:
            ready = self._ready
            self._remove(waiting)
            if ready is not None and not stream.waiting:  # of other streams nothing has changed
                ready[1].remove(waiting)
                self._ready = ready
        return part

    def over(self, request: ImageRequest[ImageT], now: float, *, learn: bool) -> None:
        """Note that a part is over; with `learn`, the time that the whole request took tells of the next one's."""
        waiting = request.waiting
        if not isinstance(waiting, Waiting):
            return
        request.waiting = self._ready = None
        if waiting.parts and request in waiting.parts:  # it was not admitted
            waiting.parts.remove(request)
            if not waiting.parts:
                self._remove(waiting)
        waiting.left -= 1
        if not waiting.left and waiting.begun_at is not None:
            waiting.stream.running -= 1
            if learn:
                waiting.stream.service.measured(now - waiting.begun_at)

    def end(self, waiting: Waiting[ImageT], error: BaseException) -> None:
        """End a request of which no part has been admitted."""
        self._remove(waiting)
        parts, waiting.parts = waiting.parts or (), None
        for part in parts:
            part.waiting = None
        if waiting.submission is not None:
            waiting.submission.end(error)
        for part in parts:
            self._cancel(part, error)

    def withdraw(self, submission: Submission[ImageT], error: BaseException) -> None:
        """End a request, unless a part of it has been admitted."""
        for waiting in self.requests:
            if waiting.submission is submission and waiting.begun_at is None:
                self.end(waiting, error)
                return

    def expire(self, now: float) -> list[ImageRequest[ImageT]]:
        """End the requests whose deadline has passed; parts of those that have begun, or are ready, are returned."""
        parts: list[ImageRequest[ImageT]] = []
        for waiting in self.requests:
            if waiting.deadline <= now:
                if waiting.submission is None or waiting.begun_at is not None:
                    parts += waiting.parts or ()
                else:
                    self.late += 1
                    self.end(waiting, DeadlineError(begun=False))
        return parts

    def soonest(self) -> float:
        """The earliest deadline of what waits."""
        return min((waiting.deadline for waiting in self.requests), default=math.inf)

    def wake_at(self, now: float) -> float:
        """When a stream may begin a request that it may not begin `now`; infinity if time alone changes nothing."""
        return min((stream.next_at for stream in self._backlog if stream.next_at > now), default=math.inf)

    def _choose(self, now: float) -> Waiting[ImageT] | None:
        if self._ready is None or self._ready[0] != now:
            firsts = [first for stream in list(self._backlog) if (first := self._first(stream, now)) is not None]
            self._ready = now, firsts
        ready = self._ready[1]
        if len(ready) > 1:
            fresh = now - _FRESH_S
            # It is better to wait for a newer frame, while others have one and the stream loses nothing by it.
            ready = [
                one
                for one in ready
                if one.arrived >= fresh or one.stream.credit >= one.stream.most_credit or not one.stream.settings.newest
            ] or ready
        able = [one for one in ready if one.stream.credit >= _TURN]
        if ready and not able:
            self._earn(ready)
            able = [one for one in ready if one.stream.credit >= _TURN]
        return min(able, key=_rank, default=None)

    def _earn(self, ready: list[Waiting[ImageT]]) -> None:
        """Give credits to all until one of those that could go on has one."""
        rounds = min((1 - one.stream.credit) / one.stream.settings.weight for one in ready)
        for stream in {*self._streams.values(), *self._backlog}:  # one that is forgotten may still have a backlog
            stream.credit = min(stream.most_credit, stream.credit + rounds * stream.settings.weight)

    def _first(self, stream: Stream[ImageT], now: float) -> Waiting[ImageT] | None:
        """What could be admitted of a stream; ends what cannot be in time."""
        first, settings = stream.waiting[0], stream.settings
        if first.begun_at is not None:
            return first
        if (settings.newest and stream.running >= settings.in_flight) or now < stream.next_at:
            return None
        if first.submission is not None and first.deadline - now < stream.service.seconds:
            stream.service.doubt()
            self.late += 1
            self.end(first, DeadlineError(begun=False, answering_s=stream.service.seconds))
            return self._first(stream, now) if stream.waiting else None
        return first

    def _append(self, stream: Stream[ImageT], waiting: Waiting[ImageT]) -> None:
        stream.waiting.append(waiting)
        self._length += 1
        self._backlog[stream] = self._ready = None

    def _remove(self, waiting: Waiting[ImageT]) -> None:
        stream = waiting.stream
        stream.waiting.remove(waiting)
        self._length -= 1
        self._ready = None
        if not stream.waiting:
            del self._backlog[stream]

    def _next_number(self) -> int:
        self._arrived += 1
        return self._arrived

    def _forget_idle(self) -> None:
        idle = [key for key in self._passing if not (self._streams[key].waiting or self._streams[key].running)]
        for key in idle[: _MOST_PASSING // 2]:
            self.forget(key)


def _rank(waiting: Waiting[Any]) -> tuple[bool, bool, float, int]:
    stream = waiting.stream
    if stream.settings.newest:
        return True, stream.credit < _OWED, 0.0, -waiting.number
    return False, False, waiting.deadline, waiting.number
