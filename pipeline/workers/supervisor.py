"""Keeps the desired state, which streams are to run, and has workers run them: starts, watches and replaces these.

A worker that ends loses the frames that it had; its live streams are opened again, where `placement` says, as they were
last, with changes made while they ran. A file that was being read has failed, since its results would have a gap.
Knows no transport, no HTTP and no sinks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from saccade.pipeline.errors import StreamError
from saccade.pipeline.workers.open_events import OpenEvents
from saccade.pipeline.workers.placement import Placement
from saccade.pipeline.workers.protocol import MakeWorker, Message, Worker, WorkerReport
from saccade.pipeline.workers.roster import Roster
from saccade.pipeline.workers.states import WorkerSeat
from saccade.pipeline.workers.stream_table import StreamTable

log = logging.getLogger(__name__)

TICK_S = 0.25
_ALL_READY_S = 60.0  # streams wait so long for the last workers to load: none moves to them later
REPORT_S = 1.0  # between two reports of a worker, and so between two decisions by these alone


class Supervisor(Roster):
    """Runs streams on workers from `start` to `close`. Every method is callable from any thread.

    Args:
        make: makes a worker, for a place of one of these `names`.
        placement: decides where streams run.
        events: takes each record of an event, in order for each stream, and keeps those that go on.
        on_lost: called with the name of a stream that runs no more where it did, once all of its events were handed on,
            and whether that is because its worker has ended.
        on_warning: called with each warning of a worker.
        on_machine: called with the name of a machine that stores its events, and the address of its store, whenever a
            worker there is ready; returns at once.
    """

    def __init__(
        self,
        make: MakeWorker,
        names: Sequence[str],
        placement: Placement | None = None,
        *,
        events: OpenEvents | None = None,
        on_lost: Callable[[str, bool], None] = lambda stream, worker_ended: None,
        on_warning: Callable[[str], None] = lambda line: log.warning("%s", line),
        on_machine: Callable[[str, str], None] = lambda machine, url: None,
    ) -> None:
        self._make = make
        self._events = events or OpenEvents(lambda record, machine: None)
        self._on_lost, self._on_warning, self._on_machine = on_lost, on_warning, on_machine
        super().__init__(names, StreamTable(placement or Placement(), self._send, self._events))
        self._changed = threading.Condition(self._lock)  # over what follows, too
        self._began = False
        self._ready_at = 0.0
        self._place_now = False  # something has changed that placement may follow
        self._placed_at = 0.0
        self._started = False
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saccade supervisor", daemon=True)

    # ---- desired state

    def start(self) -> None:
        """Start the workers; returns at once."""
        self._thread.start()

    def open(
        self,
        config: Mapping[str, Any],
        wanted: str,
        *,
        or_similar: bool = True,
        checked: bool = False,
    ) -> Future[str]:
        """Have a stream run from now on.

        Args:
            config: the values of a `ListedStream`, valid.
            wanted: what it is to be called.
            or_similar: take the first free name like it where it is taken or cannot be used.
            checked: whether the worker is to check the source by the rules for the HTTP API.

        Returns:
            The name, once a worker has opened the stream; or `RefusedError` in it, and the stream is not to run then.

        Raises:
            StreamError: if the name is taken or cannot be used, or everything is being closed.
        """
        with self._lock:
            if self._stopping:
                raise StreamError("no stream can be added any more: everything is being closed")
            done = self._table.open(config, wanted, or_similar=or_similar, checked=checked)
        self._place_soon()
        return done

    def close_stream(self, name: str) -> Future[None]:
        """End a stream, or forget one that failed; the future is done when its worker has closed everything of it.

        Raises:
            StreamError: if there is none of that name.
        """
        with self._lock:
            done = self._table.close(name)
            away = name not in self._table.streams
        if away:
            self._events.end(name)
        return done

    def restart(self, name: str, config: Mapping[str, Any] | None = None) -> Future[str]:
        """Close a stream, and open it anew; also one that failed. Done as `open` is.

        With a configuration, a live stream goes on as it was if it cannot be opened by that.

        Raises:
            StreamError: if there is none of that name.
        """
        with self._lock:
            done = self._table.restart(name, config)
        self._place_soon()
        return done

    def refresh(self, name: str) -> None:
        """Have the worker of a stream report at once, since the stream was just changed there."""
        with self._lock:
            stream = self._table.streams.get(name)
            if stream is not None and stream.worker is not None:
                self._send(stream.worker, {"do": "report"})

    # ---- other workers

    @property
    def stopping(self) -> bool:
        """Whether everything is being closed."""
        return self._stopping

    def add_worker(
        self, name: str, make: MakeWorker | None, configs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> WorkerSeat:
        """Start another worker, whose first end is its last if it was not ready before.

        Args:
            name: none that there is.
            make: makes it; None as the others.
            configs: configurations that streams have from when they come there, by name.
        """
        seat = WorkerSeat(name, make=make, trial=True, configs=configs or {})
        with self._changed:
            self._seats[name] = seat
        self._place_soon()
        return seat

    def drain(self, name: str, on: bool = True, configs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Have a worker's streams move to others, or, not `on`, have it take streams again; `configs` as there."""
        with self._changed:
            seat = self._seats[name]
            seat.draining, seat.configs = on, configs or {}
            for stream in self._table.streams.values():
                stream.stays = None
        self._place_soon()

    def has_streams(self, name: str) -> bool:
        """Whether a worker has streams, or is to have some."""
        with self._lock:
            return bool(self._table.of_worker(name))

    def forget_configs(self) -> None:
        """Streams that move keep their configuration from now on."""
        with self._lock:
            for seat in self._seats.values():
                seat.configs = {}

    def remove_worker(self, name: str, timeout_s: float) -> None:
        """End a worker for good, and kill it if it does not in time; its streams, if any, run elsewhere."""
        with self._changed:
            seat = self._seats[name]
            seat.draining = True
            worker = seat.worker
        if worker is not None:
            worker.stop()
            if not self.wait_until(lambda: seat.worker is None, timeout_s):
                worker.kill()
                self.wait_until(lambda: seat.worker is None, timeout_s)
        with self._lock:
            if not self._stopping:
                del self._seats[name]

    def wait_until(self, what: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until something is so, or everything is being closed; whether it is so."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or what(), timeout_s)
            return what()

    def stop(self) -> None:
        """Have every worker close its streams and end; returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            workers = [seat.worker for seat in self._seats.values() if seat.worker]
        for worker in workers:
            worker.stop()

    def close(self, timeout_s: float) -> bool:
        """`stop`, wait until all have ended, and kill those that have not in time; whether all have by themselves."""
        self.stop()
        deadline = time.monotonic() + timeout_s
        while (left := self._running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for worker in left:
            worker.kill()
        end = time.monotonic() + 1.0
        while self._running() and time.monotonic() < end:
            time.sleep(0.02)
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._table.cancel()
        return not left

    def _running(self) -> list[Worker]:
        with self._lock:
            return [seat.worker for seat in self._seats.values() if seat.worker is not None]

    # ---- within

    def _send(self, worker: str, command: Message) -> None:
        seat = self._seats.get(worker)
        if seat is not None and seat.worker is not None:
            seat.worker.send(command)

    def _place_soon(self) -> None:
        self._place_now = True
        self._wake.set()

    def _run(self) -> None:
        """Start workers when they are due, place streams, and kill what hangs: the only thread that does."""
        while True:
            self._wake.clear()
            with self._lock:
                if self._stopping:
                    return
                now = time.monotonic()
                due = [seat for seat in self._seats.values() if seat.due(now)]
                # The workers themselves: another thread may note the end of one before it is killed here.
                hanging = [seat.worker for seat in self._seats.values() if seat.worker and seat.hangs(now)]
            for worker in hanging:
                log.warning("worker %s has not answered for some time, and is started again", worker.name)
                worker.kill()
            for seat in due:
                self._start(seat)
            try:
                with self._lock:
                    self._place(time.monotonic())
            except Exception:  # a bug, which must not end the watch over all workers
                log.exception("streams could not be placed")
            self._wake.wait(TICK_S)

    def _start(self, seat: WorkerSeat) -> None:
        worker = (seat.make or self._make)(seat.name, self._take)
        with self._lock:
            seat.worker, seat.url, seat.report = worker, None, None
            seat.starts += 1
            seat.started_at = seat.heard_at = time.monotonic()
        try:
            worker.start()
        except Exception as error:  # no memory, or too many processes
            log.warning("worker %s cannot be started: %s", seat.name, error)
            self._take(worker, {"is": "ended", "reason": str(error)})
        if self._stopping:
            worker.stop()

    def _take(self, worker: Worker, message: Message) -> None:
        """Take a message of a worker; called by a thread of its own for each worker, which so keeps the order."""
        try:
            self._take_one(worker, message)
        except Exception:  # a bug, which must not end the reading: the worker's end would be missed
            log.exception("a message of worker %s: %s", worker.name, message.get("is"))

    def _take_one(self, worker: Worker, message: Message) -> None:
        kind = message["is"]
        if kind == "event":
            sender = self._seats.get(worker.name)
            self._events.take(message["record"], sender.machine if sender else "")
            return
        if kind == "warning":
            self._on_warning(message["line"])
            return
        lost: list[str] = []
        with self._lock:
            seat = self._seats.get(worker.name)
            if seat is None or seat.worker is not worker:
                return
            seat.heard_at = time.monotonic()
            if kind == "ready":
                seat.url, seat.pid, seat.ready_at = message["url"], message["pid"], seat.heard_at
                seat.machine, seat.trial = message.get("machine", ""), False
                if seat.machine:
                    self._on_machine(seat.machine, message["store"])
                if seat.ended_at is not None:
                    seat.restarted_in_s.append(seat.heard_at - seat.ended_at)
            elif kind == "failed":
                seat.reason = message["error"]
            elif kind == "report":
                seat.report = WorkerReport.of_message(message)
                self._table.take_report(seat.name, seat.report.streams)
                return
            elif kind == "ended":
                lost = self._ended(seat, message["reason"])
            elif "key" in message:
                lost = self._table.take_answer(message)
        try:
            for name in lost:
                self._leave(name)
                self._on_lost(name, kind == "ended")
        finally:
            with self._changed:
                self._changed.notify_all()
            self._place_soon()

    def _leave(self, name: str) -> None:
        """A stream runs no more where it did: its events go on if it will elsewhere, else they end."""
        with self._lock:
            stream = self._table.streams.get(name)
            goes_on = not self._stopping and stream is not None and not stream.removed and stream.phase != "failed"
        if goes_on:
            self._events.leave(name)
        else:
            self._events.end(name)

    def _ended(self, seat: WorkerSeat, reason: str) -> list[str]:
        """A worker's process is gone; returns the streams that it had."""
        seat.note_end(time.monotonic(), reason)
        if self._stopping:
            return [stream.name for stream in self._table.streams.values() if stream.worker == seat.name]
        if not (seat.trial or seat.draining):
            log.warning("worker %s has ended (%s), and is started again", seat.name, reason)
        return self._table.lost_worker(seat.name, reason)

    def _place(self, now: float) -> None:
        """Place streams where something has changed, or time alone may; else once a second, by new measurements.

        With 10,000 streams placement takes 43 ms.
        """
        if self._stopping or not self._all_began(now):
            return
        pending = self._place_now or self._table.unsettled or not all(seat.ready for seat in self._seats.values())
        if not pending and now < self._placed_at + REPORT_S:
            return
        self._place_now, self._placed_at = False, now
        self._table.place(self._seats, now)

    def _all_began(self, now: float) -> bool:
        """Whether streams may be opened: at first only when all workers take some, or one has for some time."""
        if not self._began and any(seat.ready for seat in self._seats.values()):
            self._ready_at = self._ready_at or now
            trying = [seat for seat in self._seats.values() if not seat.ready and not seat.failures]
            self._began = not trying or now > self._ready_at + _ALL_READY_S
        return self._began
