"""A worker's process and its commands, from a supervisor that is this test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from saccade.pipeline.workers.process.process_worker import ProcessWorker
from saccade.pipeline.workers.protocol import Message
from tests.support.worker_process import SETTINGS, small_camera

LONG_S = 90.0


@pytest.fixture
def camera() -> Iterator[str]:
    with small_camera() as url:
        yield url


def frames(messages: SimpleQueue[Message], least: int) -> int:
    """Frames of the one stream, once there are so many."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        message = messages.get(timeout=LONG_S)
        for stream in message["streams"] if message["is"] == "report" else ():
            if stream["frames"] >= least:
                return int(stream["frames"])
    raise AssertionError("no frames come")


def test_a_late_close_of_another_opening_ends_no_stream(camera: str) -> None:
    messages: SimpleQueue[Message] = SimpleQueue()
    worker = ProcessWorker("1", SETTINGS, lambda worker, message: messages.put(message))
    worker.start()
    while messages.get(timeout=LONG_S)["is"] != "ready":
        pass
    config = {"source": camera, "detect": ["person"]}
    worker.send({"do": "open", "stream": "room", "key": 1, "config": config})
    seen = frames(messages, 1)
    # As of a configuration that was tried, and whose source has ended just before it was given up.
    worker.send({"do": "close", "stream": "room", "key": 2})
    while (message := messages.get(timeout=LONG_S))["is"] != "closed":
        pass
    assert (message["key"], message["error"]) == (2, None)
    assert frames(messages, seen + 1) > seen
    worker.send({"do": "close", "stream": "room", "key": 1})
    while messages.get(timeout=LONG_S)["is"] != "closed":
        pass
    worker.stop()
    while messages.get(timeout=LONG_S)["is"] != "ended":
        pass
