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

from saccade.pipeline.core.errors import StreamError
from saccade.pipeline.core.stream_names import check_free, free_name
from saccade.pipeline.workers.open_events import OpenEvents
from saccade.pipeline.workers.placement import Placement
from saccade.pipeline.workers.protocol import MakeWorker, Message, Worker, WorkerReport
from saccade.pipeline.workers.quarantine import CRASHES, Quarantine
from saccade.pipeline.workers.roster import Roster
from saccade.pipeline.workers.states import GRACE_S, RefusedError, StreamState, WorkerSeat, settle

log = logging.getLogger(__name__)

TICK_S = 0.25


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
        self._placement = placement or Placement()
        self._events = events or OpenEvents(lambda record, machine: None)
        self._on_lost, self._on_warning, self._on_machine = on_lost, on_warning, on_machine
        super().__init__(names)
        self._opened = 0
        self._quarantine = Quarantine()
        self._began = False
        self._ready_at = 0.0
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
        repeat: bool = False,
    ) -> Future[str]:
        """Have a stream run from now on.

        Args:
            config: the values of a `ListedStream`, valid.
            wanted: what it is to be called.
            or_similar: take the first free name like it where it is taken or cannot be used.
            checked: whether the worker is to check the source by the rules for the HTTP API.
            repeat: play a file over and over, at its own pace.

        Returns:
            The name, once a worker has opened the stream; or `RefusedError` in it, and the stream is not to run then.

        Raises:
            StreamError: if the name is taken or cannot be used, or everything is being closed.
        """
        with self._lock:
            if self._stopping:
                raise StreamError("no stream can be added any more: everything is being closed")
            taken = {name for name, stream in self._streams.items() if stream.phase != "failed"}
            name = free_name(wanted, taken) if or_similar else wanted
            check_free(name, taken)
            done: Future[str] = Future()
            stream = StreamState(name, {**config, "name": name}, checked, repeat)
            stream.opening.append(done)
            self._streams[name] = stream
            self._place()
        return done

    def close_stream(self, name: str) -> Future[None]:
        """End a stream, or forget one that failed; the future is done when its worker has closed everything of it.

        Raises:
            StreamError: if there is none of that name.
        """
        done: Future[None] = Future()
        with self._lock:
            stream = self._streams.get(name)
            if stream is None:
                raise StreamError(f"no stream is called '{name[:80]}'")
            stream.removed = True
            if away := stream.phase in ("waiting", "failed"):
                self._forget(stream)
                settle(done, None)
            else:
                stream.closing.append(done)
                if stream.phase == "open":
                    self._close_there(stream)
        if away:
            self._events.end(name)
        return done

    def restart(self, name: str, config: Mapping[str, Any] | None = None) -> Future[str]:
        """Close a stream, and open it anew, as it is now or as `config` says; also one that failed. Done as `open` is.

        Raises:
            StreamError: if there is none of that name.
        """
        done: Future[str] = Future()
        with self._lock:
            stream = self._streams.get(name)
            if stream is None or stream.removed:
                raise StreamError(f"no stream is called '{name[:80]}'")
            stream.opening.append(done)
            stream.config = stream.config if config is None else {**config, "name": name}
            if stream.phase == "failed":
                stream.phase, stream.reason = "waiting", None
                self._place()
            elif stream.phase == "open":
                self._close_there(stream)
        return done

    def refresh(self, name: str) -> None:
        """Have the worker of a stream report at once, since the stream was just changed there."""
        with self._lock:
            stream = self._streams.get(name)
            seat = self._seats.get(stream.worker or "") if stream else None
            if seat and seat.worker:
                seat.worker.send({"do": "report"})

    # ---- the end

    def stop(self) -> None:
        """Have every worker close its streams and end; returns at once."""
        with self._lock:
            self._stopping = True
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
            for stream in self._streams.values():
                for waiting in stream.opening:
                    waiting.cancel()
                for closing in stream.closing:
                    closing.cancel()
        return not left

    def _running(self) -> list[Worker]:
        with self._lock:
            return [seat.worker for seat in self._seats.values() if seat.worker is not None]

    # ---- within

    def _run(self) -> None:
        """Start workers when they are due, and kill those that hang: the only thread that does."""
        while True:
            with self._lock:
                if self._stopping:
                    return
                now = time.monotonic()
                due = [seat for seat in self._seats.values() if seat.worker is None and now >= seat.retry_at]
                hanging = [seat for seat in self._seats.values() if seat.hangs(now)]
            for seat in hanging:
                log.warning("worker %s has not answered for some time, and is started again", seat.name)
                assert seat.worker is not None
                seat.worker.kill()
            for seat in due:
                self._start(seat)
            with self._lock:
                self._place()
            self._wake.wait(TICK_S)
            self._wake.clear()

    def _start(self, seat: WorkerSeat) -> None:
        worker = self._make(seat.name, self._take)
        with self._lock:
            seat.worker, seat.url, seat.report = worker, None, None
            seat.starts += 1
            seat.started_at = seat.heard_at = time.monotonic()
        try:
            worker.start()
        except Exception as error:  # no memory, or too many processes
            log.warning("worker %s cannot be started: %s", seat.name, error)
            self._ended(seat, {"reason": str(error)})
        if self._stopping:
            worker.stop()

    def _take(self, worker: Worker, message: Message) -> None:
        """Take a message of a worker; called by a thread of its own for each worker, which so keeps the order."""
        kind = message["is"]
        if kind == "event":
            self._events.take(message["record"], self._seats[worker.name].machine)
            return
        if kind == "warning":
            self._on_warning(message["line"])
            return
        lost: list[str] = []
        with self._lock:
            seat = self._seats[worker.name]
            if seat.worker is not worker:
                return
            seat.heard_at = time.monotonic()
            if kind == "ready":
                seat.url, seat.pid, seat.ready_at = message["url"], message["pid"], seat.heard_at
                seat.machine = message.get("machine", "")
                if seat.machine:
                    self._on_machine(seat.machine, message["store"])
                if seat.ended_at is not None:
                    seat.restarted_in_s.append(seat.heard_at - seat.ended_at)
            elif kind == "failed":
                seat.reason = message["error"]
            elif kind == "report":
                self._take_report(seat, WorkerReport.of_message(message))
            elif kind in ("opened", "refused", "closed", "gone"):
                stream = self._streams.get(message["stream"])
                if stream is not None and stream.key == message["key"]:
                    lost = self._take_answer(stream, kind, message)
            elif kind == "ended":
                lost = self._ended(seat, message)
        for name in lost:
            self._leave(name)
            self._on_lost(name, kind == "ended")
        if kind != "report":
            with self._lock:
                self._place()
            self._wake.set()

    def _take_report(self, seat: WorkerSeat, report: WorkerReport) -> None:
        seat.report = report
        for one in report.streams:
            if (stream := self._streams.get(one.name)) is not None and stream.worker == seat.name:
                stream.take(one)
                self._events.see(one.name, one.events)

    def _take_answer(self, stream: StreamState, kind: str, message: Message) -> list[str]:
        """Take what a worker says of a stream; returns the stream if it is there no more."""
        if kind == "opened":
            stream.note_opened(message["live"], time.monotonic())
            if stream.removed:
                self._close_there(stream)
            return []
        if kind == "refused":
            stream.worker = None
            self._fail(stream, RefusedError(message["kind"], message["error"]))
            return [stream.name]
        stream.worker = None
        if kind == "gone":  # a file is through, or a source has failed for good
            self._finished[stream.name] = message
            if message["error"]:
                self._fail(stream, RefusedError("SourceError", message["error"]))
            else:
                self._forget(stream)
        elif message["error"]:
            self._fail(stream, RefusedError("StreamError", message["error"]))
        elif stream.removed:
            self._forget(stream)
        else:
            stream.phase = "waiting"  # it moves
        return [stream.name]

    def _ended(self, seat: WorkerSeat, message: Message) -> list[str]:
        """A worker's process is gone; returns the streams that it had."""
        with self._lock:
            seat.note_end(time.monotonic(), message["reason"])
            if self._stopping:
                return [stream.name for stream in self._streams.values() if stream.worker == seat.name]
            log.warning("worker %s has ended (%s), and is started again", seat.name, message["reason"])
            lost = [stream for stream in self._streams.values() if stream.worker == seat.name]
            guilty = self._quarantine.crashed(lost, time.monotonic()) if message["reason"] in CRASHES else []
            for stream in lost:
                stream.worker = None
                if stream.removed:
                    self._forget(stream)
                elif stream in guilty:
                    self._fail(stream, RefusedError("StreamError", f"its worker crashed with it: {message['reason']}"))
                elif stream.live is False and stream.phase == "open":
                    reason = f"its worker has ended ({message['reason']}) before the file was through"
                    self._finished[stream.name] = {"is": "gone", "stream": stream.name, "error": reason, "live": False}
                    self._fail(stream, RefusedError("StreamError", reason))
                else:
                    stream.phase = "waiting"
        return [stream.name for stream in lost]

    def _fail(self, stream: StreamState, error: RefusedError) -> None:
        stream.phase, stream.reason = "failed", str(error)
        waited = bool(stream.opening)
        for done in stream.opening:
            settle(done, error)
        stream.opening.clear()
        if stream.removed or (waited and not stream.opened):  # the caller knows; it never ran
            self._forget(stream)

    def _forget(self, stream: StreamState) -> None:
        if self._streams.get(stream.name) is stream:
            del self._streams[stream.name]
        for closing in stream.closing:
            settle(closing, None)
        stream.closing.clear()

    def _leave(self, name: str) -> None:
        """A stream runs no more where it did: its events go on if it will elsewhere, else they end."""
        with self._lock:
            stream = self._streams.get(name)
            goes_on = not self._stopping and stream is not None and not stream.removed and stream.phase != "failed"
        if goes_on:
            self._events.leave(name)
        else:
            self._events.end(name)

    def _close_there(self, stream: StreamState, *, moves: bool = False) -> None:
        worker = self._seats[stream.worker].worker if stream.worker else None
        if worker is not None:
            stream.phase = "closing"
            worker.send({"do": "close", "stream": stream.name, "key": stream.key, "moves": moves})

    def _place(self) -> None:
        """Open the streams that wait where they belong, and close those that belong elsewhere."""
        if self._stopping:
            return
        if not self._all_began(now := time.monotonic()):
            return
        slots = [seat.slot for seat in self._seats.values() if seat.ready or seat.comes_back(now)]
        wanted = [stream for stream in self._streams.values() if stream.phase != "failed" and not stream.removed]
        places = self._placement.place([stream.need for stream in wanted], slots, now)
        for stream in wanted:
            seat = self._seats.get(place := places.get(stream.name, ""))
            if seat is None or not seat.ready or seat.worker is None:
                continue
            if stream.phase == "waiting":
                if not self._quarantine.may_open(stream, (one for one in wanted if one.worker == place), now):
                    continue
                self._opened += 1
                events = self._events.of(stream.name)
                seat.worker.send({**stream.open_at(seat.name, self._opened), "events": events})
            elif stream.phase == "open" and stream.worker != place and stream.live:
                self._close_there(stream, moves=True)

    def _all_began(self, now: float) -> bool:
        """Whether streams may be opened: at first only when all workers take some, or one has for some time."""
        if not self._began and any(seat.ready for seat in self._seats.values()):
            self._ready_at = self._ready_at or now
            trying = [seat for seat in self._seats.values() if not seat.ready and not seat.failures]
            self._began = not trying or now > self._ready_at + GRACE_S
        return self._began
