"""A function that is called for every frame."""

from __future__ import annotations

import threading
import time

import pytest

from saccade.sinks import (
    CallbackSink,
    SinkClosedError,
    SinkError,
)
from tests.support.sinks.results import FRAME, LATENCY, RESULT


def test_a_callback_is_called_for_every_frame_until_it_is_closed() -> None:
    calls: list[tuple[object, ...]] = []
    sink = CallbackSink(lambda *given: calls.append(given))
    assert sink.shared
    sink.write(FRAME, RESULT, LATENCY)
    sink.close()
    sink.close()
    with pytest.raises(SinkClosedError):
        sink.write(FRAME, RESULT, LATENCY)
    assert calls == [(FRAME, RESULT, LATENCY)]


def test_a_callback_is_called_by_one_thread_at_a_time() -> None:
    inside, most = 0, 0

    def callback(*_: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        inside -= 1

    sink = CallbackSink(callback)
    threads = [
        threading.Thread(target=lambda: [sink.write(FRAME, RESULT, LATENCY) for _ in range(10)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_an_exception_of_a_callback_is_passed_on() -> None:
    def callback(*_: object) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        CallbackSink(callback).write(FRAME, RESULT, LATENCY)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(SinkError, match=r"must be callable with .*; got 5"):
        CallbackSink(5)  # type: ignore[arg-type]
