"""Admission: selects the next queued request by stream, weight, deadline and age, and allocates its resources.

Terms:

- A *stream* is the group of all requests with the same stream key, for example the frames of one camera. All requests
  without a key belong to one default stream.
- A *frame* is a request of a stream with the setting `newest`. Such a stream queues at most one request: a newer frame
  replaces the queued frame, which is then never processed. `StepLoop.submit` does the same for frames that have not
  reached the queue. Streams without `newest` queue all requests in order of arrival.
- A *prefill window* is the image of a request, or one tile of the image, together with its prompts.

Streams share the engine by weighted deficit round robin (Shreedhar and Varghese 1996). Each prefill window costs its
stream one credit. If all streams that could start a request are out of credits, all streams earn credits in proportion
to their weights. A stream can save at most `most_credit` credits times its weight. Idle streams also earn credits.
Without credits for idle streams, a camera at 5 frames/s would get less than its share next to a camera at 30 frames/s.

Requests of streams with a credit are admitted in this order:

1. Requests that are not frames: earliest deadline first (EDF), then oldest first.
2. Frames of streams with at least `owed_credit` credits. These streams have used less than their share.
3. All other frames, newest first.

A frame older than `fresh_s` seconds is skipped if a request of another stream can be admitted. Frames of streams with
the maximum credit are never skipped.

The table shows the effect of rule 2, simulated with `tests.support.engine.simulation` (`saccade bench cameras`).
Conditions: 64 cameras with mixed frame rates, deadlines of 250 ms, step times of an H200, and 1 ms of CPU time per
step. The throughput is 100 % of the capacity in all cases. The latency is the time from the arrival of a frame to the
launch of its prefill.

| dtype | offered load / capacity | rule 2 | Jain's fairness index | latency, p50 | latency, p99 |
|---|---|---|---|---|---|
| bf16 | 2 | no | .964 | 27 ms | 68 ms |
| bf16 | 2 | yes | .999 | 28 ms | 69 ms |
| FP8 | 2 | no | .985 | 21 ms | 98 ms |
| FP8 | 2 | yes | .9997 | 21 ms | 72 ms |
| FP8 | 7 | no | .997 | 13 ms | 70 ms |
| FP8 | 7 | yes | .9999 | 13 ms | 55 ms |

`ServiceTime` estimates the time from admission to result for each stream. If less time than this is left until a
frame's deadline, the frame ends immediately with an error. All parameters are in `EngineConfig`.

An admitted prefill window occupies KV cache pages, batch slots and an adapter slot (`Resources`) until its sequences
end.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Generic

from saccade.engine.config import EngineConfig
from saccade.engine.core.request import NO_SLOT, ImageT, KeptPrefix, PrefillWindow, Request, Sequence, State
from saccade.engine.errors import DeadlineError, EngineError, RequestTooLargeError, SupersededError
from saccade.engine.models.protocol import Adapter
from saccade.engine.tasks.task import DraftMemory

_TURN = 1 - 1e-9  # credit per window minus rounding errors


@dataclass(slots=True, frozen=True)
class StreamSettings:
    """Scheduling weight and limits of a stream in the engine. The settings can be replaced at any time.

    Attributes:
        weight: share relative to other streams. While both streams have queued requests, the engine processes four
            times as many images of a stream of weight 4 as of a stream of weight 1.
        max_fps: maximum number of requests started per second, or None for no limit.
        in_flight: maximum number of concurrent requests. It applies only to streams with `newest`.
        newest: whether a newer request supersedes the queued request. Otherwise all requests run in order.

    Raises:
        ValueError: if a value is out of its range.
    """

    weight: float = 1.0
    max_fps: float | None = None
    in_flight: int = 2
    newest: bool = True

    def __post_init__(self) -> None:
        if not _is_number(self.weight) or not 0.001 <= self.weight <= 1000:
            raise ValueError(f"the stream's weight must be a number from 0.001 to 1000; got {self.weight!r}")
        if self.max_fps is not None and (not _is_number(self.max_fps) or not 0 < self.max_fps < math.inf):
            raise ValueError(f"the stream's max_fps must be a number above 0, or None; got {self.max_fps!r}")
        if not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise ValueError(f"the stream's in_flight must be an integer of at least 1; got {self.in_flight!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(slots=True, eq=False)
class ServiceTime:
    """Estimate of the service time (admission to result): smoothed mean and deviation in seconds (Jacobson 1988)."""

    mean: float = 0.0
    deviation: float = 0.0

    @property
    def seconds(self) -> float:
        """Upper estimate of the service time of a request in seconds, or 0 if no request has finished yet."""
        return self.mean + 2 * self.deviation

    def measured(self, seconds: float) -> None:
        """Update the estimate with the service time of a finished request in seconds."""
        if not self.mean:
            self.mean, self.deviation = seconds, seconds / 8
            return
        error = seconds - self.mean
        self.mean += error / 8
        self.deviation += (abs(error) - self.deviation) / 8

    def doubt(self, factor: float) -> None:
        """Multiply the estimate by `factor` (below 1). Call this method when the estimate caused a rejection."""
        # Rejected requests are not measured, so an estimate that is too high would otherwise never decrease.
        self.mean *= factor
        self.deviation *= factor


@dataclass(slots=True, eq=False)
class Stream(Generic[ImageT]):
    """State of a stream: all requests with the same stream key.

    Attributes:
        settings: scheduling weight and limits of the stream.
        waiting: queued requests in order of arrival. A request stays queued until its last image or tile is admitted.
        running: number of running requests.
        credit: number of images and tiles that the stream may start now.
        next_at: time in seconds from which `max_fps` allows the next request.
        service: estimated time from admission to result.
        memory: earlier answers by prompt, used as drafts of later answers (speculative decoding).
    """

    settings: StreamSettings
    waiting: deque[Request[ImageT]] = field(default_factory=deque)
    running: int = 0
    credit: float = 0.0
    next_at: float = -math.inf
    service: ServiceTime = field(default_factory=ServiceTime)
    memory: dict[Hashable, DraftMemory] = field(default_factory=dict)


class Admission(Generic[ImageT]):
    """Queue of requests, grouped by stream. Not thread-safe: only the scheduler's thread may call it.

    Args:
        config: engine configuration.
        end: callback that ends a request with an error. It must call `over`.

    Attributes:
        late: number of queued requests that ended with an error because they could not meet their deadline.
    """

    def __init__(self, config: EngineConfig, end: Callable[[Request[ImageT], BaseException], None]) -> None:
        self._config, self._end = config, end
        unkeyed: Stream[ImageT] = Stream(StreamSettings(newest=False, in_flight=sys.maxsize))
        self._streams: dict[Hashable, Stream[ImageT]] = {None: unkeyed}
        self._passing: dict[Hashable, None] = {}  # streams without settings, in order of arrival
        self._backlog: dict[Stream[ImageT], None] = {}  # streams with queued requests
        self._arrived = self._length = self.late = 0
        # Cached result of `next`: a time, and the first admissible request of each stream.
        self._ready: tuple[float, list[Request[ImageT]]] | None = None

    def __len__(self) -> int:
        """Return the number of queued images and tiles. A request that is not yet divided counts as one."""
        return self._length

    @property
    def requests(self) -> list[Request[ImageT]]:
        """All queued requests, as a list."""
        return [request for stream in self._backlog for request in stream.waiting]

    def remembered(self) -> tuple[int, int]:
        """Return the number of streams, and the number of prompts with a stored answer (a draft). Thread-safe."""
        streams = list(self._streams.values())
        return len(streams), sum(len(stream.memory) for stream in streams)

    def stream(self, key: Hashable) -> Stream[ImageT]:
        """Return the stream with the key `key`. Create the stream if it does not exist."""
        found = self._streams.get(key)
        if found is None:
            if len(self._passing) > self._config.passing_streams:
                for other in list(self._passing)[: self._config.passing_streams // 2]:
                    self._forget_idle(other)
            found = self._streams[key] = Stream(StreamSettings())
            self._passing[key] = None
        return found

    def configure(self, key: Hashable, settings: StreamSettings) -> None:
        """Set the scheduling weight and limits of a stream for all later admissions."""
        self.stream(key).settings = settings
        self._passing.pop(key, None)
        self._ready = None

    def forget(self, key: Hashable) -> None:
        """Delete the settings, service time estimate and draft answers of a stream. Its queued requests still run."""
        stream = self._streams.get(key)
        if key is not None and stream is not None:
            stream.settings, stream.service, stream.memory = StreamSettings(), ServiceTime(), {}
            stream.credit, stream.next_at = 0.0, -math.inf
            self._passing[key] = self._ready = None
            self._forget_idle(key)

    def offer(self, request: Request[ImageT], key: Hashable, now: float = 0.0) -> None:
        """Queue a request of the stream `key`. A new frame replaces the queued frame of its stream."""
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
        """Count the images and tiles of a divided request in the queue length. Call once per request."""
        self._length += request.n_waiting - 1

    def next(self, now: float) -> Request[ImageT] | None:
        """Return the request to admit next, or None. The request stays in the queue; `admit` removes it."""
        if self._ready is None or self._ready[0] != now:
            firsts = [first for stream in list(self._backlog) if (first := self._first(stream, now)) is not None]
            self._ready = now, firsts
        ready = self._ready[1]
        if len(ready) > 1:
            # Skip old frames if others are ready: a newer frame will replace them, and their stream keeps its credit.
            ready = [one for one in ready if not self._may_wait(one, now)] or ready
        able = [one for one in ready if self._streams[one.stream].credit >= _TURN]
        if ready and not able:
            self._earn(ready)
            able = [one for one in ready if self._streams[one.stream].credit >= _TURN]
        return min(able, key=self._rank, default=None)

    def admit(self, request: Request[ImageT], now: float) -> PrefillWindow[ImageT]:
        """Admit the next image or tile of a request, which costs its stream one scheduling credit."""
        stream, window = self._streams[request.stream], request.windows[request.n_admitted]
        request.n_admitted += 1
        self._length -= 1
        stream.credit -= 1
        if request.begun_at is None:
            request.begun_at, request.state = now, State.ADMITTED
            stream.running += 1
            if stream.settings.max_fps is not None:
                interval = 1 / stream.settings.max_fps
                late = min(interval / 2, now - stream.next_at)  # the next interval is shorter by this delay
                stream.next_at = now + interval - (late if math.isfinite(stream.next_at) else 0)
        if request.n_admitted == len(request.windows):
            ready = self._ready
            self._remove(stream, request)
            if ready is not None and not stream.waiting:  # the other streams did not change
                ready[1].remove(request)
                self._ready = ready
        return window

    def over(self, request: Request[ImageT], now: float, *, learn: bool) -> None:
        """Record the end of a request. If `learn` is True, update the stream's estimated service time."""
        stream = self._streams.get(request.stream)
        if stream is None or not request.number:  # it was never queued
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
        """Return the time in seconds at which the next stream delayed by `max_fps` may start a request, or infinity."""
        return min((stream.next_at for stream in self._backlog if stream.next_at > now), default=math.inf)

    def _earn(self, ready: list[Request[ImageT]]) -> None:
        """Add scheduling credits to every stream, by weight, until one of the `ready` requests can be admitted."""
        streams = (self._streams[one.stream] for one in ready)
        rounds = min((1 - stream.credit) / stream.settings.weight for stream in streams)
        for stream in self._streams.values():
            stream.credit = min(self._most_credit(stream), stream.credit + rounds * stream.settings.weight)

    def _may_wait(self, request: Request[ImageT], now: float) -> bool:
        stream = self._streams[request.stream]
        stale = request.frame and request.arrived < now - self._config.fresh_s
        return stale and stream.credit < self._most_credit(stream)

    def _most_credit(self, stream: Stream[ImageT]) -> float:
        return self._config.most_credit * max(1.0, stream.settings.weight)

    def _first(self, stream: Stream[ImageT], now: float) -> Request[ImageT] | None:
        """Return the next request of a stream if it can be admitted now, otherwise None.

        Frames that cannot meet their deadline are rejected with an error.
        """
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
    """Computes the lead time: how long before the end of a prefill the images of the next prefill are admitted.

    Admitted images are cropped. With a short lead time, the frames are newer. With a long lead time, all images are
    cropped when the prefill ends. The lead time is an upper estimate of the cropping time: mean plus twice the mean
    deviation.

    Args:
        config: engine configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._prefills: dict[int, deque[float]] = {}
        self._prepare = ServiceTime()

    def prefilled(self, images: int, seconds: float, *, late: bool = False) -> None:
        """Record the duration of a prefill.

        Args:
            images: number of images in the prefill.
            seconds: time from the start of the prefill until the step loop read its results.
            late: whether the prefill ended before the step loop waited for it. `seconds` is then multiplied by
                `lead_late`.
        """
        if late:
            seconds *= self._config.lead_late
        self._prefills.setdefault(images, deque(maxlen=self._config.lead_prefills)).append(seconds)

    def prepared(self, seconds: float) -> None:
        """Record the time in seconds from the admission of an image until it was cropped."""
        self._prepare.measured(seconds)

    def admit_at(self, images: int, begun: float) -> float:
        """Return the time at which to admit the next images during a prefill.

        Args:
            images: number of images in the running prefill.
            begun: start time of the running prefill in seconds.

        Returns:
            A time in seconds, or infinity to admit only after the prefill.
        """
        # The shortest duration counts, because admitting too early costs less than admitting too late.
        known, lead = self._prefills.get(images), self._prepare.seconds
        return begun + max(0.0, min(known) - lead) if known and lead > 0 else math.inf


# ---- pages and slots


class PagePool:
    """Pool of reference-counted KV cache pages. All prompts on one image share the pages of that image.

    Not thread-safe: only the scheduler's thread may call it.
    """

    __slots__ = ("_free", "_holders", "n_pages")

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._holders = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def n_free(self) -> int:
        """Number of free KV cache pages."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate `count` free pages with one reference each.

        Raises:
            ValueError: if too few pages are free. In this case nothing is allocated.
        """
        if count > len(self._free):
            raise ValueError(f"cannot allocate {count} KV cache pages; only {len(self._free)} are free")
        left, holders = len(self._free) - count, self._holders
        pages = tuple(reversed(self._free[left:]))
        del self._free[left:]
        for page in pages:
            holders[page] = 1
        return pages

    def share(self, pages: Many[int]) -> None:
        """Add a reference to each of the given pages, which must be allocated.

        Raises:
            ValueError: if a page is free.
        """
        if any(not self._holders[page] for page in pages):
            raise ValueError("a KV cache page cannot be shared before it is allocated")
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Many[int]) -> None:
        """Remove a reference from each page. A page without references becomes free.

        Raises:
            ValueError: if a page is already free.
        """
        holders, free = self._holders, self._free
        for page in pages:
            left = holders[page] - 1
            if left < 0:
                raise ValueError(f"KV cache page {page} is already free")
            holders[page] = left
            if not left:
                free.append(page)


class AdapterSlots:
    """Reference-counted device slots for LoRA adapters. Not thread-safe.

    An adapter without references stays in its slot until another adapter needs the slot. Slots are assigned only at
    admission, so an adapter is never replaced while a step uses it.
    """

    __slots__ = ("_holders", "_resident")

    def __init__(self, n_slots: int) -> None:
        self._holders = dict.fromkeys(range(1, n_slots + 1), 0)  # least recently released first
        self._resident: dict[int, weakref.ref[Adapter]] = {}

    @property
    def n_free(self) -> int:
        """Number of adapter slots without references."""
        return sum(not count for count in self._holders.values())

    def find(self, adapter: Adapter | None) -> int | None:
        """Return the slot of the adapter. If it has none, return a free slot, or None if no slot is free."""
        if adapter is None:
            return NO_SLOT
        at = next((slot for slot, one in self._resident.items() if one() is adapter), None)
        return at or next((slot for slot, count in self._holders.items() if not count), None)

    def acquire(self, slot: int, adapter: Adapter | None) -> None:
        """Add a reference to an adapter slot. A free slot is first assigned to the adapter.

        Raises:
            ValueError: if the slot is in use by another adapter.
        """
        if adapter is None:
            return
        if self._holders[slot] and (held := self._resident[slot]()) is not adapter:
            raise ValueError(f"adapter slot {slot} is in use by adapter '{held.name if held else 'unknown'}'")
        self._resident[slot] = weakref.ref(adapter)
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Remove a reference from an adapter slot.

        Raises:
            ValueError: if the slot has no references.
        """
        if slot == NO_SLOT:
            return
        if not self._holders[slot]:
            raise ValueError(f"adapter slot {slot} is already free")
        self._holders[slot] = self._holders.pop(slot) - 1


