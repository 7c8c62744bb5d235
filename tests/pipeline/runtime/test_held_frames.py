from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from saccade.pipeline.runtime.held_frames import HeldFrames, is_newer
from saccade.sources import Frame, Source
from tests.support.cameras import wait_for

LONG_S = 20.0
IMAGE = np.zeros((2, 2, 3), np.uint8)


def frame(number: int, captured_at: float, clock: str = "rtcp", ago_s: float = 0.0) -> Frame:
    times: dict[str, Any] = {"captured_at": captured_at, "capture_clock": clock}
    arrived = time.monotonic() - ago_s
    return Frame(IMAGE, "door", number, number, Fraction(1, 10), decoded_at=arrived, decode_ms=0.0, **times)


class Fed(Source):
    """Hands on what a test gives it: a frame, an error to raise, or None for the end."""

    def __init__(self) -> None:
        super().__init__("door")
        self.given: queue.SimpleQueue[Frame | Exception | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[Frame]:
        while (one := self.given.get()) is not None:
            if isinstance(one, Exception):
                raise one
            yield one


def held(source: Fed) -> tuple[HeldFrames, list[object]]:
    heard: list[object] = []
    return HeldFrames(source, lambda: heard.append("frame"), heard.append), heard


def test_frames_are_dropped_until_they_are_wanted() -> None:
    source = Fed()
    frames, heard = held(source)
    for number in range(2):
        source.given.put(frame(number, number / 10))
    wait_for(source.given.empty, LONG_S)
    wait_for(lambda: heard == ["frame"], LONG_S)
    frames.after = (0.2, "rtcp", 0.0)
    for number in (2, 3, 4):  # the second connection has the same frame again
        source.given.put(frame(number, number / 10))
    source.given.put(None)
    assert [one.index for one in frames] == [3, 4]
    assert heard == ["frame"]


@pytest.mark.parametrize("error", [ValueError("no camera"), None])
def test_a_source_that_ends_is_reported(error: Exception | None) -> None:
    source = Fed()
    frames, heard = held(source)
    source.given.put(error)
    wait_for(lambda: heard == [error], LONG_S)
    if error is None:
        assert list(frames) == []
    else:
        with pytest.raises(ValueError, match="no camera"):
            list(frames)


@pytest.mark.parametrize(
    ("captured_at", "clock", "newer"),
    [
        (10.0, "rtcp", False),
        (10.04, "rtcp", False),
        (10.06, "rtcp", True),
        (9.5, "rtcp", False),
        (7.0, "rtcp", True),
    ],
)
def test_a_frame_that_another_had_is_not_newer(captured_at: float, clock: str, newer: bool) -> None:
    assert is_newer(frame(0, captured_at, clock), (10.0, "rtcp", 0.0), 0.1) == newer
    assert is_newer(frame(0, captured_at, clock), None, 0.1)


@pytest.mark.parametrize(("ago_s", "newer"), [(0.0, True), (1.02, False)])
def test_clocks_that_differ_are_compared_by_arrival(ago_s: float, newer: bool) -> None:
    after = (10.0, "rtcp", time.time() - 1.0)
    assert is_newer(frame(0, after[2], "arrival", ago_s), after, 0.1) == newer
