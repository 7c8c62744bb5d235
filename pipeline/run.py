"""The run loop: one source, through the engine, to any number of sinks, each part in its own thread.

    source ─▶ queue ─▶ engine (a few pictures in flight) ─▶ in order ─▶ one outbox and thread per sink

A run ends when the source does, when it is told to stop, or when any part fails; each time every picture already with
the engine is finished and every sink closed properly. Knows nothing of configuration, terminals or signals.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from engine.results import Result
from engine.tasks import Task
from pipeline.queue import WAIT, BoundedQueue, QueueClosed, QueuePolicy
from sinks import Latency, Sink, SinkClosedError
from sources import Frame, LiveSource, Source

if TYPE_CHECKING:
    from engine import Engine


@dataclass(slots=True, frozen=True)
class Output:
    """A sink, and what becomes of results that come faster than it takes them."""

    sink: Sink
    outbox: QueuePolicy = WAIT


@dataclass(slots=True, frozen=True)
class Report:
    """What a run has done so far.

    Attributes:
        frames: pictures whose result was handed to the sinks.
        objects: boxes and points found on them.
        elapsed_s: seconds from the first picture put to the engine to the last result.
        latency: mean over the frames, in milliseconds.
        drops: pictures lost on the way, by cause: `lost` before they came here whole, `full` or `closed`, after `sink `
            where they had a result already.
        corrupt_packets: pieces of the source that could not be decoded.
    """

    frames: int
    objects: int
    elapsed_s: float
    latency: Latency
    drops: dict[str, int]
    corrupt_packets: int

    @property
    def fps(self) -> float:
        """Pictures a second; 0 before the first."""
        return self.frames / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def model_ms(self) -> float:
        """Mean time the model worked on a picture, in milliseconds."""
        return self.latency.prefill + self.latency.decode_tokens


@dataclass(slots=True, frozen=True)
class _InFlight:
    frame: Frame
    submitted_at: float
    result: Future[Result]


@dataclass(slots=True, frozen=True)
class _Delivery:
    frame: Frame
    result: Result
    latency: Latency


class Run:
    """One run. It owns its source and sinks from here on, and closes them; the engine stays the caller's.

    Args:
        source: where the pictures come from.
        engine: finds things on them.
        tasks: what to find on each.
        outputs: where each picture goes with its result.
        tiles: look at this many parts along each side as well (`Engine.submit`).
        queue: what becomes of pictures that come faster than the engine takes them.
        in_flight: how many pictures the engine is given at a time.
    """

    def __init__(
        self,
        source: Source,
        engine: Engine,
        tasks: Sequence[Task],
        outputs: Sequence[Output],
        *,
        tiles: int = 1,
        queue: QueuePolicy = WAIT,
        in_flight: int = 2,
    ) -> None:
        self._source = source
        self._engine = engine
        self._tasks = tuple(tasks)
        self._tiles = tiles
        self._frames: BoundedQueue[Frame] = BoundedQueue(queue)
        self._pending: BoundedQueue[_InFlight] = BoundedQueue(QueuePolicy(in_flight, "wait"))
        self._outboxes: list[BoundedQueue[_Delivery]] = [BoundedQueue(output.outbox) for output in outputs]
        # Taken before a picture leaves the queue: while the engine is busy, newer pictures may still replace it there.
        self._places = threading.Semaphore(in_flight)
        self._lock = threading.Lock()  # over everything below that the threads change
        self._error: Exception | None = None
        self._lost = 0
        self._count = 0
        self._objects = 0
        self._latency_sums: dict[str, float] = {}
        self._first_submit: float | None = None
        self._last_result = 0.0
        self._threads = [
            _thread("source", self._read),
            _thread("submit", self._submit),
            _thread("collect", self._collect),
        ]
        for output, outbox in zip(outputs, self._outboxes, strict=True):
            self._threads.append(_thread(type(output.sink).__name__, self._write, output.sink, outbox))

    @property
    def expected_frames(self) -> int | None:
        """About how many pictures the source has; None when unknown."""
        return self._source.info.frames

    @property
    def connection(self) -> str | None:
        """How the connection to a live source is doing, in half a line; None for files."""
        source = self._source
        if not isinstance(source, LiveSource):
            return None
        status, info = source.status, source.info
        what = (
            f", {info.codec} {info.width}x{info.height}, decoded by {source.decoder}" if status.state == "live" else ""
        )
        return f"{source.name}: {status}{what}"

    def start(self) -> None:
        """Begin; returns at once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Read no further: drop what waits for the engine, finish what it has, close every sink. Returns at once."""
        self._source.close()
        self._frames.discard()

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the end; True when every thread has ended."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def error(self) -> Exception | None:
        """The first thing that went wrong, if anything did; the run ends by itself then."""
        with self._lock:
            return self._error

    def report(self) -> Report:
        """What was done so far; may be asked at any time from any thread."""
        drops: Counter[str] = Counter(self._frames.drops)
        for outbox in self._outboxes:
            drops.update({f"sink {cause}": count for cause, count in outbox.drops.items()})
        with self._lock:
            if self._lost:
                drops["lost"] = self._lost
            frames = self._count
            means = {stage: total / frames for stage, total in self._latency_sums.items()}
            started = self._last_result if self._first_submit is None else self._first_submit
            return Report(
                frames=frames,
                objects=self._objects,
                elapsed_s=max(0.0, self._last_result - started),
                latency=Latency(**means),
                drops=dict(drops),
                corrupt_packets=self._source.corrupt_packets,
            )

    def _read(self) -> None:
        try:
            for frame in self._source:
                if frame.dropped_before and frame.capture_clock != "file":  # a file's are its damaged packets
                    with self._lock:
                        self._lost += frame.dropped_before
                self._frames.put(frame, frame.dropped_before)
        except QueueClosed:
            pass  # told to stop
        except Exception as error:
            self._note(error)  # and no stop: what was read before is still good
        finally:
            self._frames.close()

    def _submit(self) -> None:
        try:
            while True:
                self._places.acquire()
                taken = self._frames.get()
                frame = replace(taken.item, dropped_before=taken.lost_before)
                now = time.monotonic()
                with self._lock:
                    self._first_submit = self._first_submit or now
                self._pending.put(_InFlight(frame, now, self._engine.submit(frame.image, self._tasks, self._tiles)))
        except QueueClosed:
            pass  # the source is through
        except Exception as error:
            self._fail(error)
        finally:
            self._pending.close()

    def _collect(self) -> None:
        whole = True
        try:
            while True:
                flight = self._pending.get().item
                try:
                    result = flight.result.result()
                except Exception as error:
                    self._fail(error)
                    whole = False  # what comes after the picture that failed is not delivered: no sink shall see a hole
                    continue
                finally:
                    self._places.release()
                if whole:
                    self._deliver(flight, result)
        except QueueClosed:
            pass  # everything submitted is delivered
        finally:
            for outbox in self._outboxes:
                outbox.close()

    def _deliver(self, flight: _InFlight, result: Result) -> None:
        frame = flight.frame
        latency = latency_of(frame, flight.submitted_at, result)
        with self._lock:
            self._count += 1
            self._objects += len(result.detections) + len(result.points)
            for stage, ms in asdict(latency).items():
                self._latency_sums[stage] = self._latency_sums.get(stage, 0.0) + ms
            self._last_result = time.monotonic()
        for outbox in self._outboxes:
            with suppress(QueueClosed):  # a sink that failed ends the run; the others still get what is in flight
                outbox.put(_Delivery(frame, result, latency), frame.dropped_before)

    def _write(self, sink: Sink, outbox: BoundedQueue[_Delivery]) -> None:
        try:
            while True:
                taken = outbox.get()
                frame = replace(taken.item.frame, dropped_before=taken.lost_before)
                sink.write(frame, taken.item.result, taken.item.latency)
        except QueueClosed:
            pass  # nothing more will come
        except SinkClosedError:
            self.stop()  # whoever was watching has gone, and that is no failure
        except Exception as error:
            self._fail(error)
        finally:
            outbox.discard()
            try:
                sink.close()
            except Exception as error:
                self._fail(error)

    def _note(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error

    def _fail(self, error: Exception) -> None:
        self._note(error)
        self.stop()


def latency_of(frame: Frame, submitted_at: float, result: Result) -> Latency:
    """Where the time of a picture went whose result has just come.

    Args:
        frame: the picture.
        submitted_at: `time.monotonic()` when it was put to the engine, in seconds.
        result: what the engine gave back.
    """
    return Latency(
        decode=frame.decode_ms,
        queue=1000 * (submitted_at - frame.decoded_at) + result.timings.queue_ms,
        prefill=result.timings.prefill_ms,
        decode_tokens=result.timings.decode_ms,
        total=1000 * (time.monotonic() - frame.decoded_at) + frame.decode_ms,
    )


def _thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    # A daemon, so that a part stuck in a driver or on a dead disk cannot keep the process from being ended by hand.
    return threading.Thread(target=target, args=args, name=f"saccade {name}", daemon=True)
