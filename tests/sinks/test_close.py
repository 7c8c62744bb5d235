"""Closing: whatever receivers do, every sink ends within the 5 s that a process has after a signal."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from websockets.sync.client import connect

from saccade.sinks import Sink, open_sink
from tests.support.sinks.feed import UNREAD, until, write
from tests.support.sinks.results import LATENCY, live_frame, showing

LIMIT_S = 4.7  # what the command line gives a process


@pytest.fixture
def deaf() -> Iterator[int]:
    """The port of a server that accepts every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "target",
    [
        "mqtt://127.0.0.1:PORT",
        "http://127.0.0.1:PORT/",
        "http://127.0.0.1:PORT/#send=events&concurrency=4",
        "mqtt://127.0.0.1:9",
        "http://127.0.0.1:9/",
    ],
)
def test_a_receiver_that_does_not_answer_delays_no_end(deaf: int, target: str) -> None:
    sink = open_sink(target.replace("PORT", str(deaf)))
    for second in range(5):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    time.sleep(0.3)  # so that something is under way
    assert seconds_to_close(sink) < LIMIT_S
    assert not [thread for thread in threading.enumerate() if target.partition("//")[2][:9] in thread.name]


def test_a_client_that_never_reads_delays_no_end() -> None:
    sink = open_sink("ws://127.0.0.1:0")
    with connect(sink.url, **UNREAD):  # type: ignore[attr-defined]
        until(lambda: sink.clients == 1)  # type: ignore[attr-defined]
        while not sink.dropped:  # type: ignore[attr-defined]
            write(sink, size=200_000)  # type: ignore[arg-type]
        assert seconds_to_close(sink) < LIMIT_S


def seconds_to_close(sink: Sink) -> float:
    begun = time.monotonic()
    sink.close()
    return time.monotonic() - begun
