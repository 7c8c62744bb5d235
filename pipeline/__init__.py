"""Video pipeline: reads video sources, runs the engine on the frames, and sends the results to sinks.

    from saccade.pipeline import Output, Streams

The names in `__all__` are imported on first use. torch is imported only when a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazy import lazy_attributes

if TYPE_CHECKING:
    from saccade.pipeline.api import Demo, HttpServer, serve
    from saccade.pipeline.config import RunConfig, StreamConfig
    from saccade.pipeline.config.file import load
    from saccade.pipeline.config.queue_policy import QueuePolicy
    from saccade.pipeline.control.controller import Controller
    from saccade.pipeline.control.local import Local
    from saccade.pipeline.errors import ConfigError, RunFailed, StreamError
    from saccade.pipeline.run import OpenedRun, opened_run
    from saccade.pipeline.runtime.output import Output
    from saccade.pipeline.runtime.run import Run
    from saccade.pipeline.runtime.stats import Report
    from saccade.pipeline.runtime.streams import Streams, StreamStatus

__all__ = [
    "ConfigError",
    "Controller",
    "Demo",
    "HttpServer",
    "Local",
    "OpenedRun",
    "Output",
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
    "opened_run",
    "serve",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "config": ["RunConfig", "StreamConfig"],
        "config.file": ["load"],
        "config.queue_policy": ["QueuePolicy"],
        "control.controller": ["Controller"],
        "control.local": ["Local"],
        "errors": ["ConfigError", "RunFailed", "StreamError"],
        "runtime.output": ["Output"],
        "runtime.run": ["Run"],
        "runtime.stats": ["Report"],
        "runtime.streams": ["StreamStatus", "Streams"],
        "api": ["Demo", "HttpServer", "serve"],
        "run": ["OpenedRun", "opened_run"],
    },
)
