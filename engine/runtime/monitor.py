"""Thread-safe counters and traces of the engine.

The step loop reports each operation. The streams report when their work ran on the device.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from saccade.engine.core.request import Outcome, Step, StepKind
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.runtime.streams import Stream

_NOTHING = nullcontext()

# ---- the trace

TRACKS = ("host", "compute", "copy")
"""Names of the tracks in a trace, in display order."""
CAPACITY = 200_000  # maximum number of spans (minutes of steps); older ones are dropped

_PROCESS = 1


@dataclass(slots=True, frozen=True)
class Span:
    """A timed operation in a trace: its track, name, start and end in seconds, and arguments."""

    name: str
    track: str
    start: float
    end: float
    args: Mapping[str, object] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration of the traced operation in seconds."""
        return self.end - self.start


@dataclass(slots=True, frozen=True)
class Count:
    """The value of a counter at a point in time, for a trace."""

    name: str
    at: float
    value: float


class Trace:
    """Trace recorder that stores the newest `capacity` spans and counter values. Thread-safe."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.started = time.perf_counter()
        # Appending to a deque is atomic, so no lock is needed.
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._counts: deque[Count] = deque(maxlen=capacity)

    def add(self, span: Span) -> None:
        """Record a span (a timed operation) in the trace."""
        self._spans.append(span)

    def count(self, name: str, value: float) -> None:
        """Record the value of a counter at the current time in the trace."""
        self._counts.append(Count(name, time.perf_counter(), value))

    def spans(self, track: str) -> list[Span]:
        """Return the spans of one track in the trace, ordered by start time."""
        return sorted((span for span in self._spans.copy() if span.track == track), key=lambda span: span.start)

    def counts(self) -> list[Count]:
        """Return the recorded values of all counters, oldest first."""
        return list(self._counts.copy())

    def to_dict(self) -> dict[str, object]:
        """Return the trace in the Chrome Trace Event format: complete events (X), counters (C) and track names (M).

        All times are in microseconds.
        """
        spans = sorted(self._spans.copy(), key=lambda span: (span.start, -span.end))  # enclosing spans come first
        counts = self.counts()
        # Work in flight at the start of the trace has an earlier start time.
        zero = min([self.started, *(span.start for span in spans[:1])])

        def micros(at: float) -> float:
            return round(1e6 * (at - zero), 3)

        tracks = [*TRACKS, *sorted({span.track for span in spans} - {*TRACKS})]
        events: list[dict[str, object]] = [_named("process_name", 0, name="saccade engine")]
        for number, track in enumerate(tracks, start=1):
            events += [
                _named("thread_name", number, name=track),
                _named("thread_sort_index", number, sort_index=number),
            ]
        for span in spans:
            where = {"pid": _PROCESS, "tid": 1 + tracks.index(span.track), "ts": micros(span.start)}
            lasted = round(1e6 * span.seconds, 3)
            events.append({"ph": "X", "name": span.name, **where, "dur": lasted, "args": dict(span.args)})
        for one in counts:
            at = micros(one.at)
            events.append({"ph": "C", "name": one.name, "pid": _PROCESS, "ts": at, "args": {"value": one.value}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON for https://ui.perfetto.dev or chrome://tracing.

        Raises:
            OSError: if the file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict(), separators=(",", ":")), encoding="utf-8")


def _named(what: str, track: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "args": args}


# ---- counters


@dataclass(slots=True, eq=False)
class StepPart:
    """One part of a batch step, such as the forward pass or the sampling.

    Attributes:
        name: name of the part.
        step: number of the step.
        kind: prefill or decode.
        sequences: number of sequences in the batch.
        rests: number of idle periods of the engine before this part. Idle time of the device between two parts with the
            same number is a bubble: the engine had requests.
        drafted: number of draft values.
    """

    name: str
    step: int
    kind: str
    sequences: int
    rests: int
    drafted: int = 0

    @property
    def args(self) -> Mapping[str, object]:
        """Labels of the span in a trace: step number, step kind, number of rows, and number of draft values, if any."""
        drafted = {"drafted": self.drafted} if self.drafted else {}
        return {"step": self.step, "kind": self.kind, "rows": self.sequences, **drafted}


class Track:
    """Measures the busy and idle time of one `Stream` of the device. Calls must follow the order of the stream's work.

    Attributes:
        busy_s: total seconds of work.
        bubble_s: total seconds without work while the engine had requests.
    """

    __slots__ = ("_monitor", "_name", "_rests", "_until", "bubble_s", "busy_s")

    def __init__(self, name: str, monitor: Monitor) -> None:
        self._name, self._monitor = name, monitor
        self.busy_s = self.bubble_s = self._until = 0.0
        self._rests = -1

    def about(self) -> StepPart:
        """Return the part of a batch step (such as the sampling) that the host is launching."""
        return self._monitor.doing

    def ran(self, about: StepPart, start: float, end: float) -> None:
        """Record that a part of a batch step ran from `start` to `end`, in seconds of the host clock."""
        if about.rests == self._rests:
            self.bubble_s += max(0.0, start - self._until)
        self.busy_s += end - start
        self._rests, self._until = about.rests, end
        trace = self._monitor.trace
        if trace is not None:
            name = about.name if self._name == "compute" else self._name
            trace.add(Span(name, self._name, start, end, about.args))


class Monitor:
    """Counters of one step loop. Reading is thread-safe.

    Only the step loop's thread may change counters, unless a method is documented as thread-safe.

    Attributes:
        doing: the step part that is being launched.
        trace: the trace being recorded, or None.
        idle_s: total seconds in which the loop waited for requests.
    """

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.steps = dict.fromkeys(StepKind, 0)
        self.sequences = dict.fromkeys(StepKind, 0)
        self.idle_s = 0.0
        self.doing = StepPart("", 0, "", 0, 0)
        self._requests: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)
        self._lock = threading.RLock()  # reentrant, because garbage collection of a stream may count a request
        self._rests = 0
        self._compute = Track("compute", self)
        self._streams: Mapping[str, Stream] = {}
        self._watching = False

    def attach(self, streams: Mapping[str, Stream]) -> None:
        """Set the streams to measure, keyed by name: 'compute' and 'copy'.

        Timing each launch on a GPU is expensive. The compute stream is therefore timed only after the first call of
        `counters`, and other streams only while a trace is recorded.
        """
        self._streams = streams

    @contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Record a trace while the `with` block runs.

        Raises:
            RuntimeError: if a trace is already being recorded.
        """
        with self._lock:
            if self.trace is not None:
                raise RuntimeError("a trace is already being recorded; end that trace first")
            self.trace = trace = Trace()
            # Restart timing, to synchronize device times with the host clock again.
            for name, stream in self._streams.items():
                stream.watch(self._compute if name == "compute" else Track(name, self))
            self._watching = True
        try:
            yield trace
        finally:
            for name, stream in self._streams.items():
                stream.settle(wait=True)
                if name != "compute":
                    stream.watch(None)
            self.trace = None

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Add the duration of the `with` block to the idle time of the engine (`idle_s`)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.idle_s += time.perf_counter() - start
            self._rests += 1

    def launching(self, step: Step[Any]) -> AbstractContextManager[object]:
        """Return a context manager that measures the launch of a step's forward pass."""
        self.steps[step.kind] += 1
        self.sequences[step.kind] += len(step.groups)
        self.doing = self._part(step.kind, step)
        return self.span("launch", self.doing)

    def finalizing(self, step: Step[Any]) -> AbstractContextManager[object]:
        """Return a context manager that measures the launch of the sampling of a step, and the copy of its samples."""
        self.doing = self._part("sample", step)
        return self.span("finalize", self.doing)

    def committing(self, step: Step[Any]) -> AbstractContextManager[object]:
        """Return a context manager that measures the commit of a step: reading its samples into its sequences."""
        return _NOTHING if self.trace is None else self.span("commit", self._part("commit", step))

    def _part(self, name: str, step: Step[Any]) -> StepPart:
        count = len(step.groups)
        return StepPart(name, step.number, step.kind, count, self._rests, len(step.sequences) - count)

    def waiting(self, step: Step[Any]) -> AbstractContextManager[object]:
        """Return a context manager that measures waiting until a step has run."""
        return _NOTHING if self.trace is None else self.span("wait", self._part("wait", step))

    def span(self, name: str, doing: StepPart | None = None) -> AbstractContextManager[object]:
        """Return a context manager that records its `with` block as a span in the host track of the trace."""
        return _NOTHING if self.trace is None else _host_span(self.trace, name, {} if doing is None else doing.args)

    def sample(self, scheduler: Scheduler[Any], flying: Iterable[Step[Any]]) -> None:
        """Record the numbers of waiting images, free pages, and sequences of the steps `flying` in the trace."""
        if self.trace is not None:
            self.trace.count("sequences in flight", sum(len(step.sequences) for step in flying))
            self.trace.count("images waiting", scheduler.waiting)
            self.trace.count("free pages", scheduler.resources.pool.n_free)

    def ended(self, how: Outcome) -> None:
        """Count a finished request by its outcome. Thread-safe."""
        with self._lock:
            self._requests[how] += 1

    def counters(self, scheduler: Scheduler[Any]) -> dict[str, float]:
        """Return all counters by name. Counters that never decrease have names with the suffix `_total`.

        The first call starts the timing of the compute stream.
        """
        compute = self._streams.get("compute")
        if compute is not None:
            with self._lock:
                if not self._watching:
                    compute.watch(self._compute)
                self._watching = True
            compute.settle()
        decode, track = self.steps[StepKind.DECODE], self._compute
        counts: dict[str, float] = {}
        for kind in StepKind:
            counts[f"steps_{kind}_total"] = self.steps[kind]
            counts[f"sequences_{kind}_total"] = self.sequences[kind]
        for how, count in self._requests.items():
            counts[f"requests_{how}_total"] = count
        counts["zombies_total"] = scheduler.zombies
        counts["images_waiting"] = scheduler.waiting
        counts["sequences_decoding"] = scheduler.decoding
        resources, admission = scheduler.resources, scheduler.admission
        counts["draft_values_total"] = scheduler.speculation.drafted
        counts["draft_values_accepted_total"] = scheduler.speculation.accepted
        counts["draft_steps_saved_total"] = scheduler.speculation.saved
        counts["requests_late_total"] = admission.late
        counts["batch_slots_used"] = resources.batch_slots_used
        counts["pages_used"] = resources.pages_total - resources.pool.n_free
        counts["pages_capacity"] = resources.pages_total
        counts["streams_known"], counts["drafts_kept"] = admission.remembered()
        counts["mean_batch_size"] = self.sequences[StepKind.DECODE] / decode if decode else 0.0
        counts["idle_seconds_total"] = self.idle_s
        counts["busy_seconds_total"] = track.busy_s
        counts["bubble_seconds_total"] = track.bubble_s
        counts["bubble"] = track.bubble_s / (track.busy_s + track.bubble_s) if track.busy_s else 0.0
        return counts


@contextmanager
def _host_span(trace: Trace, name: str, args: Mapping[str, object]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        trace.add(Span(name, "host", start, time.perf_counter(), args))
