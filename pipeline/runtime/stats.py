"""The thread-safe counters of a run, which are updated for each frame."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from saccade.engine.results import Result
from saccade.sinks import Latency
from saccade.sinks.record import drawn_latency
from saccade.sources import Frame

BUCKETS_MS = (1.0, 2.5, 5.0, 10.0, 20.0, 33.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2500.0, 5000.0)
"""Upper limits of the histogram buckets in milliseconds. One more bucket counts larger values."""

_RECENT = 512  # number of frames for current values
_RECENT_S = 5.0
_CLASSES = 1000  # maximum number of counted classes; prompts, and thus classes, can change without end


@dataclass(slots=True, frozen=True)
class Histogram:
    """A latency histogram: the count of each bucket in `BUCKETS_MS` (not cumulative), and the sum in milliseconds."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_MS) + 1)
    sum_ms: float = 0.0


@dataclass(slots=True, frozen=True)
class Recent:
    """The recent frame rate and latency of a run.

    Attributes:
        fps: results per second over the last 5 s.
        p50_ms, p99_ms: median and 99th percentile of the latency of the last 512 frames, in milliseconds. None before
            the first result. For files, the latency does not include the time in the queue.
        age_ms: time since the camera delivered the frame of the newest result, in milliseconds. None for files, and
            before the first result.
        objects: number of boxes and points in the newest result.
    """

    fps: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    age_ms: float | None = None
    objects: int = 0


@dataclass(slots=True, frozen=True)
class Report:
    """The counters of a run.

    Attributes:
        frames: number of frames with results that were passed to the sinks.
        objects: total number of boxes and points in the results of these frames.
        elapsed_s: seconds from the first submitted frame to the last result.
        latency: mean latency of the frames, in milliseconds.
        drops: number of dropped frames, by cause. `lost`: lost in transit. `full`: replaced by a newer frame while it
            waited for the engine, or dropped from the full frame queue. `closed`: not finished at the end of the run.
            `max_fps`: replaced by a newer frame while the frame rate limit delayed it. `deadline`: missed its deadline.
            `gate`: not admitted by a gate. `failed`: the engine, a gate or a stage failed. `sink full`, `sink closed`:
            dropped from the queue of a sink.
        corrupt_packets: number of packets of the source that could not be decoded.
        read: number of frames read from the source.
        waiting: number of frames that wait for the engine, and number of results in the queue of each sink. The key
            of a sink is its index and name.
        recent: recent frame rate and latency.
        histograms: latency histograms, by field of `Latency`.
        objects_by_class: number of objects by class, for the first 1000 classes.
        looks: number of saccade windows (frame regions that were also processed at full resolution), by reason.
        kept: number of items that the stages store: `tracks`, `minutes` (of counts), `events` (open) and `clips` (not
            written yet). `clip_bytes` is the size of the video buffered for clips, in bytes.
        held_back: number of detections that were suppressed because they resemble a false alarm. An object counts once
            per frame.
        events: number of events that have begun. None if the stream has no rules.
    """

    frames: int
    objects: int
    elapsed_s: float
    latency: Latency
    drops: dict[str, int]
    corrupt_packets: int
    read: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    recent: Recent = field(default_factory=Recent)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    objects_by_class: Mapping[str, int] = field(default_factory=dict)
    looks: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    held_back: int = 0
    events: int | None = None

    @property
    def fps(self) -> float:
        """The mean number of frames per second; 0 before the first frame."""
        return self.frames / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def model_ms(self) -> float:
        """The model's mean inference time per frame, in milliseconds: prefill plus decoding of the answer."""
        return self.latency.prefill + self.latency.decode_tokens


