"""What `saccade bench` measures: one module for each bench, and what they share.

The names below are imported when first used: some benches bring torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazy import lazy_attributes

if TYPE_CHECKING:
    from saccade.pipeline.bench.bubble import time_bubble
    from saccade.pipeline.bench.cameras import time_cameras
    from saccade.pipeline.bench.frame import time_frames
    from saccade.pipeline.bench.throughput import time_throughput

__all__ = ["time_bubble", "time_cameras", "time_frames", "time_throughput"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "bubble": ["time_bubble"],
        "cameras": ["time_cameras"],
        "frame": ["time_frames"],
        "throughput": ["time_throughput"],
    },
)
