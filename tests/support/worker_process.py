"""What a test gives a worker's process: its settings, and a camera of a few small frames a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from saccade.pipeline.asset_files import DEMO_CLIP
from tests.support.cameras.faulty import FaultyCamera, coded_clip

SETTINGS = {
    "config": {"device": "cpu", "http": "127.0.0.1:0", "sinks": []},
    "index": 0,
    "threads": 1,
    "processors": 1.0,
    "secret": "sesame",
    "media": None,
    "open_by_default": True,
}


@contextmanager
def small_camera() -> Iterator[str]:
    """The address of an RTSP camera that loops over 4 s of the demo clip."""
    one = FaultyCamera(coded_clip(DEMO_CLIP, (320, 180), rate=5, seconds=4), rate=5)
    yield f"rtsp://127.0.0.1:{one.port}/live"
    one.close()
