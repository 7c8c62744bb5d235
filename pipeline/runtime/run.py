"""The run of one stream: it passes frames from one source through the engine to any number of sinks.

    source ─▶ gates ─▶ engine (a few frames in flight) ─▶ results in order ─▶ stages ─▶ one queue per sink

With the queue policy `newest`, a new frame replaces a frame that the engine has not started. With other policies,
frames wait in a queue, and at most `in_flight` frames are in the engine.

A run ends when its source ends, when it is stopped, or after an error. Frames in flight are then completed, and sinks
are closed. If processing a frame of a file fails, the run ends, because the results must not have gaps. If processing a
frame of a live stream fails, the frame is dropped. Too many consecutive failures end the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from saccade.engine.errors import DeadlineError, EngineClosedError, SupersededError
from saccade.engine.results import Detections, Points, Result, ResultFuture
from saccade.engine.tasks.task import Task, Window
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.motion import MotionGate
from saccade.pipeline.analytics.saccades.stage import SaccadeStage
from saccade.pipeline.analytics.stages import ClosableStage, Gate, KeepingStage, Stage, find_stage
from saccade.pipeline.config import ListedStream, ShareSettings
from saccade.pipeline.config.queue_policy import NEWEST, WAIT, QueuePolicy
from saccade.pipeline.events.stage import EventStage
from saccade.pipeline.events.verdicts import VerdictStage
from saccade.pipeline.runtime.bounded_queue import BoundedQueue, QueueClosed, Taken
from saccade.pipeline.runtime.delivery import Delivery, OutputDelivery
from saccade.pipeline.runtime.engine_stream import EngineStream, InFlight, InFlightQueue, saccades_of
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.shared_threads import SharedTask, SharedThreads
from saccade.pipeline.runtime.stats import Report, Stats, latency_of
from saccade.pipeline.runtime.tasks import tasks_for
from saccade.sinks import SinkStatus
from saccade.sinks.recording import PacketRecorder
from saccade.sources import Frame, Source
from saccade.sources.live.decoder import decode_behind_the_model

if TYPE_CHECKING:
    from saccade.engine import Engine

log = logging.getLogger(__name__)

_MAX_FAILED = 10  # highest number of consecutive failed frames of a live source


@dataclass(slots=True)
class _Collected:
    """Progress of the thread that collects results from the engine.

    Attributes:
        whole: whether results are still delivered. It is False after a cancelled frame or a fatal error.
        failed: number of consecutive frames whose processing failed.
        lost: number of frames dropped since the last delivered frame.
    """

    whole: bool = True
    failed: int = 0
    lost: int = 0


class Run:
    """The run of one stream. It closes its source, its stages, and the sinks that only this run uses.

    Attributes:
        config: configuration of the stream; None if a program created the run without a configuration.
        source: source of the frames.
        tasks: tasks for each frame.
        stages: stages for each result.
        stopped: whether `stop` or an error has ended the run before its source ended.

    Args:
        source: source of the frames.
        engine: the engine. The caller closes it.
        tasks: tasks for each frame.
        outputs: sinks for the frames and results.
        tiles: with n > 1, the model also processes n × n tiles of each frame (`Engine.submit`).
        queue: policy of the frame queue. None means `newest` for a live source and `wait` for a file.
        in_flight: maximum number of frames in flight.
        share: scheduling settings of a live stream.
        stages: stages for each result, in order. Other streams must not use the same stage objects.
        gates: a frame is processed only if all gates admit it. Other streams must not use the same gate objects.
        name: name of the stream; default: the name of the source.
        on_end: called once by the last thread of the run, after all other threads have ended.
        threads: threads that collect results, shared with other runs; None for separate threads.
        config: configuration of the stream; None if a program created the run without a configuration.
    """

    def __init__(
        self,
        source: Source,
        engine: Engine,
        tasks: Sequence[Task],
        outputs: Sequence[Output],
        *,
        tiles: int = 1,
        queue: QueuePolicy | None = None,
        in_flight: int = 2,
        share: ShareSettings | None = None,
        stages: Sequence[Stage] = (),
        gates: Sequence[Gate] = (),
        name: str | None = None,
        on_end: Callable[[Run], None] | None = None,
        threads: SharedThreads | None = None,
        config: ListedStream | None = None,
    ) -> None:
        self.config = config
        self.source, self._engine = source, engine
        self.tasks, self._tiles = tuple(tasks), tiles
        self.stages, self._gates = tuple(stages), tuple(gates)
        self._saccades = find_stage(stages, SaccadeStage)
        self.recorder: PacketRecorder | None = None
        """The recorder of the source's packets; the caller owns it."""
        self.name = source.name if name is None else name
        live = source.info.live
        policy = queue or (NEWEST if live else WAIT)
        self._newest = policy == NEWEST
        self._frames: BoundedQueue[Frame] = BoundedQueue(policy)  # unused with the policy `newest`
        self._flights = InFlightQueue(in_flight)
        self._stream = EngineStream(
            engine, self.name, in_flight, share or ShareSettings(), live=live, newest=self._newest, gpu=source.gpu
        )
        self._delivery = OutputDelivery(
            outputs, self.name, live=live, stop=self.stop, fail=self._fail, ended=self._part_ended
        )
        # Acquired before a frame leaves the queue, unless newer frames can replace it in the engine.
        self._places = threading.Semaphore(in_flight)
        self._stats, self._lock = Stats(), threading.Lock()  # guards the attributes below
        self._error: Exception | None = None
        self._submitting = threading.Lock()  # guards the next three, and the gates
        self._held: Frame | None = None  # the newest frame, while too many results wait to be collected
        self._lost = 0  # frames not submitted since the last submitted frame, plus frames dropped before them
        self._all_read = False
        self._collected = _Collected()
        self._shared, self._own = threads or SharedThreads("saccade collect"), threads is None
        self._collecting: SharedTask | None = None
        work = [("source", self._read)] if self._newest else [("source", self._read), ("submit", self._submit)]
        self._on_end, self._left, self._abandoned = on_end, len(work) + 1 + len(outputs), False
        self._ended = threading.Event()
        self._begun, self._called_off, self.stopped = threading.Event(), False, False
        # Daemon threads, so that a thread stuck in a driver or on a failed disk cannot block the exit of the process.
        self._threads = [
            threading.Thread(target=self._part, args=(part,), name=f"saccade {what}", daemon=True)
            for what, part in work
        ]

    def update(self, config: ListedStream) -> None:
        """Apply a new configuration from the next frame on: prompts, scheduling, zones, lines, rules and gates.

        Changes of the source, the queue or the outputs are ignored, because they require reopening the stream. Any
        thread can call this method, but two calls must not overlap.

        Raises:
            UnknownClassError, ConfigError: see `tasks_for`. The run continues with the old configuration.
        """
        tasks = tuple(tasks_for(self._engine, config))
        self.config = config
        self.tasks, self._tiles = tasks, config.tiles
        self._stream.update(config)
        for part in (*self.stages, *self._gates):
            if isinstance(part, AnalyzeStage):
                part.configure(config, track=bool(config.rules))
            elif isinstance(part, EventStage | MotionGate):
                part.configure(config)
            elif isinstance(part, SaccadeStage):
                part.configure(saccades_of(config))

    def watch(self, *, watched: bool) -> None:
        """Set whether the stream has viewers. A stream with viewers has a higher scheduling weight."""
        self._stream.watch(watched)

    def start(self) -> None:
        """Start all threads of the run, without waiting.

        Raises:
            RuntimeError: if no more threads can be started. The caller then closes the source, stages and sinks.
        """
        self._stream.configure()
        try:
            self._collecting = self._shared.open(self._collect)
            self._delivery.start()
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._called_off = True
            self._stream.close()
            self._delivery.call_off()
            if self._collecting is not None:
                self._collecting.close()
            raise
        finally:
            self._begun.set()

    def stop(self) -> None:
        """Stop the run without waiting. Queued frames are dropped. Frames in the engine are completed."""
        self.stopped = True
        self.source.close()
        self._frames.discard()
        if self._take_held() is not None:
            self._stats.note_lost("closed")

    def abandon(self) -> None:
        """Stop the run without waiting. All unfinished frames are dropped and counted under the cause `closed`."""
        self._abandoned = True
        self._flights.cancel()
        self.stop()

    @property
    def ended(self) -> bool:
        """Whether all threads of the run have ended."""
        return self._ended.is_set()

    @property
    def waiting_s(self) -> float:
        """Time since the oldest unfinished frame was submitted to the engine, in seconds; 0 without such a frame."""
        since = self._flights.waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the end of the run. Return whether every thread has ended."""
        deadline = time.monotonic() + timeout_s
        if not self._ended.wait(timeout_s):
            return False
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = self._delivery.join(max(0.0, deadline - time.monotonic()))
        if self._own:
            ended &= self._shared.join(max(0.0, deadline - time.monotonic()))
        return ended and not any(thread.is_alive() for thread in self._threads)

    @property
    def error(self) -> Exception | None:
        """The first error of the run, or None. An error ends the run."""
        with self._lock:
            return self._error

    def report(self) -> Report:
        """Return the current counters of the run. Thread-safe."""
        drops: Counter[str] = Counter(self._frames.drops) + self._flights.superseded
        drops.update(self._delivery.drops())
        waiting = {"engine": len(self._frames) + (self._held is not None), **self._delivery.waiting()}
        looks = self._saccades.counts if self._saccades else {}
        kept = {name: n for stage in self.stages if isinstance(stage, KeepingStage) for name, n in stage.kept.items()}
        report = self._stats.report(drops, self.source.corrupt_packets, waiting, looks, kept)
        verdicts, events = find_stage(self.stages, VerdictStage), find_stage(self.stages, EventStage)
        return replace(
            report,
            held_back=sum(verdicts.held_back.values()) if verdicts else 0,
            events=events.begun if events else None,
        )

    def sink_statuses(self) -> list[SinkStatus]:
        """The status of each sink that only this run uses, and of the recorder."""
        recording = [self.recorder.status()] if self.recorder is not None else []
        return [*self._delivery.statuses(), *recording]

    def _part(self, work: Callable[[], None]) -> None:
        self._begun.wait()
        if self._called_off:
            return
        try:
            work()
        finally:
            self._part_ended()

    def _part_ended(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._stream.close()
            self._ended.set()
            if self._on_end:
                self._on_end(self)

    def _read(self) -> None:
        take = self._offer if self._newest else self._queue
        try:
            decode_behind_the_model()
            for frame in self.source:
                # For a file these are damaged packets, which are already counted.
                self._stats.note_read(0 if frame.capture_clock == "file" else frame.dropped_before)
                take(frame)
        except QueueClosed:
            pass  # stopped
        except EngineClosedError as error:
            self._fail(error)
        except Exception as error:
            self._note(error)  # without stopping: the frames read so far are valid
        finally:
            self._frames.close()
            if self._newest:
                self._end_submitting()

    def _queue(self, frame: Frame) -> None:
        self._frames.put(frame, frame.dropped_before)

    def _offer(self, frame: Frame) -> None:
        """Submit a frame to the engine, or keep the frame for later if the engine has the maximum number of frames."""
        with self._submitting:
            if self.stopped:
                raise QueueClosed
            if (replaced := self._take_held()) is not None:
                self._lost += 1 + replaced.dropped_before
                self._stats.note_lost("full")
            self._held = frame
            if not self._flights.full:
                self._submit_held()

    def _submit_held(self) -> None:
        if (frame := self._take_held()) is not None:
            self._submit_one(frame)

    def _take_held(self) -> Frame | None:
        with self._lock:  # `stop` takes it from another thread
            frame, self._held = self._held, None
            return frame

    def _end_submitting(self) -> None:
        """Mark the source as ended. If one more frame waits for the engine, it is still submitted."""
        with self._submitting:
            self._all_read = True
            if self._held is None:
                self._flights.close()
        self._call_collecting()

    def _submit(self) -> None:
        try:
            while True:
                self._places.acquire()
                self._submit_taken(self._frames.get())
        except QueueClosed:
            pass  # the source has ended
        except Exception as error:
            self._fail(error)
        finally:
            self._flights.close()
            self._call_collecting()

    def _submit_taken(self, taken: Taken[Frame]) -> None:
        """Submit a frame from the queue to the engine."""
        # A separate function, so that the frame is freed before the caller waits for the next frame.
        self._submit_one(taken.item.changed(dropped_before=taken.lost_before))

    def _submit_one(self, frame: Frame) -> None:
        frame = frame.changed(stream=self.name, dropped_before=frame.dropped_before + self._lost)
        now = time.monotonic()
        try:
            # This frame replaces a waiting frame that the gates have admitted, so the gates are not called again.
            if self._gates and not (self._flights.waits or all(gate.admit(frame) for gate in self._gates)):
                self._stats.note_lost("gate")
                self._free_place()
                self._lost = frame.dropped_before + 1
                return
            self._stats.note_submit(now)
            looks = self._saccades.choose(frame) if self._saccades else ()
            windows = [Window(look.x, look.y, look.width, look.height) for look in looks]
            result: Future[Result]
            if self.tasks:
                result = self._stream.submit(frame, self.tasks, self._tiles, now, windows)
            else:  # a stream without prompts is only recorded and shown
                result = Future()
                result.set_result(Result(Detections((), *frame.shown_size), Points((), *frame.shown_size)))
        except EngineClosedError:
            raise
        except Exception as error:  # raised by a gate, or by the image conversion
            result = Future()  # reported in the order of frames, like an error of the engine
            result.set_exception(error)
        self._lost = 0
        flight = InFlight(frame, now, result, "max_fps" if self._stream.beyond_rate(now) else "full")
        self._flights.put(flight)
        if isinstance(result, ResultFuture):
            result.call_when_done(self._note_answer)  # in the engine's thread
        else:
            self._call_collecting()
        if self._abandoned:
            result.cancel()

    def _note_answer(self, result: Future[Result]) -> None:
        # `InFlightQueue.put` removes a superseded frame.
        if result.cancelled() or not isinstance(result.exception(), SupersededError):
            self._call_collecting()

    def _call_collecting(self) -> None:
        if self._collecting is not None:
            self._collecting.call()

    def _free_place(self) -> None:
        if not self._newest:
            self._places.release()

    def _collect(self) -> None:
        """Deliver all results that the engine has completed, in the order of their frames. Not thread-safe."""
        if self._collecting is None:
            return
        try:
            while (flight := self._flights.take()) is not None:
                self._collect_one(flight, self._collected)
                del flight  # the variable would keep the frame in memory
                if self._newest and (self._held is not None or self._all_read):
                    self._submit_late()
        except QueueClosed:
            pass  # all submitted frames are delivered
        except Exception as error:
            self._fail(error)
        else:
            return
        collecting, self._collecting = self._collecting, None
        self._close_stages()
        self._delivery.close()
        collecting.close()
        self._part_ended()

    def _submit_late(self) -> None:
        with self._submitting:
            try:
                if not self._flights.full:
                    self._submit_held()
            finally:
                if self._all_read and self._held is None:
                    self._flights.close()

    def _collect_one(self, flight: InFlight, collected: _Collected) -> None:
        """Deliver the result of a frame. If the frame has no result, count the frame as dropped."""
        collected.lost += flight.lost
        self._free_place()
        try:
            result = flight.result.result()
            if not collected.whole:
                return
            delivery = self._process(flight, result)
        except (SupersededError, DeadlineError) as error:
            # The future keeps the error, whose traceback would keep the future and the image alive.
            error.__traceback__ = None
            self._stats.note_lost(flight.replaced_as if isinstance(error, SupersededError) else "deadline")
            collected.lost += 1 + flight.frame.dropped_before
        except CancelledError:
            self._stats.note_lost("closed")
            collected.whole = False
        except Exception as error:
            collected.failed += 1
            if self.source.info.live and collected.failed <= _MAX_FAILED:
                self._stats.note_lost("failed")
                collected.lost += 1 + flight.frame.dropped_before
                if collected.failed == 1:
                    log.warning("stream %s: processing a frame failed: %s", self.name, error)
            else:
                self._fail(error)
                collected.whole = False
        else:
            self._deliver(delivery, collected.lost)
            collected.failed = collected.lost = 0

    def _process(self, flight: InFlight, result: Result) -> Delivery:
        started = time.monotonic()
        for stage in self.stages:
            result = stage.process(flight.frame, result)
        track_ms = 1000 * (time.monotonic() - started)
        return Delivery(flight.frame, result, latency_of(flight.frame, flight.submitted_at, result, track_ms))

    def _deliver(self, delivery: Delivery, lost: int) -> None:
        """Add a result to the queues of the sinks."""
        self._stats.note_result(delivery.frame, delivery.result, delivery.latency)
        self._delivery.put(delivery, delivery.frame.dropped_before + lost)

    def _close_stages(self) -> None:
        for stage in self.stages:
            if isinstance(stage, ClosableStage):
                try:
                    stage.close()
                except Exception as error:
                    self._fail(error)

    def _note(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error

    def _fail(self, error: Exception) -> None:
        self._note(error)
        self.stop()
