"""A scripted camera that fails, comes back and fails again: how soon its stream is live."""

from __future__ import annotations

import gc
import threading
import time
import weakref

from saccade.sources import LiveSource, open_source
from saccade.sources.live.packets import Taps
from saccade.sources.rtsp.connection import RtspConnection
from saccade.sources.urls import RtspAddress
from tests.support.cameras.scripted import Call, Packetizer, ScriptedCamera, coded_frames

FRAMES = coded_frames(60)


def test_a_camera_that_fails_again_soon_is_back_within_seconds() -> None:
    def script(call: Call) -> None:
        if call.number in (1, 2, 3):  # as a camera that starts up: it answers, and hangs up
            return
        call.play(FRAMES * 20, Packetizer(), 0.02)

    with ScriptedCamera(script) as camera, open_source(camera.url(), hwaccel="none") as source:
        assert isinstance(source, LiveSource)
        gaps: list[float] = []
        last = time.monotonic()
        for number, _ in enumerate(source):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            if number == 80:  # 1.6 s: long enough for the backoff to begin from the start
                camera.calls[0].hang_up()
            if number == 120:
                break
        assert source.status.connections == 2
    assert max(gaps) < 0.5 + 1 + 2 + 4 + 1  # 14 to 16 s when the failures before counted


def test_a_connection_that_is_over_is_freed_at_once() -> None:
    """Without the cyclic collector, which is put off while an engine runs: each holds a decoder with its threads."""
    opened: list[weakref.ref[RtspConnection]] = []

    def play(call: Call) -> None:
        call.play(FRAMES[:10], Packetizer())

    def connect(closed: threading.Event, gpu: int | None, taps: Taps) -> RtspConnection:
        connection = RtspConnection(RtspAddress.parse(camera.url()), closed, taps=taps)
        opened.append(weakref.ref(connection))
        return connection

    with ScriptedCamera(play) as camera, LiveSource(camera.url(), connect, stream="door") as source:
        gc.collect()
        gc.disable()
        try:
            for _ in source:
                if len(opened) == 4:
                    break
            assert [one() is None for one in opened] == [True] * 4
        finally:
            gc.enable()
