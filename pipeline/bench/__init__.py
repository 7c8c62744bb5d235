"""What `saccade bench` measures: one module for each bench, and what they share.

The names below are imported when first used: some benches bring torch or aiortc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazy import lazy_attributes

if TYPE_CHECKING:
    from saccade.pipeline.bench.analytics.begin import time_events
    from saccade.pipeline.bench.analytics.track import time_tracks
    from saccade.pipeline.bench.bubble import time_bubble
    from saccade.pipeline.bench.cameras import time_cameras
    from saccade.pipeline.bench.frame import time_frames
    from saccade.pipeline.bench.ingest import time_ingest
    from saccade.pipeline.bench.pipeline import time_pipeline
    from saccade.pipeline.bench.throughput import time_throughput
    from saccade.pipeline.bench.webrtc import time_webrtc

__all__ = [
    "time_bubble",
    "time_cameras",
    "time_events",
    "time_frames",
    "time_ingest",
    "time_pipeline",
    "time_throughput",
    "time_tracks",
    "time_webrtc",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "analytics.begin": ["time_events"],
        "analytics.track": ["time_tracks"],
        "bubble": ["time_bubble"],
        "cameras": ["time_cameras"],
        "frame": ["time_frames"],
        "ingest": ["time_ingest"],
        "pipeline": ["time_pipeline"],
        "throughput": ["time_throughput"],
        "webrtc": ["time_webrtc"],
    },
)
