"""Stands between a worker's process and a supervisor that may go and come back: on the worker's machine, beside it.

The process goes on while no supervisor is there; what it sends meanwhile is kept. A supervisor that has started anew,
and wants a stream that runs already, gets the answer that it is open: nothing is interrupted. Knows no Ray, but the
actor around it does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from saccade.pipeline.workers.process.process_worker import METHOD, ProcessWorker, StartMethod
from saccade.pipeline.workers.protocol import Message, Worker

MAX_MESSAGES = 10_000  # events of hours; reports are kept once
MAX_RESULTS = 256  # of frames, for the sinks of all streams; then live streams lose their oldest


@dataclass(slots=True)
class _Open:
    """A stream that the worker has: its configuration as it is now, and its key there and for the supervisor."""

    config: dict[str, Any]
    live: bool
    key: int
    asked_key: int


class Relay:
    """One worker's process after the other. Every method is callable from any thread.

    Args:
        method: how processes are started.
    """

    def __init__(self, method: StartMethod = METHOD) -> None:
        self._method = method
        self._changed = threading.Condition()  # over what follows
        self._worker: ProcessWorker | None = None
        self._ready: Message | None = None  # as it came
        self._streams: dict[str, _Open] = {}
        self._opening: dict[int, dict[str, Any]] = {}  # key → configuration
        self._held: dict[int, str] = {}  # key → name: open there, while another worker has the stream
        self._later: dict[str, Message] = {}  # to be opened when what has the name is closed
        self._messages: deque[Message] = deque()
        self._results: deque[bytes] = deque()

    def start(self, settings: Mapping[str, Any], results: bool) -> None:
        """Start a process, instead of one that runs, and forget what that has sent, but for its events.

        Args:
            settings: as `run_worker` takes them.
            results: whether what streams find is wanted here.
        """
        with self._changed:
            old = self._worker
            worker = ProcessWorker(
                "relayed", settings, self._take, self._receive if results else None, method=self._method
            )
            self._worker, self._ready = worker, None
            self._messages = _lasting(self._messages)
            for kept in (self._streams, self._opening, self._held, self._later, self._results):
                kept.clear()
            self._changed.notify_all()
        _kill(old)
        worker.start()

    def attach(self, wanted: Collection[str]) -> bool:
        """Another supervisor takes over; False if no worker is ready.

        Args:
            wanted: names of the streams that are to run; others are closed.
        """
        with self._changed:
            if self._ready is None or self._worker is None:
                return False
            for name, one in self._streams.items():
                if name not in wanted:
                    self._worker.send({"do": "close", "stream": name, "key": one.key})
            for key, name in self._held.items():
                self._worker.send({"do": "close", "stream": name, "key": key})
            # Answers to the last supervisor mean nothing to this one; events do.
            self._messages = deque([self._ready, *_lasting(self._messages)])
            self._changed.notify_all()
            return True

    def send(self, command: Message) -> None:
        """Hand on a command."""
        with self._changed:
            if self._worker is None:
                return
            known = self._streams.get(command.get("stream", ""))
            if command.get("held"):
                self._opening[command["key"]] = dict(command["config"])
                self._held[command["key"]] = command["stream"]
            elif command["do"] == "begin":
                self._held.pop(command["key"], None)
            elif command["do"] == "open":
                if known is not None and known.config == command["config"]:
                    known.asked_key = command["key"]
                    self._add({"is": "opened", "stream": command["stream"], "key": command["key"], "live": known.live})
                    return
                # What the stream has of its events ends with it, as its worker says: nothing of them is to go on.
                later = {**command, "events": []}
                if known is not None:
                    self._later[command["stream"]] = later
                    command = {"do": "close", "stream": command["stream"], "key": known.key}
                elif any(config["name"] == command["stream"] for config in self._opening.values()):
                    self._later[command["stream"]] = later  # the last supervisor's opening has no answer yet
                    return
                else:
                    self._opening[command["key"]] = dict(command["config"])
            elif command["do"] == "close" and known is not None and command["key"] == known.asked_key:
                command = {**command, "key": known.key}
            self._worker.send(command)

    def poll(self, wait_s: float, most: int = 64) -> tuple[list[Message], list[bytes]]:
        """What the worker has sent, and the results of its frames as they came, at most so many of each.

        Args:
            wait_s: how long to wait if there is nothing.
            most: how many at a time.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not (self._messages or self._results):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            messages = [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
            results = [self._results.popleft() for _ in range(min(most, len(self._results)))]
            self._changed.notify_all()
        return messages, results

    def kill(self) -> None:
        """End the process at once; its end is a message."""
        with self._changed:
            worker = self._worker
        _kill(worker)

    @property
    def streams(self) -> dict[str, dict[str, Any]]:
        """The configurations of the streams that the worker has, by name."""
        with self._changed:
            return {name: dict(one.config) for name, one in self._streams.items()}

    @property
    def pid(self) -> int | None:
        """The id of the worker's process; None while none runs."""
        with self._changed:
            return self._worker.pid if self._worker is not None and self._worker.state != "ended" else None

    # ---- from the worker

    def _take(self, worker: Worker, message: Message) -> None:
        with self._changed:
            if worker is not self._worker:
                return
            kind = message["is"]
            if kind == "ready":
                self._ready = message
            elif kind == "report":
                self._note_settings(message)
                newest = self._messages[-1] if self._messages else None
                if newest is not None and newest["is"] == "report":
                    message = newer_report(self._messages.pop(), message)
            elif kind in ("opened", "refused", "closed", "gone"):
                message = self._answered(message)
            elif kind == "ended":
                self._ready = None
                self._streams.clear()
            self._add(message)

    def _answered(self, message: Message) -> Message:
        name, key = message["stream"], message["key"]
        config = self._opening.pop(key, None)
        self._held.pop(key, None)
        if message["is"] == "opened":
            one = self._streams[name] = _Open(config or {}, message["live"], key, key)
            if (command := self._later.get(name)) is not None and self._worker is not None:
                if command["config"] == one.config:
                    del self._later[name]
                    one.asked_key = command["key"]
                    return {**message, "key": one.asked_key}
                self._worker.send({"do": "close", "stream": name, "key": key})
            return message
        known = self._streams.get(name)
        if known is not None and known.key == key:
            del self._streams[name]
            message = {**message, "key": known.asked_key}
        if name in self._later and self._worker is not None:
            command = self._later.pop(name)
            self._opening[command["key"]] = dict(command["config"])
            self._worker.send(command)
        return message

    def _note_settings(self, report: Message) -> None:
        for one in report["streams"]:
            if one["settings"] is not None and one["name"] in self._streams:
                self._streams[one["name"]].config = {**one["settings"], "name": one["name"]}

    def _add(self, message: Message) -> None:
        if len(self._messages) >= MAX_MESSAGES:
            self._messages.popleft()
        self._messages.append(message)
        self._changed.notify_all()

    def _receive(self, connection: Connection) -> None:
        """Keep results until they are taken; where too many wait, the process with the streams does."""
        worker = self._worker
        while True:
            try:
                data = connection.recv_bytes()
            except (EOFError, OSError):
                return
            with self._changed:
                self._changed.wait_for(lambda: len(self._results) < MAX_RESULTS or self._worker is not worker)
                if self._worker is worker:
                    self._results.append(data)
                    self._changed.notify_all()


def _lasting(messages: Iterable[Message]) -> deque[Message]:
    """Those that mean the same to any supervisor, whatever runs now."""
    return deque(message for message in messages if message["is"] in ("event", "warning"))


def newer_report(old: Message, new: Message) -> Message:
    """A report instead of an older one that nobody has read: with the settings that changed before that."""
    changed = {one["name"]: one["settings"] for one in old["streams"] if one["settings"] is not None}
    streams = [
        {**one, "settings": changed.get(one["name"]) if one["settings"] is None else one["settings"]}
        for one in new["streams"]
    ]
    return {**new, "streams": streams}


def _kill(worker: ProcessWorker | None) -> None:
    if worker is not None and worker.state != "ended":
        with contextlib.suppress(ValueError):  # it has ended just now
            worker.kill()
