"""Live sources without a network: reconnects, closing, strides, losses."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest

from saccade.sources import LiveError, LiveSource, SourceError, open_source
from saccade.sources.errors import StreamEndedError
from saccade.sources.live.connection import LiveFrame
from saccade.sources.live.decoder import decode_behind_the_model
from saccade.sources.live.packets import AudioPacket, Taps
from saccade.sources.live.reconnect import Link
from tests.support.cameras.rtsp import wait_for

LONG_S = 20


def live_frame(number: int, lost: int = 0) -> LiveFrame:
    decoded = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number, np.uint8), format="rgb24")
    return LiveFrame(decoded, 3600 * number, time.monotonic(), None, lost)


class FakeConnection:
    """Yields the items given: frames, None for silence, or an error."""

    codec = decoder = "fake"
    rate = Fraction(25)
    stats = None
    damaged = 1

    def __init__(self, items: list[LiveFrame | Exception]) -> None:
        self._items = items
        self.heard_at = self.media_at = time.monotonic()
        self.closed = False

    def read(self, timeout_s: float) -> LiveFrame | None:
        if not self._items:
            time.sleep(0.01)
            return None
        item = self._items.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self.closed = True


def test_frames_continue_over_a_reconnect() -> None:
    connections = [
        FakeConnection([live_frame(0), live_frame(1), LiveError("connection failed", "hung up")]),
        FakeConnection([LiveError("not found", "not yet")]),
        FakeConnection([live_frame(0, lost=3), live_frame(1), StreamEndedError()]),
    ]
    given_out = iter(connections)
    states: list[str] = []
    with LiveSource("rtsp://a:b@c/d", lambda *_: next(given_out), stream="c", link=Link(lambda: 1.0)) as source:
        frames = []
        for frame in source:
            states.append(source.status.state)
            frames.append(frame)
        assert [frame.index for frame in frames] == [0, 1, 2, 3]
        assert [frame.dropped_before for frame in frames] == [0, 0, 3, 0]
        assert all(before.pts < after.pts for before, after in itertools.pairwise(frames))
        assert {frame.capture_clock for frame in frames} == {"arrival"}
        assert abs(frames[-1].captured_at - time.time()) < LONG_S
        assert states == ["live"] * 4
        assert source.status.state == "ended"
        assert source.status.connections == 2
        assert source.corrupt_packets == 3
        assert all(connection.closed for connection in connections)
        assert (source.info.codec, source.info.width, source.info.height) == ("fake", 64, 48)
        assert (source.info.live, source.info.url) == (True, "rtsp://c/d")


def failing(*_: object) -> FakeConnection:
    raise LiveError("auth failed", "no")


def test_without_retry_the_first_failure_is_the_last() -> None:
    with (
        LiveSource("rtsp://x", failing, stream="x", retry=False) as source,
        pytest.raises(LiveError, match="auth failed: no") as caught,
    ):
        next(iter(source))
    assert caught.value.reason == "auth failed"


def test_the_status_tells_the_failure_without_credentials() -> None:
    def opener(*_: object) -> FakeConnection:
        raise LiveError("connection failed", "rtsp://me:secret@c/d\nis closed " + "x" * 1000)

    with LiveSource("rtsp://x", opener, stream="x") as source:
        reader = threading.Thread(target=lambda: list(source))
        reader.start()
        wait_for(lambda: source.status.message is not None, LONG_S)
        message = source.status.message
        source.close()
        reader.join(LONG_S)
    assert message is not None
    assert message.startswith("rtsp://c/d is closed x")
    assert len(message) == 200
    assert source.status.message is None


@pytest.mark.parametrize("opener", [failing, lambda *_: FakeConnection([])])
def test_close_ends_every_wait(opener: Callable[..., FakeConnection]) -> None:
    source = LiveSource("rtsp://x", opener, stream="x")
    reader = threading.Thread(target=lambda: list(source))
    reader.start()
    time.sleep(0.1)
    source.close()
    reader.join(LONG_S)
    assert not reader.is_alive()
    assert source.status.state == "ended"


def test_vid_stride_keeps_numbers_and_losses() -> None:
    connection = FakeConnection(
        [live_frame(0), live_frame(1, lost=1), live_frame(2), live_frame(3, lost=2), StreamEndedError()]
    )
    with LiveSource("rtsp://x", lambda *_: connection, stream="x", vid_stride=2) as source:
        assert [(frame.index, frame.dropped_before) for frame in source] == [(0, 0), (2, 1)]


def test_a_live_source_has_no_beginning_or_end() -> None:
    with pytest.raises(SourceError, match="remove start and end"):
        open_source("rtsp://127.0.0.1/x", end=3)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is a process's")
def test_only_the_thread_that_decodes_gives_way() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen = []

    def decode() -> None:
        decode_behind_the_model()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        inside = threading.Thread(
            target=lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        )
        inside.start()
        inside.join()

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
    assert seen == [min(19, mine + 10)] * 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_sound_is_on_the_clock_of_the_frames_over_a_reconnect() -> None:
    heard: list[int] = []
    offsets = iter((1000, 500_000))

    def opener(closed: threading.Event, gpu: int | None, taps: Taps) -> FakeConnection:
        offset, own = next(offsets), AudioPacket("aac", b"", 8000, 1, b"", 0, 1024)
        frames = [replace(live_frame(number), timestamp=3600 * number + offset) for number in range(2)]
        for early in (0, 900):  # before the first frame
            taps.take(replace(own, pts=offset + early))
        return FakeConnection([*frames, LiveError("connection failed", "hung up")])

    source = LiveSource("fake://x", opener, stream="x", link=Link())
    source.listen(heard.append)  # type: ignore[arg-type]
    frames = list(itertools.islice(source, 4))
    assert [packet.pts for packet in heard] == [frame.pts + early for frame in frames[::2] for early in (0, 900)]  # type: ignore[attr-defined]
