"""The HTTP API for streams, events, video, metrics, the web console and the demo.

The names in `__all__` are imported on first use, because importing FastAPI and aiortc is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazy import lazy_attributes

if TYPE_CHECKING:
    from saccade.pipeline.api.demo import Demo
    from saccade.pipeline.api.http_server import HttpServer, serve
    from saccade.pipeline.api.prometheus import Metrics
    from saccade.pipeline.api.whep import WhepServer
    from saccade.pipeline.api.whep_sink import ViewerSink

__all__ = ["Demo", "HttpServer", "Metrics", "ViewerSink", "WhepServer", "serve"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "demo": ["Demo"],
        "http_server": ["HttpServer", "serve"],
        "prometheus": ["Metrics"],
        "whep": ["WhepServer"],
        "whep_sink": ["ViewerSink"],
    },
)
