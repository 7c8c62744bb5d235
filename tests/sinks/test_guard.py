"""A sink that fails: paused, counted, tried again, and nothing else stopped by it."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from dataclasses import replace

import pytest

from saccade.engine.results import Result
from saccade.sinks import CallbackSink, Latency, ReaderGoneError, SinkError, SinkGuard
from saccade.sinks import backoff as backoff_module
from saccade.sinks import guard as guard_module
from saccade.sources import Frame
from tests.support.sinks.results import FRAME, LATENCY, RESULT


class FailingSink:
    """Raises `error` while there is one."""

    shared = True

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.written: list[Frame] = []
        self.attempts = 0

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        self.written.append(frame)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff_module, "FIRST_S", 0.05)
    monkeypatch.setattr(backoff_module, "LAST_S", 0.1)
    monkeypatch.setattr(guard_module, "SETTLE_S", 0.0)


def write(guard: SinkGuard, index: int, stream: str = "door") -> None:
    guard.write(replace(FRAME, index=index, stream=stream, dropped_before=0), RESULT, LATENCY)


@pytest.mark.parametrize("error", [SinkError("cannot write x: full"), ValueError("a bug")])
def test_a_failing_sink_is_paused_and_works_again(caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    sink = FailingSink()
    guard = SinkGuard(sink, "x.jsonl")
    write(guard, 0)
    sink.error = error
    until = time.monotonic() + 0.5
    index = 1
    while time.monotonic() < until:
        write(guard, index, "door")
        index += 1
        time.sleep(0.001)
    assert (guard.paused, guard.works) == (True, False)
    assert str(error) in (guard.status().reason or "")
    assert guard.status().lost == index - 1
    assert 3 <= sink.attempts <= 15  # with back-off
    assert caplog.text.count("dropping results until a retry succeeds") == 1
    sink.error = None
    time.sleep(0.15)
    write(guard, index)
    assert (guard.status().state, guard.status().reason) == ("ok", None)
    assert sink.written[-1].dropped_before == index - 1  # what was lost is reported with what comes next
    write(guard, index + 1)
    assert sink.written[-1].dropped_before == 0
    assert caplog.text.count("works again; results dropped so far") == 1
    assert str(guard.end("door")).endswith(f"; dropped results: {index - 1}")
    assert guard.end("door") is None


def test_a_sink_that_fails_again_soon_is_not_logged_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "SETTLE_S", 0.3)
    sink = FailingSink()
    guard = SinkGuard(sink)
    for index in range(400):  # a video on a full disk: every few frames can be written, until they go to the disk
        sink.error = None if index % 20 else SinkError("full", lost=2)
        write(guard, index)
        time.sleep(0.002)
    assert caplog.text.count("dropping results until a retry succeeds") == 1
    assert "works again" not in caplog.text
    assert guard.paused
    failures = sink.attempts - len(sink.written)
    assert guard.status().lost == 400 - len(sink.written) + 2 * failures  # those it had taken are lost, too
    sink.error = None
    deadline = time.monotonic() + 10
    while guard.paused:
        assert time.monotonic() < deadline
        write(guard, 0)
        time.sleep(0.01)
    assert caplog.text.count("works again") == 1


def test_losses_are_counted_for_each_stream_apart() -> None:
    sink = FailingSink()
    guard = SinkGuard(sink)
    sink.error = SinkError("full")
    for index in range(3):
        write(guard, index, "a")
    write(guard, 0, "b")
    sink.error = None
    time.sleep(0.15)
    for stream in "abc":
        write(guard, 9, stream)
    assert [(frame.stream, frame.dropped_before) for frame in sink.written] == [("a", 3), ("b", 1), ("c", 0)]
    assert str(guard.end("a")).endswith("; dropped results: 3")
    assert str(guard.end("b")).endswith("; dropped results: 1")


def test_what_was_lost_before_a_lost_frame_is_reported_too() -> None:
    sink = FailingSink()
    guard = SinkGuard(sink)
    sink.error = SinkError("full")
    for index, dropped in enumerate((2, 0, 3)):
        guard.write(replace(FRAME, index=index, dropped_before=dropped), RESULT, LATENCY)
    sink.error = None
    time.sleep(0.15)
    guard.write(replace(FRAME, dropped_before=1), RESULT, LATENCY)
    assert sink.written[-1].dropped_before == 3 + 5 + 1
    assert guard.status().lost == 3  # those that this sink lost itself


def test_no_image_is_made_of_the_first_frame_after_a_loss() -> None:
    sink = FailingSink()
    guard = SinkGuard(sink)
    sink.error = SinkError("full")
    write(guard, 0)
    sink.error = None
    time.sleep(0.06)
    values = {name: getattr(FRAME, name) for name in ("stream", "index", "pts", "time_base", "captured_at")}
    clocks = {name: getattr(FRAME, name) for name in ("capture_clock", "decoded_at", "decode_ms")}
    made: list[int] = []
    guard.write(Frame.deferred(lambda: made.append(1) or FRAME.image, **values, **clocks), RESULT, LATENCY)
    assert ([frame.dropped_before for frame in sink.written], made) == ([1], [])


def test_only_one_thread_tries_a_paused_sink_again() -> None:
    sink = FailingSink()
    guard = SinkGuard(sink)
    sink.error = SinkError("full")
    write(guard, 0)
    time.sleep(0.12)
    together = threading.Barrier(8)

    def run() -> None:
        together.wait()
        write(guard, 1)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sink.attempts == 2
    assert guard.status().lost == 9


def test_a_lost_reader_is_passed_on_and_not_retried() -> None:
    sink = FailingSink()
    guard = SinkGuard(sink)
    sink.error = ReaderGoneError("the reader has gone")
    with pytest.raises(ReaderGoneError):
        write(guard, 0)
    assert (guard.status().state, guard.status().reason) == ("ended", "the reader has gone")
    assert not guard.works


def test_an_error_of_a_callback_is_passed_on() -> None:
    def fail(*_: object) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        write(SinkGuard(CallbackSink(fail)), 0)


def test_the_error_of_dropped_results_names_the_line_that_failed_and_keeps_no_frame(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "saccade")  # a record would refer to the exception

    class Dividing(FailingSink):
        def write(self, frame: Frame, result: Result, latency: Latency) -> None:
            number = frame.index // (frame.index - frame.index)
            raise AssertionError(number)

    guard, frame = SinkGuard(Dividing()), replace(FRAME, stream="door")
    before = sys.getrefcount(frame)
    guard.write(frame, RESULT, LATENCY)
    error = guard.end("door")
    assert error is not None
    text = "".join(traceback.format_exception(error))
    assert "number = frame.index // (frame.index - frame.index)" in text
    assert str(error).endswith("dropped results: 1")
    assert sys.getrefcount(frame) == before
