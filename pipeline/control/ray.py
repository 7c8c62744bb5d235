"""Runs streams on workers. A worker is a Ray actor on this machine or in a cluster, and runs streams with a `Local`.

The controller uses `RayWorkers` in the same way as a `Local`. If an actor dies, Ray restarts it. Its live streams are
reopened on the least-loaded worker, and their open events continue under the same IDs. Its streams from files fail,
because their results would have a gap.

The controller process contains the event store of its machine and the shared outputs, and assigns streams to workers.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from saccade.pipeline.analytics.counts import Minute, Totals
from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.control.load import Candidate, least_loaded
from saccade.pipeline.control.local import verdicts_of
from saccade.pipeline.control.open_events import OpenEvents
from saccade.pipeline.control.plan import Change, Close, Open
from saccade.pipeline.control.ray_search import search_workers
from saccade.pipeline.control.ray_state import PlacedStream, WorkerSlot
from saccade.pipeline.control.results import ResultReceiver
from saccade.pipeline.control.runner import Address, Ended, ModelInfo, WorkerStatus
from saccade.pipeline.control.stores import MachineStores
from saccade.pipeline.control.worker_calls import (
    Batch,
    ChangeRequest,
    Ready,
    Report,
    WorkerSettings,
    taken,
    told,
    worker_values,
)
from saccade.pipeline.errors import AwayError, ConfigError, RunFailed, StreamError, reason_of
from saccade.pipeline.events.hub import Listener, notify
from saccade.pipeline.events.machine import RuleState
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.events.verdicts import Verdict
from saccade.pipeline.runtime.output import Output, close_sinks
from saccade.pipeline.runtime.streams import StreamStatus
from saccade.pipeline.search import Progress, Searched
from saccade.sinks import SinkStatus, SupportsEvents

log = logging.getLogger(__name__)

POLL_S = 1.0
SILENT_S = 3.0
"""A worker counts as dead if it does not respond for this time in addition to `POLL_S`, in seconds."""
LOADING_S = 60.0  # the same while the worker loads a second engine, which can block a busy machine
START_S = 180.0  # time limit for scheduling an actor and loading its engine on a busy machine
_CALL_S = 45.0  # time limit for a worker to open or stop a stream
_ASK_S = 10.0
_CLOSE_S = 20.0
_MARK_S = 5.0  # wait for a stream's last events after it was closed
_LAST_S = 1.0  # wait for a stream's last results after its worker released it
_MATCH_S = 120.0  # time limit for a worker to rate some snapshots
_OPENED_AT_ONCE = 8
_MOST_BACKOFF_S = 30.0
_CHANGES = ("begin", "update", "end", "rules", "media")


@contextmanager
def _prepared(worker: WorkerSlot, name: str) -> Iterator[WorkerSlot]:
    """Context manager that discards a prepared change of a stream at its end, unless the change was applied."""
    try:
        yield worker
    finally:
        with suppress(ray.exceptions.RayError):
            worker.actor.call.remote("release", name)


class RayWorkers:
    """Runs streams on Ray workers, between `open` and `close`. `Runner` describes most methods.

    Args:
        settings: settings of each worker.
        actor_of: returns the actor of a worker, by worker name; can block.
        wanted: names of the desired streams. Workers stop all other streams.
        outputs: shared outputs. `close` closes them.
        store: event store of this machine, or None. The caller closes it.
    """

    def __init__(
        self,
        settings: Sequence[WorkerSettings],
        actor_of: Callable[[str], Any],
        wanted: Sequence[str],
        outputs: Sequence[Output] = (),
        store: EventStore | None = None,
    ) -> None:
        self.on_end: Callable[[Ended], object] = lambda ended: None
        self.on_wish: Callable[[str, Mapping[str, Any]], ListedStream] = _no_wishes
        self._actor_of = actor_of
        self._wanted = list(wanted)
        self._outputs = [replace(output, shared=True) for output in outputs]
        self._receiver = ResultReceiver(self._outputs, self._is_live)
        self.events = OpenEvents(self._publish, self._machine_of)
        self._own_store = store
        if store is not None:
            self.events.load(store.going_on())
        cluster = any(one.cluster for one in settings)
        self._stores = MachineStores(store, self._load, self._address_of_machine) if store and cluster else None
        self._failing: set[int] = set()
        self._changed = threading.Condition(threading.RLock())  # guards the attributes below
        self._streams: dict[str, PlacedStream] = {}
        self._workers = {str(number): WorkerSlot(str(number), one) for number, one in enumerate(settings, 1)}
        self._closing = threading.Event()
        self._model = ModelInfo("", "", None, (), False)
        self._first_error: Exception | None = None
        self._searching: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(_OPENED_AT_ONCE, "saccade open")
        self._wishes = ThreadPoolExecutor(_OPENED_AT_ONCE, "saccade wish")

    @property
    def store(self) -> EventStore | MachineStores | None:
        """The event store of the run, or None."""
        return self._stores or self._own_store

    def open(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Start the workers, and wait until each worker is ready or has failed to start.

        Args:
            given_up: returns True to stop waiting, for example after Ctrl-C.

        Raises:
            EngineError, ConfigError: if no worker can start.
        """
        for worker in self._workers.values():
            name = f"saccade worker {worker.name}"
            worker.thread = threading.Thread(target=self._serve, args=(worker,), name=name, daemon=True)
            worker.thread.start()
        with self._changed:
            while not given_up():
                workers = list(self._workers.values())
                if all(worker.ready or worker.failures for worker in workers):
                    break
                self._changed.wait(0.1)
            if not given_up() and not any(worker.ready for worker in self._workers.values()):
                raise self._first_error or ConfigError("no worker could be started")

    # ---- what the controller has done

    def prepare(self, change: Change, *, checked: bool) -> AbstractContextManager[WorkerSlot] | None:
        """Check and prepare a change of a stream on a worker."""
        if isinstance(change, Close):
            return None
        with self._changed:
            stream = self._streams.get(change.name)
            there = self._workers[stream.worker] if stream and stream.worker and stream.error is None else None
        try:
            worker = there or self._any_worker()
            self._call(worker, "prepare", change, checked=checked)
        except AwayError:
            if isinstance(change, Open):
                raise
            return None
        return _prepared(worker, change.name)

    def follow(
        self, name: str, wanted: ListedStream | None, prepared: object = None, *, checked: bool = False
    ) -> StreamStatus | None:
        """Open, change, reopen or stop a stream on a worker, so that it matches a configuration.

        If `wanted` is None, the stream is stopped.
        """
        if wanted is None:
            with self._changed:
                known = name in self._streams
            if known:
                self.remove(name)
            return None
        with self._changed:
            stream = self._streams.get(name)
            new = stream is None or stream.error is not None
            if stream is None or stream.error is not None:
                stream = self._streams[name] = PlacedStream(wanted)
        with stream.lock:
            stream.wanted = wanted
            place = prepared if isinstance(prepared, WorkerSlot) else None
            try:
                return self._open_at(name, stream, place, checked=checked)
            except AwayError:
                return self.status(name)
            except Exception:
                if new:
                    with self._changed:
                        self._streams.pop(name, None)
                raise

    def reopen(self, name: str, wanted: ListedStream, *, checked: bool) -> StreamStatus:
        """Stop a stream and open it again. A stream that cannot be opened is listed as failed."""
        stream = self._stream(name)
        with stream.lock:
            stream.wanted = wanted
            worker = self._workers.get(stream.worker or "")
            try:
                if stream.error is not None or worker is None or worker.ready is None:
                    with self._changed:
                        stream.error, stream.worker = None, None
                    return self._open_at(name, stream, None, checked=checked)
                status: StreamStatus = self._call(worker, "local.reopen", name, wanted, checked=checked)
            except AwayError:
                return self.status(name)
            except Exception as error:
                self._fail(name, stream, reason_of(error))
                raise
            stream.opened += 1
            return self._note(stream, status)

    def remove(self, name: str) -> None:
        """Stop a running stream, or remove a failed stream from the list."""
        stream = self._stream(name)
        with stream.lock:
            worker = self._workers.get(stream.worker or "")
            if worker is not None and worker.ready is not None:
                stream.closed.clear()
                with suppress(AwayError):
                    self._call(worker, "follow", name, None)
                    stream.closed.wait(_MARK_S)
            with self._changed:
                if self._streams.get(name) is stream:
                    del self._streams[name]
            self.events.end(name)
            self._receiver.wait_end(name, _LAST_S)

    def fail(self, stream: ListedStream, error: Exception) -> None:
        """Record that a stream failed because it could not be opened."""
        with self._changed:
            self._streams[stream.name or ""] = PlacedStream(stream, error=reason_of(error))

    def check_rules(self, stream: ListedStream) -> None:
        """Check that a stream supports its rules: the labels, questions, zones and lines in them.

        Any worker can run the check.
        """
        self._call(self._any_worker(), "local.check_rules", stream)

    def take(self, config: RunConfig) -> list[str]:
        """Apply changed settings, such as the model, by replacing the workers' engines one after another.

        Return the keys of the settings that are now in effect.
        """
        settings = [replace(one.settings, values=worker_values(config)) for one in self._workers.values()]
        before, after = next(iter(self._workers.values())).settings.values, settings[0].values
        keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        if keys:
            log.warning(
                "settings changed: %s; the workers restart their engines one after another, and streams continue",
                ", ".join(keys),
            )
            self.replace(settings, config.named())
        return keys

    def replace(self, settings: Sequence[WorkerSettings], wanted: Mapping[str, ListedStream]) -> None:
        """Replace the engine of each worker and move the worker's streams to the new engine, one worker after another.

        Args:
            settings: new settings of each worker.
            wanted: new configurations of the streams, by name.

        Raises:
            ConfigError, EngineError, SinkError, SourceError, StreamError: if a worker fails. All workers then return
                to their old settings.
        """
        before = {name: worker.settings for name, worker in self._workers.items()}
        streams = {name: stream.wanted for name, stream in self._streams.items()}
        done: list[WorkerSlot] = []
        try:
            for worker, new in zip(self._workers.values(), settings, strict=True):
                worker.settings = new
                done.append(worker)
                self._replace(worker, wanted)
        except Exception:
            for worker in done:
                worker.settings = before[worker.name]
                if worker is not done[-1]:
                    try:
                        self._replace(worker, streams)
                    except Exception as error:
                        log.warning("worker %s could not return to its previous settings: %s", worker.name, error)
            raise
        with self._changed:
            for name, stream in self._streams.items():
                stream.wanted = wanted.get(name, stream.wanted)

    def _replace(self, worker: WorkerSlot, wanted: Mapping[str, ListedStream]) -> None:
        if worker.ready is None:  # it will start with the new settings
            return
        worker.loading = True
        try:
            ready: Ready = self._ask(worker, "replace", worker.settings, wanted, timeout_s=START_S)
        except AwayError:  # it has died, and will start with the new settings
            return
        finally:
            worker.loading = False
        with self._changed:
            if worker.ready is not None:
                worker.ready = ready

    # ---- how it is doing

    @property
    def names(self) -> list[str]:
        """The names of streams that run or wait for a worker."""
        with self._changed:
            return [name for name, stream in self._streams.items() if stream.error is None]

    @property
    def idle(self) -> bool:
        """Whether no stream is running or waiting for a worker."""
        return not self.names

    @property
    def closed(self) -> bool:
        """Whether the runner has been stopped or closed."""
        return self._closing.is_set()

    @property
    def ready(self) -> bool:
        """Whether streams can be added."""
        with self._changed:
            return not self.closed and any(worker.ready for worker in self._workers.values())

    @property
    def model(self) -> ModelInfo:
        """The model that the workers run on video frames."""
        with self._changed:
            found = next((worker.ready.model for worker in self._workers.values() if worker.ready), None)
            self._model = found or self._model
        return self._model

    def statuses(self) -> list[StreamStatus]:
        """Return the status of every stream, in the order in which the streams were added."""
        with self._changed:
            return [stream.now() for name, stream in self._streams.items()]

    def status(self, name: str) -> StreamStatus:
        """Return the status of a stream. Raise StreamError if the stream does not exist."""
        with self._changed:
            return self._stream(name).now()

    def workers(self) -> list[WorkerStatus]:
        """Return the status of all workers."""
        with self._changed:
            return [worker.status(list(self._on(worker))) for worker in self._workers.values()]

    def sink_statuses(self) -> list[tuple[str, SinkStatus]]:
        """Return the status of every sink, with the name of its stream. The name is empty for a shared sink."""
        with self._changed:
            own = [one for worker in self._workers.values() if worker.ready for one in worker.report.sinks]
        return [*(("", output.guard.status()) for output in self._outputs), *own]

    def lost_changes(self) -> dict[str, int]:
        """Return the number of dropped event changes, by queue: `hub` and `store`."""
        hubs = sum(worker.report.dropped for worker in self._workers.values())
        return {"hub": hubs} | ({"store": self._own_store.dropped} if self._own_store else {})

    def rule_states(self, name: str) -> list[RuleState] | None:
        """Return the state of each rule of a stream. Return None if the stream has no rules."""
        states: list[RuleState] | None = self._call(self._worker_of(name), "local.rule_states", name, timeout_s=_ASK_S)
        return states

    def counts(self, name: str, since: float) -> tuple[Totals, list[Minute]]:
        """Return the total object counts of a stream, and its counts for each minute after the Unix time `since`."""
        found: tuple[Totals, list[Minute]] = self._call(
            self._worker_of(name), "local.counts", name, since, timeout_s=_ASK_S
        )
        return found

    def address(self, stream: str | None) -> Address | None:
        """Return the HTTP address of the worker that runs a stream, or of any worker if `stream` is None."""
        if stream is not None:
            return self._worker_of(stream).address()
        return self._any_worker(full=True).address()

    def search(self, text: str, query: EventQuery, progress: Progress) -> Searched:
        """Search the stored events of all machines by a text. Workers score the snapshots with the model."""
        if self.store is None:
            raise ConfigError("no events are stored: restart Saccade with --store DIR")
        return search_workers(self.store, self._match_at, len(self._workers), text, query, progress)

    def judge(self, event: str, *, false_alarm: bool) -> str | None:
        """Mark an event as a false alarm, or remove the mark; see `Runner.judge`.

        If no worker runs the event's stream now, the next worker receives the mark when it opens the stream.
        """
        name = None if self.store is None else self.store.judge(event, false_alarm=false_alarm)
        with self._changed:
            stream = self._streams.get(name or "")
        if name is None or stream is None:
            return name
        with stream.lock, suppress(AwayError):
            worker = self._workers.get(stream.worker or "")
            if worker is not None and worker.ready is not None:
                self._call(worker, "set_verdicts", name, self._verdicts_of(name), timeout_s=_ASK_S)
        return name

    def held_back(self, stream: str) -> dict[str, int]:
        """Return the number of detections that each false alarm of a stream has suppressed. The keys are event IDs."""
        try:
            found: dict[str, int] = self._call(self._worker_of(stream), "local.held_back", stream, timeout_s=_ASK_S)
        except StreamError:
            return {}
        return found

    def _match_at(self, machine: str, text: str, events: Sequence[str]) -> list[float | None] | None:
        """Score snapshots against a text, on a worker of their machine. Return None if no worker is available."""
        with self._changed:
            able = [one for one in self._workers.values() if one.ready and one.ready.machine == machine]
            worker = min(able, key=lambda one: self._searching[one.name], default=None)
            if worker is None or self.closed:
                return None
            self._searching[worker.name] += 1
        try:
            found: list[float | None] = self._call(worker, "match", text, list(events), timeout_s=_MATCH_S)
            return found
        finally:
            with self._changed:
                self._searching[worker.name] -= 1

    # ---- the end

    def stop(self, *, abandon: bool = False) -> float:
        """Request that all workers stop, without waiting. Return how long this can still take, in seconds."""
        if self._closing.is_set():
            return 0.0
        self._closing.set()
        for worker in self._workers.values():
            if worker.actor is not None:
                with suppress(ray.exceptions.RayError):
                    worker.actor.close.remote()
        with self._changed:
            self._changed.notify_all()
        return 0.0

    def close(self) -> None:
        """Stop all streams and workers, and close the shared outputs. A second call does nothing.

        Raises:
            RunFailed: if an output could not write its last data.
        """
        self.stop()
        deadline = time.monotonic() + _CLOSE_S
        for worker in self._workers.values():
            if worker.thread is not None:
                worker.thread.join(max(0.0, deadline - time.monotonic()))
                if worker.thread.is_alive():
                    log.warning("worker %s did not stop in time and is killed", worker.name)
            if worker.actor is not None:
                with suppress(ray.exceptions.RayError):
                    ray.kill(worker.actor)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._wishes.shutdown(wait=False, cancel_futures=True)
        for name in {*self._streams, *self.events.streams}:
            self.events.end(name)
        self._receiver.close()
        if self._stores is not None:
            self._stores.close()
        errors = close_sinks(self._outputs, max(1.0, deadline - time.monotonic()))
        self._outputs = []
        if errors:
            raise RunFailed from errors[0]

    # ---- a worker's thread

    def _serve(self, worker: WorkerSlot) -> None:
        """Receive the messages of a worker until `stop` is called. If the worker dies, restart it."""
        while not self._closing.is_set():
            reason = "its actor died"
            try:
                # Only once: Ray ends an actor when its first handle is gone.
                worker.actor = worker.actor or self._actor_of(worker.name)
                answer: Any = ray.get(
                    worker.actor.start.remote(worker.settings, self._names_of(worker)), timeout=START_S
                )
                self._take_ready(worker, taken(answer))
                reason = self._take_messages(worker)
            except ray.exceptions.GetTimeoutError:
                reason = "it did not respond"
                self._kill(worker)
            except ray.exceptions.RayActorError:
                if worker.ready is None:  # permanently, for example because its machine is gone; a new actor is created
                    worker.actor = None
                    worker.failures += 1
            except Exception as error:
                if isinstance(error, ray.exceptions.RayTaskError):
                    error = error.cause
                reason = reason_of(error)
                with self._changed:
                    worker.failures += 1
                    self._first_error = self._first_error or error
            self._lose(worker, reason)
            if worker.failures and not self._closing.is_set():
                self._closing.wait(min(_MOST_BACKOFF_S, 0.5 * 2**worker.failures))

    def _on(self, worker: WorkerSlot) -> dict[str, PlacedStream]:
        """Return the streams that are assigned to a worker. The caller must hold the lock."""
        return {name: stream for name, stream in self._streams.items() if stream.worker == worker.name}

    def _names_of(self, worker: WorkerSlot) -> list[str]:
        with self._changed:
            return list(self._on(worker)) if worker.starts else self._wanted

    def _take_ready(self, worker: WorkerSlot, ready: Ready) -> None:
        with self._changed:
            worker.ready, worker.failures, worker.reason = ready, 0, None
            worker.starts += 1
            if worker.ended_at is not None:
                worker.restarted_in_s.append(time.monotonic() - worker.ended_at)
                worker.ended_at = None
            for name, config in ready.streams.items():  # running since the previous controller
                if name not in self._streams:
                    self._streams[name] = PlacedStream(config, worker.name, opened=1)
            self._changed.notify_all()
        if ready.machine and self._stores is not None:
            self._stores.register(ready.machine, ready.node)
        self._open_waiting()

    def _take_messages(self, worker: WorkerSlot) -> str:
        while True:
            batch = self._poll(worker)
            for data in batch.results:
                self._receiver.take(data)
            for kind, value in batch.messages:
                if kind == "end":
                    worker.ended = True
                    return "it was stopped"
                try:
                    self._take(worker, kind, value)
                except Exception:  # a bug; reading must continue
                    log.exception("cannot process a message of worker %s: %s", worker.name, kind)

    def _poll(self, worker: WorkerSlot) -> Batch:
        asked_at, asked = time.monotonic(), worker.actor.poll.remote(POLL_S)
        while True:
            try:
                batch: Batch = ray.get(asked, timeout=POLL_S)
                return batch
            except ray.exceptions.GetTimeoutError:
                limit_s = LOADING_S if worker.loading else SILENT_S
                if time.monotonic() > asked_at + POLL_S + limit_s:
                    raise

    def _take(self, worker: WorkerSlot, kind: str, value: Any) -> None:
        if kind == "event":
            self.events.take(value, worker.ready.machine if worker.ready else "")
        elif kind == "report":
            self._take_report(worker, value)
        elif kind == "ended":
            self._take_end(worker, value)
        elif kind == "closed":
            with self._changed:
                stream = self._streams.get(value)
            self._receiver.end(value)
            if stream is not None:
                stream.closed.set()
        elif kind == "wish":
            self._wishes.submit(self._grant, worker, value)
        elif kind == "warning":
            log.warning("worker %s: %s", worker.name, value)

    def _take_report(self, worker: WorkerSlot, report: Report) -> None:
        now = time.monotonic()
        with self._changed:
            running = {status.name for status in report.statuses if status.state != "failed"}
            strays = {name for name in running if (one := self._streams.get(name)) is None or one.worker != worker.name}
            closed, worker.strays = strays & worker.strays, strays
            worker.report = report
            for status in report.statuses:
                stream = self._streams.get(status.name)
                if stream is not None and stream.worker == worker.name:
                    stream.status, stream.told_at = status, now
            ours = [name for name in report.seen if (one := self._streams.get(name)) and one.worker == worker.name]
        for name in ours:
            self.events.see(name, report.seen[name])
        for name in closed:  # for example a stream that opened after the caller had given up
            with suppress(ray.exceptions.RayError):
                worker.actor.call.remote("follow", name, None)

    def _take_end(self, worker: WorkerSlot, ended: Ended) -> None:
        with self._changed:
            stream = self._streams.get(ended.name)
            if stream is None or stream.worker != worker.name:
                return
            if ended.error is None:
                del self._streams[ended.name]
            else:
                stream.error, stream.status, stream.worker = str(ended.error), ended.status, None
        self.events.end(ended.name)
        self._receiver.wait_end(ended.name, _LAST_S)
        self.on_end(ended)

    def _grant(self, worker: WorkerSlot, wish: ChangeRequest) -> None:
        """Apply a stream change that a viewer requested through a worker, and send the result to the worker."""
        answer = told(lambda: self.on_wish(wish.stream, wish.values))
        with suppress(ray.exceptions.RayError):
            worker.actor.call.remote("answer", wish.number, answer)

    def _lose(self, worker: WorkerSlot, reason: str) -> None:
        """Handle the death of a worker. Its live streams wait for another worker. Its streams from files fail."""
        over: list[Ended] = []
        with self._changed:
            was_ready, worker.ready, worker.reason = worker.ready, None, reason
            worker.ended_at = worker.ended_at or time.monotonic()
            worker.counted.update({k: v for k, v in worker.report.counters.items() if k.endswith("_total")})
            worker.report = Report()
            lost = self._on(worker)
            for name, stream in lost.items():
                stream.worker = None
                stream.closed.set()
                if stream.status is not None:  # until the next worker reports, the last status is out of date
                    stream.status = replace(stream.status, state="waiting", reason="waiting for a worker")
                if stream.status is not None and not stream.status.live and not self._closing.is_set():
                    stream.error = f"its worker died: {reason}"
                    error = StreamError(stream.error)
                    over.append(Ended(name, stream.wanted, error, False, stream.now()))
            self._changed.notify_all()
        if self._closing.is_set():
            return
        if was_ready is not None:
            log.warning("worker %s died (%s) and is being restarted", worker.name, reason)
        elif worker.failures:
            log.warning("worker %s could not be started: %s", worker.name, reason)
        for name, stream in lost.items():
            self.events.end(name) if stream.error else self.events.leave(name)
            self._receiver.end(name)
        for ended in over:
            self.on_end(ended)
        self._open_waiting()

    def _kill(self, worker: WorkerSlot) -> None:
        if worker.ready is not None and not worker.settings.cluster:
            with suppress(OSError):
                os.kill(worker.ready.pid, signal.SIGKILL)
        with suppress(ray.exceptions.RayError):
            ray.kill(worker.actor, no_restart=False)

    # ---- placing

    def _open_waiting(self) -> None:
        """Open all streams that wait for a worker, if a worker is ready."""
        if not self.ready:
            return
        with self._changed:
            waiting = [name for name, one in self._streams.items() if one.worker is None and one.error is None]
        for name in waiting:
            with suppress(RuntimeError):  # everything is being closed
                self._pool.submit(self._open_again, name)

    def _open_again(self, name: str) -> None:
        with self._changed:
            stream = self._streams.get(name)
        if stream is None or self.closed:
            return
        with stream.lock:
            if stream.worker is not None or stream.error is not None or self._streams.get(name) is not stream:
                return
            try:
                self._open_at(name, stream, None, checked=False)
            except AwayError:
                pass  # the next ready worker opens it
            except Exception as error:
                log.warning("stream %s could not be opened: %s", name, error)
                self._fail(name, stream, reason_of(error))

    def _open_at(self, name: str, stream: PlacedStream, place: WorkerSlot | None, *, checked: bool) -> StreamStatus:
        """Open or change a stream on its worker. The caller must hold the lock of the stream.

        A stream without a worker is opened on the worker `place`, or on the least-loaded worker if `place` is None.
        """
        with self._changed:
            worker = self._workers.get(stream.worker or "") or place or self._least_loaded()
            if worker is None or worker.ready is None:
                raise AwayError("no worker is ready; try again in a few seconds")
            again = stream.worker is None and stream.opened > 0
            stream.worker = worker.name
        events = self.events.of(name) if again or not stream.opened else []
        verdicts = self._verdicts_of(name)
        try:
            status: StreamStatus = self._call(
                worker, "follow", name, stream.wanted, checked=checked, events=events, verdicts=verdicts, again=again
            )
        except AwayError:
            with self._changed:
                if worker.ready is None or stream.worker is None:
                    stream.worker = None
            raise
        except Exception:
            with self._changed:
                if not stream.opened or again:
                    stream.worker = None
            raise
        stream.opened += stream.opened == 0 or again
        return self._note(stream, status)

    def _verdicts_of(self, name: str) -> Sequence[Verdict]:
        return () if self.store is None else verdicts_of(self.store, name)

    def _note(self, stream: PlacedStream, status: StreamStatus) -> StreamStatus:
        with self._changed:
            stream.status, stream.told_at = status, time.monotonic()
            return replace(status, worker=stream.worker)

    def _fail(self, name: str, stream: PlacedStream, reason: str) -> None:
        with self._changed:
            stream.error, stream.worker = reason, None
        self.events.end(name)

    def _least_loaded(self, *, full: bool = False) -> WorkerSlot | None:
        """Return the ready worker with the least load, or None. The caller must hold the lock."""
        counts = Counter(stream.worker for stream in self._streams.values())
        ready = [worker for worker in self._workers.values() if worker.ready is not None]
        name = least_loaded(
            Candidate(
                worker.name,
                worker.report.busy,
                0 if full else counts[worker.name],
                0 if full else max(0, counts[worker.name] - len(worker.report.statuses)),
            )
            for worker in ready
        )
        return None if name is None else self._workers[name]

    def _any_worker(self, *, full: bool = False) -> WorkerSlot:
        with self._changed:
            worker = self._least_loaded(full=full)
        if worker is None:
            raise AwayError("no worker is ready; try again in a few seconds")
        return worker

    def _stream(self, name: str) -> PlacedStream:
        with self._changed:
            if (stream := self._streams.get(name)) is None:
                raise StreamError(f"stream '{name[:80]}' does not exist")
        return stream

    def _worker_of(self, name: str) -> WorkerSlot:
        with self._changed:
            stream = self._stream(name)
            if stream.error is not None:
                raise StreamError(f"stream '{name}' has failed: {stream.error}")
            worker = self._workers.get(stream.worker or "")
            if worker is None or worker.ready is None:
                raise AwayError(f"stream '{name}' is waiting for a worker; try again in a few seconds")
            return worker

    def _call(
        self, worker: WorkerSlot, method: str, *arguments: Any, timeout_s: float = _CALL_S, **options: Any
    ) -> Any:
        """Call a method of a worker and return its result. If the method returns an error, raise the error."""
        return self._ask(worker, "call", method, *arguments, timeout_s=timeout_s, **options)

    def _ask(self, worker: WorkerSlot, method: str, *arguments: Any, timeout_s: float, **options: Any) -> Any:
        try:
            answer: Any = ray.get(getattr(worker.actor, method).remote(*arguments, **options), timeout=timeout_s)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.GetTimeoutError:
            raise StreamError(f"worker {worker.name} did not respond within {timeout_s:g} s; try again") from None
        except ray.exceptions.RayError as error:
            raise AwayError(f"worker {worker.name} died; try again in a few seconds") from error
        return taken(answer)

    # ---- within

    def _address_of_machine(self, machine: str) -> Address | None:
        with self._changed:
            found = next((one for one in self._workers.values() if one.ready and one.ready.machine == machine), None)
        return None if found is None else found.address()

    def _machine_of(self, event: str) -> str | None:
        return None if self._stores is None else self._stores.machine_of(event)

    def _is_live(self, name: str) -> bool:
        with self._changed:
            stream = self._streams.get(name)
        return stream is None or stream.status is None or stream.status.live

    def _load(self, records: Sequence[Mapping[str, Any]], machine: str) -> None:
        """Load the events that are still open in the event store of a machine.

        End the events of streams that no longer exist.
        """
        self.events.load(records, machine)
        for stream in {record["stream"] for record in records} - {*self._wanted, *self.names}:
            self.events.end(stream)

    def _publish(self, record: Mapping[str, Any], machine: str) -> None:
        listeners: list[Listener] = []
        if self._stores is not None:
            listeners.append(partial(self._stores.write, machine=machine))
        elif self._own_store is not None:
            listeners.append(self._own_store.write)
        if record["type"] in _CHANGES:
            listeners += [one.sink.write_event for one in self._outputs if isinstance(one.sink, SupportsEvents)]
        for number, listener in enumerate(listeners):
            notify(listener, record, self._failing, number)


def _no_wishes(name: str, values: Mapping[str, Any]) -> ListedStream:
    raise StreamError("streams of this run cannot be changed")
