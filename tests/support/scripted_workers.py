"""Workers that follow a script, and a supervisor that has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from saccade.pipeline.workers.protocol import Message, Worker, WorkerState
from saccade.pipeline.workers.supervisor import Supervisor
from tests.support.cameras import wait_for

LONG_S = 20.0
CONFIG = {"source": "rtsp://192.0.2.7/a", "detect": ["person"]}


class ScriptedWorker:
    """Answers when a test says so, and keeps what it is asked."""

    def __init__(self, name: str, on_message: Callable[[Worker, Message], None]) -> None:
        self.name = name
        self.state: WorkerState = "starting"
        self.asked: list[Message] = []
        self.open: dict[str, Message] = {}
        self.killed = False
        self._on_message = on_message

    def start(self) -> None:
        """Nothing to start."""

    def send(self, command: Message) -> None:
        self.asked.append(command)

    def stop(self) -> None:
        self.end("exit code 0")

    def kill(self) -> None:
        self.killed = True
        self.end("SIGKILL")

    def tell(self, what: str, /, **values: Any) -> None:
        self._on_message(self, {"is": what, **values})

    def get_ready(self) -> None:
        self.state = "ready"
        self.tell("ready", url=f"http://127.0.0.1/{self.name}", pid=1)

    def end(self, reason: str) -> None:
        if self.state != "ended":
            self.state = "ended"
            self.open.clear()
            self.tell("ended", reason=reason)

    def refuse(self, command: Message, kind: str, error: str) -> None:
        """Do not open what a command says."""
        self.tell("refused", stream=command["stream"], key=command["key"], kind=kind, error=error)

    def answer(self, live: bool = True) -> None:
        """Do everything that was asked."""
        while self.asked and self.state != "ended":
            command = self.asked.pop(0)
            name, key = command.get("stream", ""), command.get("key", 0)
            if command["do"] == "open":
                assert name not in self.open
                self.open[name] = command
                self.tell("opened", stream=name, key=key, live=live)
            elif command["do"] == "close":
                if name in self.open and self.open[name]["key"] == key:
                    del self.open[name]
                self.tell("closed", stream=name, key=key, error=None)


class Scene:
    """A supervisor and its workers, which are ready."""

    def __init__(self, names: list[str], **values: Any) -> None:
        self.made: dict[str, list[ScriptedWorker]] = {name: [] for name in names}
        self.lost: list[tuple[str, bool]] = []
        self.supervisor = Supervisor(
            self._make,
            names,
            on_lost=lambda stream, ended: self.lost.append((stream, ended)),
            on_warning=print,
            **values,
        )

    def _make(self, name: str, on_message: Callable[[Worker, Message], None]) -> ScriptedWorker:
        worker = ScriptedWorker(name, on_message)
        self.made.setdefault(name, []).append(worker)
        return worker

    def worker(self, name: str, number: int = -1) -> ScriptedWorker:
        """The newest process of a worker, or one of a number; waits until it has been started."""
        wait_for(lambda: len(self.made[name]) > number if number >= 0 else bool(self.made[name]), LONG_S)
        self.place()
        return self.made[name][number]

    def place(self) -> None:
        """Decide now, as the supervisor's thread is about to."""
        with self.supervisor._lock:
            self.supervisor._place(time.monotonic())

    def phase(self, stream: str) -> str:
        return self.supervisor.streams()[stream].phase


@contextmanager
def scene(*names: str, **values: Any) -> Iterator[Scene]:
    made = Scene(list(names) or ["1", "2"], **values)
    made.supervisor.start()
    try:
        for name in made.made:
            wait_for(lambda name=name: bool(made.worker(name).asked is not None), LONG_S)
            wait_for(lambda name=name: bool(seat_of(made, name).worker), LONG_S)
            made.worker(name).get_ready()
        yield made
    finally:
        assert made.supervisor.close(LONG_S)


def seat_of(made: Scene, name: str) -> Any:
    return next(seat for seat in made.supervisor.seats() if seat.name == name)
