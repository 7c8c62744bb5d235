"""Workers in a test's own process, instead of actors; their settings, and a camera of a few small frames a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.workers.protocol import Message, Worker, WorkerState
from saccade.pipeline.workers.worker import WorkerRun
from tests.support.cameras.faulty import FaultyCamera, coded_clip

SETTINGS = {
    "config": {"device": "cpu", "http": "127.0.0.1:0", "sinks": []},
    "index": 0,
    "threads": 1,
    "secret": "sesame",
    "media": None,
    "open_by_default": True,
}


class WorkerHere:
    """A `WorkerRun` of this process, as its supervisor sees it; arguments as those of `RayWorker`."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        on_message: Callable[[Worker, Message], None],
        on_results: Callable[[bytes], None] | None = None,
    ) -> None:
        self.name = name
        self.state: WorkerState = "starting"
        self._on_message = on_message
        self._run = WorkerRun(settings, self._take, on_results)

    def start(self) -> None:
        self._run.start()

    def send(self, command: Message) -> None:
        self._run.do(command)

    def stop(self) -> None:
        self.send({"do": "stop"})

    def kill(self) -> None:
        self.stop()

    def _take(self, message: Message) -> None:
        if message["is"] in ("ready", "ended"):
            self.state = message["is"]
        self._on_message(self, message)


@contextmanager
def small_camera() -> Iterator[str]:
    """The address of an RTSP camera that loops over 4 s of the demo clip."""
    one = FaultyCamera(coded_clip(DEMO_CLIP, (320, 180), rate=5, seconds=4), rate=5)
    yield f"rtsp://127.0.0.1:{one.port}/live"
    one.close()
