"""The streams that are to run, and the commands to workers that make it so: each is opened, moved and closed by one.

A live stream moves without a gap: the worker that takes it connects to its source first and drops the frames, then the
other lets go, and only when that has answered does the first begin to give results. So one worker at most writes the
records of a stream at any time. Not thread-safe; knows no processes and no threads.
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
from saccade.pipeline.workers.states import RefusedError, StreamState, Successor, WorkerSeat, settle

HELD_S = 10.0  # for the worker that takes a stream to have frames of it, before the other lets go all the same
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
        self._to_begin: list[StreamState] = []

    # ---- what is to run

    def open(
        self, config: Mapping[str, Any], wanted: str, *, or_similar: bool, checked: bool, repeat: bool
    ) -> Future[str]:
        """As `Supervisor.open`."""
        taken = {name for name, stream in self.streams.items() if stream.phase != "failed"}
        name = free_name(wanted, taken) if or_similar else wanted
        check_free(name, taken)
        done: Future[str] = Future()
        stream = StreamState(name, {**config, "name": name}, checked, repeat)
        stream.opening.append(done)
        self.streams[name] = stream
        return done

    def close(self, name: str) -> Future[None]:
        """As `Supervisor.close_stream`."""
        stream = self.get(name)
        done: Future[None] = Future()
        stream.removed = True
        self._drop_successor(stream)
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
        self._drop_successor(stream)
        if config is not None and stream.phase == "open" and stream.live and stream.worker is not None:
            self._begin_move(stream, stream.worker, {**config, "name": name}, done)
            return done
        stream.opening.append(done)
        if config is not None:
            stream.config = {**config, "name": name}
            stream.outdated = stream.phase == "opening"
        if stream.phase == "failed":
            stream.phase, stream.reason = "waiting", None
        elif stream.phase == "open":
            self._close_there(stream)
        return done

    def get(self, name: str) -> StreamState:
        """The stream of a name; raises StreamError."""
        stream = self.streams.get(name)
        if stream is None:
            raise _none_of(name)
        return stream

    def of_worker(self, worker: str) -> list[StreamState]:
        """The streams that a worker has, or is to have when another has let them go."""
        return [
            stream
            for stream in self.streams.values()
            if stream.worker == worker or (stream.successor is not None and stream.successor.worker == worker)
        ]

    # ---- what workers say

    def take_report(self, worker: str, reports: Iterable[StreamReport]) -> None:
        """Take what a worker reports of its streams."""
        for one in reports:
            stream = self.streams.get(one.name)
            if stream is None or stream.worker != worker:
                continue
            stream.take(one)
            self._events.see(one.name, one.events)
            if one.settings is not None and stream.successor is not None and stream.successor.config is None:
                self._drop_successor(stream)  # which has those before; it is moved anew

    def take_answer(self, message: Message) -> list[str]:
        """Take what a worker says of a stream; returns the stream if it is there no more."""
        stream = self.streams.get(message["stream"])
        if stream is None:
            return []
        successor, kind = stream.successor, message["is"]
        if successor is not None and message["key"] == successor.key:
            return self._take_of_successor(stream, successor, message)
        if message["key"] != stream.key or kind == "held":
            return []
        if kind == "opened":
            stream.note_opened(message["live"], time.monotonic())
            if stream.removed or stream.outdated:
                self._close_there(stream)
            return []
        stream.worker = None
        if kind == "refused" and stream.outdated and not stream.removed:
            stream.phase = "waiting"
        elif kind == "refused":
            self._fail(stream, RefusedError(message["kind"], message["error"]))
        elif kind == "gone":  # a file is through, or a source has failed for good
            self.finished[stream.name] = message
            self._drop_successor(stream)
            if message["error"]:
                self._fail(stream, RefusedError("SourceError", message["error"]))
            else:
                self._forget(stream)
        elif message["error"]:
            self._drop_successor(stream)
            self._fail(stream, RefusedError("StreamError", message["error"]))
        elif stream.removed:
            self._forget(stream)
        else:
            self._follow_up(stream, message.get("captured"))
        return [stream.name]

    def lost_worker(self, worker: str, reason: str) -> list[str]:
        """A worker is gone; returns the streams that it had."""
        for stream in self.streams.values():
            if stream.successor is not None and stream.successor.worker == worker:
                self._drop_successor(stream)
        lost = [stream for stream in self.streams.values() if stream.worker == worker]
        guilty = self._quarantine.crashed(lost, time.monotonic()) if reason in CRASHES else []
        for stream in lost:
            stream.worker = None
            if stream.removed:
                self._forget(stream)
            elif stream in guilty:
                self._drop_successor(stream)
                self._fail(stream, RefusedError("StreamError", f"its worker crashed with it: {reason}"))
            elif stream.live is False and stream.phase == "open":
                error = f"its worker has ended ({reason}) before the file was through"
                self.finished[stream.name] = {"is": "gone", "stream": stream.name, "error": error, "live": False}
                self._fail(stream, RefusedError("StreamError", error))
            else:
                self._follow_up(stream, None)
        return [stream.name for stream in lost]

    # ---- what follows

    def place(self, seats: Mapping[str, WorkerSeat], now: float) -> None:
        """Open the streams that wait where they belong, and move those that belong elsewhere."""
        slots = [seat.slot for seat in seats.values() if seat.ready or seat.comes_back(now)]
        wanted = [stream for stream in self.streams.values() if stream.phase != "failed" and not stream.removed]
        places = self._placement.place([stream.need for stream in wanted], slots, now)
        moving = {stream.worker for stream in wanted if stream.successor is not None or stream.phase == "closing"}
        for stream in wanted:
            if stream.successor is not None:
                if not stream.successor.held and stream.phase == "open" and now > stream.successor.since + HELD_S:
                    self._close_there(stream, moves=True)
                continue
            seat = seats.get(place := places.get(stream.name, ""))
            if seat is None or not seat.ready:
                continue
            moves = stream.phase == "open" and stream.worker != place and bool(stream.live) and not stream.stays
            if not (moves and stream.worker not in moving) and stream.phase != "waiting":
                continue
            if not self._quarantine.may_open(stream, (one for one in wanted if one.worker == place), now):
                continue
            if moves:
                moving.add(stream.worker)  # one at a time
                self._begin_move(stream, place, seat.configs.get(stream.name))
            else:
                stream.config = dict(seat.configs.get(stream.name, stream.config))
                self._opened += 1
                self._send(place, {**stream.open_at(place, self._opened), "events": self._events.of(stream.name)})

    def begin(self) -> None:
        """Have the streams begin whose workers have let go, after what followed from that."""
        for stream in self._to_begin:
            if stream.worker is not None and stream.phase == "opening":
                begin = {"do": "begin", "stream": stream.name, "key": stream.key, "after": stream.captured}
                self._send(stream.worker, {**begin, "events": self._events.of(stream.name)})
        self._to_begin.clear()

    @property
    def unsettled(self) -> bool:
        """Whether something is under way that time alone may change."""
        return any(stream.phase == "waiting" or stream.successor is not None for stream in self.streams.values())

    def cancel(self) -> None:
        """Nothing more will come: tell those who wait."""
        for stream in self.streams.values():
            for waiting in stream.opening:
                waiting.cancel()
            for closing in stream.closing:
                closing.cancel()
            if stream.successor is not None and stream.successor.done is not None:
                stream.successor.done.cancel()

    # ---- within

    def _begin_move(
        self, stream: StreamState, worker: str, config: Mapping[str, Any] | None, done: Future[str] | None = None
    ) -> None:
        """Have a worker connect to its source, while it goes on where it is."""
        self._opened += 1
        own = None if config is None else dict(config)
        stream.successor = Successor(worker, self._opened, own, time.monotonic(), done=done)
        how = {"checked": stream.checked, "again": True, "repeat": stream.repeat, "held": True}
        command = {"do": "open", "stream": stream.name, "key": self._opened, "config": own or stream.config}
        self._send(worker, {**command, **how})

    def _take_of_successor(self, stream: StreamState, successor: Successor, message: Message) -> list[str]:
        """Take what the worker says that a stream moves to, before the other has let go."""
        if message["is"] == "held":
            successor.held = True
            if stream.phase == "open":
                self._close_there(stream, moves=True)
        elif message["is"] in ("refused", "gone", "closed"):
            kind = message.get("kind", "SourceError")
            self._end_successor(stream, RefusedError(kind, message["error"] or "its source has ended"))
        return []

    def _end_successor(self, stream: StreamState, error: RefusedError) -> None:
        """The worker that it was to move to cannot have it: it stays, unless only its source is to blame."""
        successor, stream.successor = stream.successor, None
        assert successor is not None
        if successor.done is not None:
            settle(successor.done, error)
        elif stream.phase == "open" and error.kind == "SourceError":
            self._close_there(stream, moves=True)  # a source that is there once, such as a device: then it has a gap
        elif stream.phase == "open":
            stream.stays = str(error)

    def _drop_successor(self, stream: StreamState) -> None:
        """It is not to move there, or that worker is gone."""
        successor, stream.successor = stream.successor, None
        if successor is None:
            return
        self._send(successor.worker, {"do": "close", "stream": stream.name, "key": successor.key})
        if successor.done is not None:  # another configuration, which it has from its next opening on
            stream.opening.append(successor.done)
            stream.config = dict(successor.config or stream.config)

    def _follow_up(self, stream: StreamState, captured: Any) -> None:
        """It is nowhere now: let the worker begin that is to have it, or wait for one."""
        successor, stream.successor = stream.successor, None
        if successor is None:
            stream.phase = "waiting"
            return
        stream.worker, stream.key, stream.phase = successor.worker, successor.key, "opening"
        stream.captured = captured
        if successor.config is not None:
            stream.config = dict(successor.config)
        if successor.done is not None:
            stream.opening.append(successor.done)
        self._to_begin.append(stream)

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