class Resources:
    """Allocates KV cache pages, batch slots and adapter slots for the images of requests and their answers.

    Args:
        config: page size, number of batch slots and number of adapter slots.
        pool: pool of free KV cache pages.
        prefix_length: number of tokens of an image prefix (BOS and image tokens).
    """

    def __init__(self, config: EngineConfig, pool: PagePool, prefix_length: int) -> None:
        self.pool, self._page_size, self._prefix_length = pool, config.page_size, prefix_length
        self._prefix_pages = -(-prefix_length // config.page_size)
        self.n_batch_slots = config.max_sequences
        self._batch_slots = list(range(self.n_batch_slots - 1, -1, -1))
        self.pages_total = pool.n_free
        self._kept_pages = 0  # pages of cached prefixes, including reserved ones
        self.n_adapters, self._adapters = config.adapter_slots, AdapterSlots(config.adapter_slots)

    @property
    def batch_slots_used(self) -> int:
        """Number of batch slots in use, including those of finished sequences in running steps."""
        return self.n_batch_slots - len(self._batch_slots)

    @property
    def all_free(self) -> bool:
        """Whether all KV cache pages, batch slots and adapter slots are free."""
        pages, slots = self.pool.n_free == self.pages_total, len(self._batch_slots) == self.n_batch_slots
        return pages and slots and self._adapters.n_free == self.n_adapters

    def measure(self, window: PrefillWindow[Any]) -> None:
        """Compute the number of KV cache pages that a prefill window (image or tile with its prompts) needs.

        The pages of an encoded image (`Engine.encode`) are also reserved. `drop` cancels the reservation.

        Raises:
            RequestTooLargeError: if the window needs more resources than the engine has in total.
            EngineError: if the pages of the encoded image are already released.
        """
        request = window.request
        for sequence in window.sequences:
            self._share(sequence)
            sequence.n_pages = self._private_pages(sequence)
        pages, left = self._pages_of(window), self.pages_total - self._kept_pages
        if request.reads is not None and not request.reads.pages:
            raise EngineError("this encoded image is closed; encode the image again")
        if pages > left or len(window.sequences) > self.n_batch_slots:
            raise RequestTooLargeError(
                f"the prompts on one image do not fit: they need {pages} KV cache pages ({left} available) and "
                f"{len(window.sequences)} batch slots ({self.n_batch_slots} available); send fewer or shorter prompts"
            )
        if request.keeps is not None and self._kept_pages + self._prefix_pages > self.pages_total // 2:
            raise RequestTooLargeError("encoded images already use half of the KV cache; close some of them")
        if request.adapter is not None and not self.n_adapters:
            raise RequestTooLargeError("the engine has no adapter slots; load it with adapter_slots=1 or more")
        if request.reads is not None:
            self.pool.share(request.reads.pages)
            window.pages = request.reads.pages
        if request.keeps is not None:
            self._kept_pages += self._prefix_pages
        window.state = State.PLANNED

    def drop(self, window: PrefillWindow[Any]) -> None:
        """Release the page references and reservations of a prefill window that was never admitted."""
        self.pool.release(window.pages)
        window.pages = ()
        if window.request.keeps is not None:
            self._kept_pages -= self._prefix_pages

    def allocate(self, window: PrefillWindow[Any]) -> bool:
        """Allocate all resources for an image or tile, its prompts and their longest possible answers.

        Returns:
            False if too few resources are free. In this case nothing is allocated.
        """
        request = window.request
        slot = self._adapters.find(request.adapter)
        short = self._pages_of(window) > self.pool.n_free or len(window.sequences) > len(self._batch_slots)
        if short or slot is None:
            return False
        window.state = State.ADMITTED
        if not window.sequences and request.keeps is None:
            return True
        window.adapter_slot = slot
        if window.encodes:
            window.pages = self.pool.allocate(self._prefix_pages)
        if request.keeps is not None:
            self._adapters.acquire(slot, request.adapter)
        for number, sequence in enumerate(window.sequences):
            if number:
                self.pool.share(window.pages)
            self._adapters.acquire(slot, request.adapter)
            sequence.batch_slot = self._batch_slots.pop()
            shared = sequence.trunk.pages[: sequence.n_shared] if sequence.trunk is not None else ()
            self.pool.share(shared)
            sequence.pages = (*shared, *self.pool.allocate(sequence.n_pages))
            sequence.position = self._prefix_length if request.has_prefix else 0
            sequence.position += sequence.n_shared * self._page_size
        return True

    def keep(self, window: PrefillWindow[Any], kept: KeptPrefix) -> None:
        """Store the KV cache pages of an encoded image in `kept`, for later requests (`Engine.encode`)."""
        self._adapters.release(window.adapter_slot)
        kept.pages = window.pages

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Free the KV cache pages of an encoded image when no request uses them. Repeated calls have no effect."""
        self.pool.release(kept.pages)
        self._kept_pages -= len(kept.pages)
        kept.pages = ()

    def release(self, sequence: Sequence[Any]) -> None:
        """Free the resources of a sequence if it is finished and no running step contains it."""
        if sequence.finalized and not sequence.inflight_refs and sequence.batch_slot >= 0:
            self.pool.release(sequence.window.pages)
            self.pool.release(sequence.pages)
            self._adapters.release(sequence.window.adapter_slot)
            self._batch_slots.append(sequence.batch_slot)
            sequence.batch_slot, sequence.pages = -1, ()

    def _share(self, sequence: Sequence[Any]) -> None:
        """Let a branch (a sequence that continues a prompt) use the completely filled KV cache pages of the prompt.

        The tokens on these pages are removed from the prompt of the branch.
        """
        # Without an image, the prompt does not start at a page boundary.
        if sequence.trunk is None or not sequence.window.request.has_prefix:
            return
        sequence.n_shared = len(sequence.trunk.prompt) // self._page_size
        cut = sequence.n_shared * self._page_size
        sequence.prompt = sequence.prompt[cut:]
        sequence.values = {at - cut: value for at, value in sequence.values.items() if at >= cut}

    def _private_pages(self, sequence: Sequence[Any]) -> int:
        length = len(sequence.prompt) + sequence.output.positions
        if not sequence.window.request.has_prefix and length > self._prefix_length:
            # The prompt skips the unused rest of the prefix pages.
            length += self._prefix_pages * self._page_size - self._prefix_length
        return -(-length // self._page_size)

    def _pages_of(self, window: PrefillWindow[Any]) -> int:
        prefix = self._prefix_pages if window.encodes else 0
        return prefix + sum(sequence.n_pages for sequence in window.sequences)