class Stats:
    """The counters of one run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = 0
        self._lost: Counter[str] = Counter()  # by cause
        self._frames = 0
        self._objects = 0
        self._by_class: Counter[str] = Counter()
        self._first_submit: float | None = None
        self._last_result = 0.0
        self._came_at: float | None = None  # arrival time of the frame of the newest result
        self._objects_now = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # time and latency of results
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def note_read(self, lost_before: int) -> None:
        """Count a frame from the source, and the frames dropped before it.

        Args:
            lost_before: number of frames dropped before this frame.
        """
        with self._lock:
            self._read += 1
            self._lost["lost"] += lost_before

    def note_lost(self, cause: str) -> None:
        """Count one dropped frame; see `Report.drops` for the causes."""
        with self._lock:
            self._lost[cause] += 1

    def note_submit(self, now: float) -> None:
        """Store `now` (`time.monotonic()`, in seconds) as the time of the first submission, unless one is stored."""
        with self._lock:
            self._first_submit = self._first_submit or now

    def note_result(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Count a frame with its result, which is about to be passed to the sinks."""
        now = time.monotonic()
        labels = [box.label for box in result.detections.boxes if not box.predicted]
        labels += [spot.label for spot in result.points.points]
        objects = len(labels)
        with self._lock:
            self._frames += 1
            self._objects += objects
            for label in labels:
                if len(self._by_class) < _CLASSES or label in self._by_class:
                    self._by_class[label] += 1
            self._last_result = now
            self._came_at = None if frame.capture_clock == "file" else frame.decoded_at - frame.decode_ms / 1000
            self._objects_now = objects
            self._recent.append((now, drawn_latency(frame, latency)))
            for stage, ms in asdict(latency).items():
                counts = self._counts.setdefault(stage, [0] * (len(BUCKETS_MS) + 1))
                counts[bisect_left(BUCKETS_MS, ms)] += 1
                self._sums[stage] = self._sums.get(stage, 0.0) + ms

    def report(
        self,
        drops: Mapping[str, int],
        corrupt_packets: int,
        waiting: dict[str, int],
        looks: Mapping[str, int] | None = None,
        kept: Mapping[str, int] | None = None,
    ) -> Report:
        """Return all counters of the run. The arguments are the counters of the run's queues, source and stages."""
        every = Counter(drops)
        with self._lock:
            every.update(+self._lost)
            started = self._last_result if self._first_submit is None else self._first_submit
            return Report(
                frames=self._frames,
                objects=self._objects,
                elapsed_s=max(0.0, self._last_result - started),
                latency=Latency(**{stage: total / self._frames for stage, total in self._sums.items()}),
                drops=dict(every),
                corrupt_packets=corrupt_packets,
                read=self._read,
                waiting=waiting,
                recent=self._now(),
                histograms={stage: Histogram(tuple(c), self._sums[stage]) for stage, c in self._counts.items()},
                objects_by_class=dict(self._by_class),
                looks=dict(looks or {}),
                kept=dict(kept or {}),
            )

    def _now(self) -> Recent:
        if not self._recent:
            return Recent()
        now = time.monotonic()
        lately = [at for at, _ in self._recent if at > now - _RECENT_S]
        span = lately[-1] - lately[0] if lately else 0.0
        if span > 0:  # measured up to now, so that the rate of a stopped stream decreases
            span += max(0.0, now - lately[-1] - span / (len(lately) - 1))
        totals = sorted(total for _, total in self._recent)
        return Recent(
            fps=(len(lately) - 1) / span if span > 0 else 0.0,
            p50_ms=totals[len(totals) // 2],
            p99_ms=totals[min(len(totals) - 1, len(totals) * 99 // 100)],
            age_ms=None if self._came_at is None else 1000 * (now - self._came_at),
            objects=self._objects_now,
        )


def latency_of(frame: Frame, submitted_at: float, result: Result, track_ms: float = 0.0) -> Latency:
    """Return the latency of each processing step of a frame.

    Args:
        frame: the frame.
        submitted_at: time of the submission by `time.monotonic()`, in seconds.
        result: result of the engine.
        track_ms: time that the stages took, in milliseconds.
    """
    return Latency(
        decode=frame.decode_ms,
        queue=1000 * (submitted_at - frame.decoded_at) + result.timings.queue_ms,
        prefill=result.timings.prefill_ms,
        decode_tokens=result.timings.decode_ms,
        track=track_ms,
        total=1000 * (time.monotonic() - frame.decoded_at) + frame.decode_ms,
    )
