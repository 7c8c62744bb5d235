"""A worker and its commands, from a supervisor that is this test."""

from __future__ import annotations

import time
from queue import SimpleQueue

import pytest

from saccade.pipeline.workers.protocol import Message
from saccade.pipeline.workers.worker import Load, WorkerRun
from tests.support.worker_here import SETTINGS, small_camera

LONG_S = 90.0


def report(messages: SimpleQueue[Message], least: int) -> Message:
    """A report, once the one stream has so many frames."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        message = messages.get(timeout=LONG_S)
        if message["is"] == "report" and any(stream["frames"] >= least for stream in message["streams"]):
            return message
    raise AssertionError("no frames come")


def test_a_late_close_of_another_opening_ends_no_stream() -> None:
    messages: SimpleQueue[Message] = SimpleQueue()
    worker = WorkerRun(SETTINGS, messages.put)
    worker.start()
    while messages.get(timeout=LONG_S)["is"] != "ready":
        pass
    with small_camera() as camera:
        worker.do({"do": "open", "stream": "room", "key": 1, "config": {"source": camera, "detect": ["person"]}})
        seen = report(messages, 1)["streams"][0]["frames"]
        worker.do({"do": "close", "stream": "room", "key": 2})
        while (message := messages.get(timeout=LONG_S))["is"] != "closed":
            pass
        assert (message["key"], message["error"]) == (2, None)
        after = report(messages, seen + 1)
        assert after["streams"][0]["frames"] > seen
        assert 0 < after["busy"] <= 1  # of the engine's time
        worker.do({"do": "close", "stream": "room", "key": 1})
        while messages.get(timeout=LONG_S)["is"] != "closed":
            pass
    worker.do({"do": "stop"})
    while (message := messages.get(timeout=LONG_S))["is"] != "ended":
        pass
    assert message["reason"] == "it was stopped"


def test_what_cannot_begin_says_why() -> None:
    messages: SimpleQueue[Message] = SimpleQueue()
    WorkerRun({**SETTINGS, "config": {**SETTINGS["config"], "model": "/none"}}, messages.put).start()  # type: ignore[dict-item]
    failed, ended = messages.get(timeout=LONG_S), messages.get(timeout=LONG_S)
    assert (failed["is"], ended) == ("failed", {"is": "ended", "reason": failed["error"]})


@pytest.mark.parametrize(
    ("readings", "shares"),
    [
        ([(0.0, 10.0), (0.5, 11.0), (0.5, 12.0)], [0.0, 0.5, 0.0]),
        ([(7.0, 10.0), (9.5, 11.0)], [0.0, 1.0]),  # a step that began before
        ([(7.0, 10.0), (7.0, 10.0), (0.0, 11.0)], [0.0, 0.0, 0.0]),  # an engine that was replaced
    ],
)
def test_load_is_the_busy_share_of_the_engine(readings: list[tuple[float, float]], shares: list[float]) -> None:
    load = Load()
    assert [load.share(*reading) for reading in readings] == shares
