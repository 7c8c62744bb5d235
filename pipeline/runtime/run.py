"""The run loop: one source, through the engine, to any number of sinks, each part in its own thread.

    source ─▶ queue ─▶ gates ─▶ engine (a few frames in flight) ─▶ in order ─▶ stages ─▶ one outbox and thread per sink

Of a source of which only the newest frame is wanted, the engine has every frame at once: while one waits there, the
next takes its place. Of others it has as many as are in flight.

A run ends when the source does, when it is stopped, or when any part fails; each time every frame already with the
engine is finished and every sink closed properly. A frame on which the engine, a gate or a stage fails ends a file's
run, whose results have no gaps; a live source loses it like any other frame, unless too many fail in a row.
`Run.update` is the only way a run changes. Knows nothing of terminals or signals.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from saccade.engine.errors import DeadlineError, EngineClosedError, SupersededError
from saccade.engine.results import Detections, Points, Result
from saccade.engine.tasks.task import Task, Window
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.motion import MotionGate
from saccade.pipeline.analytics.saccades.stage import SaccadeStage
from saccade.pipeline.analytics.stages import ClosableStage, Gate, KeepingStage, Stage
from saccade.pipeline.config import ListedStream
from saccade.pipeline.config.queue_policy import NEWEST, WAIT, QueuePolicy
from saccade.pipeline.events.stage import EventStage
from saccade.pipeline.runtime.bounded_queue import BoundedQueue, QueueClosed, Taken
from saccade.pipeline.runtime.delivery import Delivery, OutputDelivery
from saccade.pipeline.runtime.engine_stream import EngineStream, Flights, InFlight, Share, saccades_of, share_of
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.stats import Report, Stats, latency_of
from saccade.pipeline.runtime.tasks import tasks_for
from saccade.sinks import SinkStatus
from saccade.sinks.recording import PacketRecorder
from saccade.sources import Frame, Source
from saccade.sources.live.decoder import decode_behind_the_model

if TYPE_CHECKING:
    from saccade.engine import Engine

log = logging.getLogger(__name__)

_MAX_FAILED = 10  # frames of a live source in a row on which the engine or a stage may fail


@dataclass(slots=True)
class _Collected:
    """What collecting has come to.

    Attributes:
        whole: whether every frame so far was delivered or lost as live frames are; no sink gets results with a gap.
        failed: frames in a row that the engine, a gate or a stage failed on.
        lost: frames since the last one delivered.
    """

    whole: bool = True
    failed: int = 0
    lost: int = 0


class Run:
    """One run. It owns its source, its stages and its unshared sinks, and closes them; the engine stays the caller's.

    Attributes:
        config: what it runs by; None where a program gave its parts.

    Args:
        source: where the frames come from.
        engine: finds things in them.
        tasks: what to find in each frame.
        outputs: where each frame goes with its result.
        tiles: divide the image into this many tiles along each side as well (`Engine.submit`).
        queue: policy for frames that come faster than the engine takes them; None: a live one's newest, else wait.
        in_flight: how many frames the engine works on at a time.
        share: what a live stream gets of the engine.
        stages: what each result passes on its way to the sinks, in this order; instances of this stream alone.
        gates: all of them must admit a frame before the engine is given it; instances of this stream alone.
        name: of the stream; that of the source if None.
        on_end: called once, by the last thread of the run, when everything else of it has ended.
        config: what the parts were made from; None where a program made them.
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
        share: Share | None = None,
        stages: Sequence[Stage] = (),
        gates: Sequence[Gate] = (),
        name: str | None = None,
        on_end: Callable[[Run], None] | None = None,
        config: ListedStream | None = None,
    ) -> None:
        self.config = config
        self._source, self._engine = source, engine
        self._tasks, self._tiles = tuple(tasks), tiles
        self._stages, self._gates = tuple(stages), tuple(gates)
        self._saccades = next((stage for stage in stages if isinstance(stage, SaccadeStage)), None)
        self.recorder: PacketRecorder | None = None
        """What records the packets of its source; it stays the caller's."""
        self.name = source.name if name is None else name
        live = source.info.live
        policy = queue or (NEWEST if live else WAIT)
        self._newest = policy == NEWEST
        self._frames: BoundedQueue[Frame] = BoundedQueue(policy)
        self._flights = Flights(in_flight)
        self._stream = EngineStream(
            engine, self.name, in_flight, share or Share(), live=live, newest=self._newest, gpu=source.gpu
        )
        self._delivery = OutputDelivery(outputs, self.name, live=live, stop=self.stop, fail=self._fail)
        # Taken before a frame leaves the queue, unless newer ones may replace it in the engine, too.
        self._places = threading.Semaphore(in_flight)
        self._stats, self._lock = Stats(), threading.Lock()  # over what follows, which the threads change
        self._error: Exception | None = None
        self._awaited: InFlight | None = None  # the oldest frame that the engine has not answered yet
        work = [("source", self._read), ("submit", self._submit), ("collect", self._collect)]
        work += self._delivery.work()
        self._on_end, self._left, self._abandoned = on_end, len(work), False
        self._ended = threading.Event()
        self._begun, self._called_off, self._stopped = threading.Event(), False, False
        # Daemons, so that a part stuck in a driver or on a dead disk cannot keep the process from ending.
        self._threads = [
            threading.Thread(target=self._part, args=(part,), name=f"saccade {what}", daemon=True)
            for what, part in work
        ]

    @property
    def source(self) -> Source:
        """Where the frames come from."""
        return self._source

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What is found in each frame."""
        return self._tasks

    @property
    def share(self) -> Share:
        """What it gets of the engine."""
        return self._stream.share

    def update(self, config: ListedStream) -> None:
        """Run by another configuration from the next frame on: prompts, share, zones, lines, rules and gates.

        Source, queue and outputs stay: what needs others is opened again (`control.plan`). Callable from any thread,
        by one at a time.

        Raises:
            UnknownClassError, ConfigError: as `tasks_for`; the run goes on as it was.
        """
        tasks = tuple(tasks_for(self._engine, config))
        self.config = config
        self._tasks, self._tiles = tasks, config.tiles
        self._stream.share = share_of(config)
        for part in (*self._stages, *self._gates):
            if isinstance(part, AnalyzeStage):
                part.configure(config, track=bool(config.rules))
            elif isinstance(part, EventStage | MotionGate):
                part.configure(config)
            elif isinstance(part, SaccadeStage):
                part.configure(saccades_of(config))

    def watch(self, *, watched: bool) -> None:
        """Note whether it is being watched: it has more weight then."""
        self._stream.watched = watched

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What each result passes on its way to the sinks."""
        return self._stages

    @property
    def expected_frames(self) -> int | None:
        """About how many frames the source has; None when unknown."""
        return self._source.info.frames

    def start(self) -> None:
        """Start every thread; returns at once.

        Raises:
            RuntimeError: if there can be no more threads. Nothing has begun then, and all is the caller's again.
        """
        self._stream.configure()
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._called_off = True
            self._stream.close()
            raise
        finally:
            self._begun.set()

    def stop(self) -> None:
        """Read no further: drop what waits for the engine, finish what it has, close every sink. Returns at once."""
        self._stopped = True
        self._source.close()
        self._frames.discard()

    def abandon(self) -> None:
        """Stop, and give up what the engine has, counted as `closed`; still close every sink. Returns at once."""
        with self._lock:
            self._abandoned = True
            awaited = self._awaited
        if awaited is not None:
            awaited.result.cancel()
        self.stop()

    @property
    def ended(self) -> bool:
        """Whether every part of it has done its last work."""
        return self._ended.is_set()

    @property
    def stopped(self) -> bool:
        """Whether somebody, or a failure, has ended it before its source did."""
        return self._stopped

    @property
    def waiting_s(self) -> float:
        """For how long the engine has not answered the oldest frame it has, in seconds; 0 when it has none."""
        with self._lock:
            return 0.0 if self._awaited is None else time.monotonic() - self._awaited.submitted_at

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
        """The counters so far; callable at any time from any thread."""
        drops: Counter[str] = Counter(self._frames.drops) + self._flights.superseded
        drops.update(self._delivery.drops())
        waiting = {"engine": len(self._frames), **self._delivery.waiting()}
        looks = self._saccades.counts if self._saccades else {}
        kept = {name: n for stage in self._stages if isinstance(stage, KeepingStage) for name, n in stage.kept.items()}
        return self._stats.report(drops, self._source.corrupt_packets, waiting, looks, kept)

    def sink_statuses(self) -> list[SinkStatus]:
        """The status of each sink that is this run's own, its recorder among them."""
        recording = [self.recorder.status()] if self.recorder is not None else []
        return [*self._delivery.statuses(), *recording]

    def _part(self, work: Callable[[], None]) -> None:
        self._begun.wait()
        if self._called_off:
            return
        try:
            work()
        finally:
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._stream.close()
                self._ended.set()
                if self._on_end:
                    self._on_end(self)

    def _read(self) -> None:
        try:
            decode_behind_the_model()
            for frame in self._source:
                # A file's are its damaged packets, which are counted already.
                self._stats.note_read(0 if frame.capture_clock == "file" else frame.dropped_before)
                self._frames.put(frame, frame.dropped_before)
        except QueueClosed:
            pass  # stopped
        except Exception as error:
            self._note(error)  # and no stop: what was read before is still good
        finally:
            self._frames.close()

    def _submit(self) -> None:
        refused = 0  # frames that a gate refused since the last one submitted, and those lost before them
        try:
            while True:
                if not self._newest:
                    self._places.acquire()
                refused = self._submit_one(self._frames.get(), refused)
        except QueueClosed:
            pass  # the source is through
        except Exception as error:
            self._fail(error)
        finally:
            self._flights.close()

    def _submit_one(self, taken: Taken[Frame], refused: int) -> int:
        """Give the engine a frame, if the gates admit it; return how many are refused in a row by now.

        Not a part of the loop, whose variables would keep the frame while it waits for the next one; so with what
        collects and writes. Six 4K cameras had 500 MB of frames that nobody needed.
        """
        frame = taken.item.changed(stream=self.name, dropped_before=taken.lost_before + refused)
        now = time.monotonic()
        try:
            # What was admitted and still waits is replaced: what the gates saw there is on this one, too.
            if not (self._flights.waits or all(gate.admit(frame) for gate in self._gates)):
                self._stats.note_lost("gate")
                self._free_place()
                return frame.dropped_before + 1
            self._stats.note_submit(now)
            looks = self._saccades.choose(frame) if self._saccades else ()
            windows = [Window(look.x, look.y, look.width, look.height) for look in looks]
            result: Future[Result]
            if self._tasks:
                result = self._stream.submit(frame, self._tasks, self._tiles, now, windows)
            else:  # of a stream that is only recorded and shown
                result = Future()
                result.set_result(Result(Detections((), *frame.shown_size), Points((), *frame.shown_size)))
        except EngineClosedError:
            raise
        except Exception as error:  # of a gate, or of an image that cannot be made
            result = Future()  # which fails in its turn, as if the engine had failed
            result.set_exception(error)
        self._flights.put(InFlight(frame, now, result, "max_fps" if self._stream.beyond_rate(now) else "full"))
        return 0

    def _free_place(self) -> None:
        if not self._newest:
            self._places.release()

    def _collect(self) -> None:
        collected = _Collected()
        try:
            while True:
                self._collect_one(self._flights.get(), collected)
        except QueueClosed:
            pass  # everything submitted is delivered
        finally:
            self._close_stages()
            self._delivery.close()

    def _collect_one(self, flight: InFlight, collected: _Collected) -> None:
        """Await a frame's result and deliver it, or note why there is none."""
        collected.lost += flight.lost
        try:
            result = self._await(flight)
            if not collected.whole:
                return
            delivery = self._process(flight, result)
        except (SupersededError, DeadlineError) as error:
            # The future keeps the error, its frames would keep the future, and the image.
            error.__traceback__ = None
            self._stats.note_lost(flight.replaced_as if isinstance(error, SupersededError) else "deadline")
            collected.lost += 1 + flight.frame.dropped_before
        except CancelledError:
            self._stats.note_lost("closed")
            collected.whole = False
        except Exception as error:
            collected.failed += 1
            if self._source.info.live and collected.failed <= _MAX_FAILED:
                self._stats.note_lost("failed")
                collected.lost += 1 + flight.frame.dropped_before
                if collected.failed == 1:
                    log.warning("%s: a frame failed: %s", self.name, error)
            else:
                self._fail(error)
                collected.whole = False
        else:
            self._deliver(delivery, collected.lost)
            collected.failed = collected.lost = 0

    def _await(self, flight: InFlight) -> Result:
        """The engine's result of a frame; raises CancelledError once the run is abandoned."""
        with self._lock:
            self._awaited = flight
            abandoned = self._abandoned
        if abandoned:
            flight.result.cancel()
        try:
            return flight.result.result()
        finally:
            with self._lock:
                self._awaited = None
            self._free_place()

    def _process(self, flight: InFlight, result: Result) -> Delivery:
        """Take a result through the stages."""
        started = time.monotonic()
        for stage in self._stages:
            result = stage.process(flight.frame, result)
        track_ms = 1000 * (time.monotonic() - started)
        return Delivery(flight.frame, result, latency_of(flight.frame, flight.submitted_at, result, track_ms))

    def _deliver(self, delivery: Delivery, lost: int) -> None:
        """Hand a result to the sinks; `lost` frames were lost before it, besides its frame's `dropped_before`."""
        self._stats.note_result(delivery.frame, delivery.result, delivery.latency)
        self._delivery.put(delivery, delivery.frame.dropped_before + lost)

    def _close_stages(self) -> None:
        for stage in self._stages:
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
