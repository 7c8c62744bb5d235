"""A relay over a real worker: supervisors come and go, and the streams go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from saccade.pipeline.workers.protocol import Message
from saccade.pipeline.workers.relay import Relay, newer_report
from tests.support.worker_here import SETTINGS, small_camera

LONG_S = 90.0


def until(relay: Relay, wanted: Callable[[Message], bool]) -> tuple[Message, int]:
    """The first message that is wanted, and how many results came until then."""
    deadline, results = time.monotonic() + LONG_S, 0
    while time.monotonic() < deadline:
        messages, found = relay.poll(1.0, most=1)
        results += len(found)
        for message in messages:
            if wanted(message):
                return message, results
    raise AssertionError("it did not come")


def answer(relay: Relay, kind: str, key: int) -> Message:
    return until(relay, lambda message: message["is"] == kind and message.get("key") == key)[0]


def frames(relay: Relay, least: int) -> int:
    def has(message: Message) -> bool:
        return message["is"] == "report" and any(one["frames"] >= least for one in message["streams"])

    return int(until(relay, has)[0]["streams"][0]["frames"])


@pytest.fixture(scope="module")
def camera() -> Iterator[str]:
    with small_camera() as url:
        yield url


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    one = Relay()
    one.start(SETTINGS, results=True)
    until(one, lambda message: message["is"] == "ready")
    yield one
    one.send({"do": "stop"})
    until(one, lambda message: message["is"] == "ended")
    assert not one.alive


def config(camera: str, name: str = "room", **values: Any) -> dict[str, Any]:
    return {"name": name, "source": camera, "detect": ["person"], **values}


def opening(stream: str, key: int, values: dict[str, Any]) -> Message:
    command = {"do": "open", "stream": stream, "key": key, "config": values}
    return {**command, "checked": False, "again": False, "repeat": False}


def test_a_stream_goes_on_under_another_supervisor(relay: Relay, camera: str) -> None:
    relay.send(opening("room", 1, config(camera)))
    assert answer(relay, "opened", 1)["live"]
    seen = frames(relay, 3)
    assert relay.attach(["room"])
    assert relay.poll(0.0, most=1)[0][0]["is"] == "ready"
    relay.send(opening("room", 100, relay.streams["room"]))
    assert answer(relay, "opened", 100)["live"]
    assert frames(relay, seen + 1) > seen  # counted from the first opening
    _, results = until(relay, lambda message: message["is"] == "report")
    assert results >= 0
    relay.send({"do": "close", "stream": "room", "key": 100})
    assert answer(relay, "closed", 100)["error"] is None


def test_another_configuration_opens_a_stream_anew(relay: Relay, camera: str) -> None:
    relay.send(opening("room", 2, config(camera)))
    answer(relay, "opened", 2)
    seen = frames(relay, 10)
    assert relay.attach(["room"])
    relay.send(opening("room", 101, config(camera, conf=0.9)))
    answer(relay, "opened", 101)
    assert relay.streams["room"]["conf"] == 0.9
    assert frames(relay, 1) < seen


def test_streams_that_are_not_wanted_any_more_are_closed(relay: Relay, camera: str) -> None:
    assert relay.attach([])
    until(relay, lambda message: message["is"] == "closed")
    assert relay.streams == {}


def test_results_wait_until_they_are_taken(relay: Relay, camera: str) -> None:
    relay.send(opening("hall", 3, config(camera, "hall")))
    answer(relay, "opened", 3)
    deadline, results = time.monotonic() + LONG_S, 0
    while results < 3 and time.monotonic() < deadline:
        results += len(relay.poll(1.0)[1])
    assert results >= 3


def test_nothing_is_taken_over_where_nothing_runs() -> None:
    empty = Relay()
    assert not empty.attach([])
    assert empty.poll(0.0) == ([], [])
    empty.send({"do": "report"})
    assert not empty.alive


def test_unread_reports_keep_what_changed_before_the_newest() -> None:
    empty: Message = {"name": "room", "settings": None, "frames": 1}
    old: Message = {"is": "report", "streams": [{**empty, "settings": {"conf": 0.4}}, {**empty, "name": "gone"}]}
    new: Message = {"is": "report", "streams": [{**empty, "frames": 2}, {**empty, "name": "hall"}]}
    room, hall = newer_report(old, new)["streams"]
    assert room == {"name": "room", "settings": {"conf": 0.4}, "frames": 2}
    assert hall["settings"] is None


def test_an_opening_under_way_is_answered_to_the_next_supervisor(relay: Relay, camera: str) -> None:
    relay.attach([])
    relay.send(opening("yard", 5, config(camera, "yard")))
    relay.attach(["yard"])
    relay.send(opening("yard", 6, config(camera, "yard")))
    assert answer(relay, "opened", 6)["live"]
    assert frames(relay, 1) >= 1
