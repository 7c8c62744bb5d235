"""Joins sources, engine and sinks: streams, their configuration and outputs, servers and the command line.

    from saccade.pipeline import Output, Streams

The names below are imported when first used; none of them brings torch before a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazy import lazy_attributes

if TYPE_CHECKING:
    from saccade.pipeline.core import (
        ConfigError,
        Output,
        QueuePolicy,
        Report,
        Run,
        RunConfig,
        RunFailed,
        StreamConfig,
        StreamError,
        Streams,
        StreamStatus,
        load,
    )
    from saccade.pipeline.server import Demo, HttpServer
    from saccade.pipeline.session import Session, opened_session

__all__ = [
    "ConfigError",
    "Demo",
    "HttpServer",
    "Output",
    "QueuePolicy",
    "Report",
    "Run",
    "RunConfig",
    "RunFailed",
    "Session",
    "StreamConfig",
    "StreamError",
    "StreamStatus",
    "Streams",
    "load",
    "opened_session",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "core": [
            "ConfigError",
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
        ],
        "server": ["Demo", "HttpServer"],
        "session": ["Session", "opened_session"],
    },
)
