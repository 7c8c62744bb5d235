"""One stream and many: from configuration to source, queue, engine and sinks, and the counters of all of it.

The names below are imported when first used, since some of their modules bring FFmpeg with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazy import lazy_attributes

if TYPE_CHECKING:
    from saccade.pipeline.core.bounded_queue import QueuePolicy
    from saccade.pipeline.core.build import load_engine
    from saccade.pipeline.core.config import Prompts, RunConfig, StreamConfig
    from saccade.pipeline.core.config.file import load
    from saccade.pipeline.core.errors import ConfigError, RunFailed, StreamError
    from saccade.pipeline.core.output import Output
    from saccade.pipeline.core.stats import Report
    from saccade.pipeline.core.stream_manager import Streams, StreamStatus
    from saccade.pipeline.core.stream_run import Run

__all__ = [
    "ConfigError",
    "Output",
    "Prompts",
    "QueuePolicy",
    "Report",
    "Run",
    "RunConfig",
    "RunFailed",
    "StreamConfig",
    "StreamError",
    "StreamStatus",
    "Streams",
    "load",
    "load_engine",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "bounded_queue": ["QueuePolicy"],
        "build": ["load_engine"],
        "config": ["Prompts", "RunConfig", "StreamConfig"],
        "config.file": ["load"],
        "errors": ["ConfigError", "RunFailed", "StreamError"],
        "stats": ["Report"],
        "stream_manager": ["StreamStatus", "Streams"],
        "output": ["Output"],
        "stream_run": ["Run"],
    },
)
