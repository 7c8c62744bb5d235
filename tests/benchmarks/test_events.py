"""How long after its frame an event begins: the demo clip as an RTSP camera, nano, events at a WebSocket client.

With SACCADE_LONG=1 it measures two minutes; `pytest -s` shows the figures. Nothing is asserted of speed.
"""

from __future__ import annotations

import os

import pytest

from benchmarks.events import time_events
from saccade.pipeline.asset_files import DEMO_CLIP
from tests.support.cameras.faulty import FaultyCamera, coded_clip

pytestmark = pytest.mark.e2e

LONG = bool(os.environ.get("SACCADE_LONG"))
RATE = 10  # that of the clip


def test_events_are_timed_from_their_frame_to_a_client() -> None:
    frames = coded_clip(DEMO_CLIP, (640, 360), rate=RATE, seconds=20 if LONG else 6)
    camera = FaultyCamera(frames, rate=RATE, clock=True)
    try:
        url = f"rtsp://127.0.0.1:{camera.port}/live"
        timed = time_events({"source": url, "detect": "person"}, seconds=120 if LONG else 4)
    finally:
        camera.close()
    print(f"\n{timed.as_text()}")
    assert (timed.clock, timed.source) == ("rtcp", url)
    assert timed.events > 0
    assert 0 < timed.p50_ms <= timed.p95_ms <= timed.max_ms
    assert timed.parts["prefill"] > 0
