"""Stands between a worker and a supervisor that may go and come back: in the worker's process.

The worker goes on while no supervisor is there; what it sends meanwhile is kept. A supervisor that has started anew,
and wants a stream that runs already, gets the answer that it is open: nothing is interrupted. Knows no Ray, but the
actor around it does.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.pipeline.workers.protocol import Message
from saccade.pipeline.workers.worker import WorkerRun

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
    """One worker from its start to its end. Every method is callable from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over what follows
        self._worker: WorkerRun | None = None
        self._ready: Message | None = None  # as it came
        self._streams: dict[str, _Open] = {}
        self._opening: dict[int, dict[str, Any]] = {}  # key → configuration
        self._later: dict[str, Message] = {}  # to be opened when what has the name is closed
        self._messages: deque[Message] = deque()
        self._results: deque[bytes] = deque()

    def start(self, settings: Mapping[str, Any], results: bool) -> None:
        """Start the worker.

        Args:
            settings: as `WorkerRun` takes them.
            results: whether what streams find is wanted here.

        Raises:
            RuntimeError: if one runs here.
        """
        with self._changed:
            if self._worker is not None and self._worker.alive:
                raise RuntimeError("a worker of that name runs already")
            self._worker = WorkerRun(settings, self._take, self._take_result if results else None)
            self._worker.start()

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
                    self._worker.do({"do": "close", "stream": name, "key": one.key})
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
            if command["do"] == "open":
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
            self._worker.do(command)

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
        """End the process, and so whatever else runs in it, at once; Ray starts its actor again."""
        if self.alive:
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def streams(self) -> dict[str, dict[str, Any]]:
        """The configurations of the streams that the worker has, by name."""
        with self._changed:
            return {name: dict(one.config) for name, one in self._streams.items()}

    @property
    def alive(self) -> bool:
        """Whether a worker runs."""
        with self._changed:
            return self._worker is not None and self._worker.alive

    # ---- from the worker

    def _take(self, message: Message) -> None:
        with self._changed:
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
        if message["is"] == "opened":
            one = self._streams[name] = _Open(config or {}, message["live"], key, key)
            if (command := self._later.get(name)) is not None and self._worker is not None:
                if command["config"] == one.config:
                    del self._later[name]
                    one.asked_key = command["key"]
                    return {**message, "key": one.asked_key}
                self._worker.do({"do": "close", "stream": name, "key": key})
            return message
        known = self._streams.get(name)
        if known is not None and known.key == key:
            del self._streams[name]
            message = {**message, "key": known.asked_key}
        if name in self._later and self._worker is not None:
            command = self._later.pop(name)
            self._opening[command["key"]] = dict(command["config"])
            self._worker.do(command)
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

    def _take_result(self, data: bytes) -> None:
        """Keep a result until it is taken; where too many wait, the stream does."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._results) < MAX_RESULTS)
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
