"""A worker as a process of this machine. Knows how to start, reach and end it; nothing of streams."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Literal

from saccade.pipeline.workers.process.channel import Channel
from saccade.pipeline.workers.process.worker_main import run_worker
from saccade.pipeline.workers.protocol import Message, WorkerState
from saccade.processors import usable_processors

StartMethod = Literal["spawn", "forkserver"]
METHOD: StartMethod = "forkserver" if sys.platform == "linux" else "spawn"
"""How workers are started: forked from a process that has imported all and started nothing, no CUDA either.

On two processors with a load of 11, a worker that was killed was ready again after 0.3 to 1.8 s, and spawned after 8 to
13 s: loading torch takes that long. A macOS process is not safe to fork.
"""

_END_S = 2.0
_LAST_RESULTS_S = 10.0  # an output that hangs takes none, and must not keep the worker's successor from being started
_PRELOADED = ["saccade.pipeline.workers.process.worker_main", "saccade.pipeline.workers.process.preload"]


class ProcessWorker:
    """See `protocol.Worker`. It is used once: its successor is another object of the same name.

    Args:
        name: of the worker.
        settings: as `run_worker` takes them.
        on_message: called with the worker and each message; the last one is {"is": "ended", "reason": …}. It must not
            raise.
        on_results: called in a thread of its own with the connection through which results come; None for none.
        method: how its process is started.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        on_message: Callable[[ProcessWorker, Message], None],
        on_results: Callable[[Connection], None] | None = None,
        method: StartMethod = METHOD,
    ) -> None:
        self._name = name
        self._settings = dict(settings)
        self._on_message = on_message
        self._on_results = on_results
        self._context = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(_PRELOADED)
        self._state: WorkerState = "starting"
        self._process: multiprocessing.process.BaseProcess | None = None
        self._channel: Channel | None = None
        self._commands: SimpleQueue[Message | None] = SimpleQueue()

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def state(self) -> WorkerState:
        """How far it is."""
        return self._state

    @property
    def pid(self) -> int | None:
        """The id of its process; None before `start`, and after its end."""
        with suppress(ValueError):  # it has ended, and is forgotten
            return None if self._process is None else self._process.pid
        return None

    def start(self) -> None:
        """Start the process; returns at once."""
        control, theirs = self._context.Pipe()
        results: Connection | None = None
        results_theirs: Connection | None = None
        if self._on_results is not None:
            results, results_theirs = self._context.Pipe(duplex=False)
        settings = json.dumps(self._settings)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_worker, args=(settings, theirs, results_theirs), name=f"saccade {self._name}", daemon=True
        )
        process.start()
        theirs.close()
        if results_theirs is not None:
            results_theirs.close()
        self._process, self._channel = process, Channel(control)
        reading = None
        if results is not None:
            reading = threading.Thread(target=self._receive, args=(results,), name="saccade results", daemon=True)
            reading.start()
        threading.Thread(target=self._send, args=(self._channel,), name="saccade commands", daemon=True).start()
        threading.Thread(target=self._watch, args=(reading,), name="saccade worker", daemon=True).start()

    def send(self, command: Message) -> None:
        """Send a command; nothing happens where the process has gone, which is reported as a message."""
        self._commands.put(command)

    def stop(self) -> None:
        """Have it close everything and end."""
        self.send({"do": "stop"})

    def kill(self) -> None:
        """End it at once."""
        with suppress(ValueError):  # it has ended, and is forgotten
            if self._process is not None:
                self._process.kill()

    def _send(self, channel: Channel) -> None:
        """Hand on commands: one that hangs reads none, and its supervisor must not wait for it with its lock held."""
        while (command := self._commands.get()) is not None:
            channel.send(command)

    def _receive(self, results: Connection) -> None:
        assert self._on_results is not None
        try:
            self._on_results(results)
        finally:
            results.close()

    def _watch(self, reading: threading.Thread | None) -> None:
        assert self._channel is not None
        assert self._process is not None
        reason = None
        for message in self._channel.messages():
            if message["is"] == "ready":
                self._state = "ready"
            elif message["is"] == "failed":
                reason = message["error"]
            self._on_message(self, message)
        self._process.join(_END_S)
        if self._process.exitcode is None:  # it has closed its connection, and goes on
            self._process.kill()
            self._process.join()
        if reading is not None:
            reading.join(_LAST_RESULTS_S)
        self._state = "ended"
        self._commands.put(None)
        code = self._process.exitcode or 0
        reason = reason or (signal_of(code) if code < 0 else f"exit code {code}")
        self._channel.close()
        self._process.close()
        self._on_message(self, {"is": "ended", "reason": reason, "code": code})


def signal_of(code: int) -> str:
    """The name of the signal that ended a process with a negative exit code."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def threads_each(workers: int) -> int:
    """How many threads each of so many workers has for an operation of its engine; 0 to leave that to the environment.

    Together they use half of the processors, as one engine does: decoders and encoders need the rest.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return 0
    return max(1, usable_processors() // (2 * workers))
