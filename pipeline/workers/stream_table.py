"""The streams that are to run, what their workers say of them, and what follows.

`Supervisor` asks for streams, moves and ends; commands to workers make it so: each is opened, moved and closed by one.
A stream moves only where its worker is gone, or is to be replaced: that one lets go, and then another opens it. So one
worker at most writes the records of a stream at any time. Not thread-safe; knows no processes and no threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from saccade.pipeline.config.stream_names import check_free, free_name
from saccade.pipeline.errors import StreamError
from saccade.pipeline.workers.open_events import OpenEvents
from saccade.pipeline.workers.placement import Placement
from saccade.pipeline.workers.protocol import Message, StreamReport
from saccade.pipeline.workers.quarantine import CRASHES, Quarantine
from saccade.pipeline.workers.states import RefusedError, StreamState, WorkerSeat, settle

Send = Callable[[str, Message], None]


class StreamTable:
    """Streams by name.

    Args:
        placement: decides where they run.
        send: sends a command to a worker, by its name; does nothing where that is gone.
        events: those that go on.
    """

    def __init__(self, placement: Placement, send: Send, events: OpenEvents) -> None:
        self.streams: dict[str, StreamState] = {}
        self.finished: dict[str, Message] = {}
        self._placement = placement
        self._send = send
        self._events = events
        self._quarantine = Quarantine()
        self._opened = time.time_ns() // 1000  # workers may know keys of a supervisor that was before

    # ---- what is to run

    def open(self, config: Mapping[str, Any], wanted: str, *, or_similar: bool, checked: bool) -> Future[str]:
        """As `Supervisor.open`."""
        taken = {name for name, stream in self.streams.items() if stream.phase != "failed"}
        name = free_name(wanted, taken) if or_similar else wanted
        check_free(name, taken)
        done: Future[str] = Future()
        stream = StreamState(name, {**config, "name": name}, checked)
        stream.opening.append(done)
        self.streams[name] = stream
        return done

    def close(self, name: str) -> Future[None]:
        """As `Supervisor.close_stream`."""
        stream = self.get(name)
        done: Future[None] = Future()
        stream.removed = True
        if stream.phase in ("waiting", "failed"):
            self._forget(stream)
            settle(done, None)
        else:
            stream.closing.append(done)
            if stream.phase == "open":
                self._close_there(stream)
        return done

    def restart(self, name: str, config: Mapping[str, Any] | None) -> Future[str]:
        """As `Supervisor.restart`."""
        stream = self.get(name)
        if stream.removed:
            raise _none_of(name)
        done: Future[str] = Future()
        stream.opening.append(done)
        if config is not None:
            if stream.phase == "open" and stream.live:
                stream.before = stream.config
            stream.config = {**config, "name": name}
            stream.outdated = stream.phase == "opening"
        if stream.phase == "failed":
            stream.phase, stream.reason = "waiting", None
        elif stream.phase == "open":
            self._close_there(stream, moves=stream.before is not None)
        return done

    def get(self, name: str) -> StreamState:
        """The stream of a name; raises StreamError."""
        stream = self.streams.get(name)
        if stream is None:
            raise _none_of(name)
        return stream

    def of_worker(self, worker: str) -> list[StreamState]:
        """The streams that a worker has."""
        return [stream for stream in self.streams.values() if stream.worker == worker]

    # ---- what workers say

    def take_report(self, worker: str, reports: Iterable[StreamReport]) -> None:
        """Take what a worker reports of its streams."""
        for one in reports:
            stream = self.streams.get(one.name)
            if stream is None or stream.worker != worker:
                continue
            stream.take(one)
            self._events.see(one.name, one.events)

    def take_answer(self, message: Message) -> list[str]:
        """Take what a worker says of a stream; returns the stream if it is there no more."""
        stream = self.streams.get(message["stream"])
        if stream is None:
            return []
        kind = message["is"]
        if message["key"] != stream.key:
            return []
        if kind == "opened":
            stream.note_opened(message["live"], time.monotonic())
            if stream.removed or stream.outdated:
                self._close_there(stream)
            return []
        stream.worker = None
        if kind == "refused" and stream.outdated and not stream.removed:
            stream.phase = "waiting"
        elif kind == "refused" and stream.before is not None and not stream.removed:
            self._go_back(stream, RefusedError(message["kind"], message["error"]))
        elif kind == "refused":
            self._fail(stream, RefusedError(message["kind"], message["error"]))
        elif kind == "gone":  # a file is through, or a source has failed for good
            self.finished[stream.name] = message
            if message["error"]:
                self._fail(stream, RefusedError("SourceError", message["error"]))
            else:
                self._forget(stream)
        elif message["error"]:
            self._fail(stream, RefusedError("StreamError", message["error"]))
        elif stream.removed:
            self._forget(stream)
        else:
            stream.phase = "waiting"
        return [stream.name]

    def lost_worker(self, worker: str, reason: str) -> list[str]:
        """A worker is gone; returns the streams that it had."""
        lost = [stream for stream in self.streams.values() if stream.worker == worker]
        guilty = self._quarantine.crashed(lost, time.monotonic()) if reason in CRASHES else []
        for stream in lost:
            stream.worker = None
            if stream.removed:
                self._forget(stream)
            elif stream in guilty:
                self._fail(stream, RefusedError("StreamError", f"its worker crashed with it: {reason}"))
            elif stream.live is False and stream.phase == "open":
                error = f"its worker has ended ({reason}) before the file was through"
                self.finished[stream.name] = {"is": "gone", "stream": stream.name, "error": error, "live": False}
                self._fail(stream, RefusedError("StreamError", error))
            else:
                stream.phase = "waiting"
        return [stream.name for stream in lost]

    # ---- what follows

    def place(self, seats: Mapping[str, WorkerSeat], now: float) -> None:
        """Open the streams that wait where they belong, and move those that belong elsewhere."""
        slots = [seat.slot for seat in seats.values() if seat.ready or seat.comes_back(now)]
        wanted = [stream for stream in self.streams.values() if stream.phase != "failed" and not stream.removed]
        places = self._placement.place([stream.need for stream in wanted], slots, now)
        moving = {stream.worker for stream in wanted if stream.phase == "closing"}
        for stream in wanted:
            seat = seats.get(place := places.get(stream.name, ""))
            if seat is None or not seat.ready or stream.stays:
                continue
            moves = stream.phase == "open" and stream.worker != place and bool(stream.live)
            if not (moves and stream.worker not in moving) and stream.phase != "waiting":
                continue
            if not self._quarantine.may_open(stream, (one for one in wanted if one.worker == place), now):
                continue
            if moves:
                moving.add(stream.worker)  # one at a time
                if seats[stream.worker or ""].draining:
                    stream.before = stream.config
                self._close_there(stream, moves=True)
            else:
                stream.config = dict(seat.configs.get(stream.name, stream.config))
                self._opened += 1
                self._send(place, {**stream.open_at(place, self._opened), "events": self._events.of(stream.name)})

    @property
    def unsettled(self) -> bool:
        """Whether something is under way that time alone may change."""
        return any(stream.phase in ("waiting", "closing") for stream in self.streams.values())

    def cancel(self) -> None:
        """Nothing more will come: tell those who wait."""
        for stream in self.streams.values():
            for waiting in stream.opening:
                waiting.cancel()
            for closing in stream.closing:
                closing.cancel()

    # ---- within

    def _go_back(self, stream: StreamState, error: RefusedError) -> None:
        """It cannot be opened by its new configuration, or at its new worker: it goes on as it was."""
        assert stream.before is not None
        if not stream.opening:  # it was to move, and whoever replaces its worker decides what follows
            stream.stays = str(error)
        for done in stream.opening:
            settle(done, error)
        stream.opening.clear()
        stream.config, stream.before, stream.phase = stream.before, None, "waiting"

    def _fail(self, stream: StreamState, error: RefusedError) -> None:
        stream.phase, stream.reason = "failed", str(error)
        waited = bool(stream.opening)
        for done in stream.opening:
            settle(done, error)
        stream.opening.clear()
        if stream.removed or (waited and not stream.opened):  # the caller knows; it never ran
            self._forget(stream)

    def _forget(self, stream: StreamState) -> None:
        if self.streams.get(stream.name) is stream:
            del self.streams[stream.name]
        for closing in stream.closing:
            settle(closing, None)
        stream.closing.clear()

    def _close_there(self, stream: StreamState, *, moves: bool = False) -> None:
        if stream.worker is not None:
            stream.phase = "closing"
            self._send(stream.worker, {"do": "close", "stream": stream.name, "key": stream.key, "moves": moves})


def _none_of(name: str) -> StreamError:
    return StreamError(f"no stream is called '{name[:80]}'")
