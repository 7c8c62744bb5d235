"""HTTP: the demo, streams added and removed while it runs, WHEP, metrics and health.

The names below are imported when first used: WHEP and the demo bring aiortc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazy import lazy_attributes

if TYPE_CHECKING:
    from saccade.pipeline.server.demo import Demo
    from saccade.pipeline.server.http_server import HttpServer
    from saccade.pipeline.server.prometheus import Metrics
    from saccade.pipeline.server.whep.server import WhepServer
    from saccade.pipeline.server.whep.sink import ViewerSink

__all__ = ["Demo", "HttpServer", "Metrics", "ViewerSink", "WhepServer"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "demo": ["Demo"],
        "http_server": ["HttpServer"],
        "prometheus": ["Metrics"],
        "whep.server": ["WhepServer"],
        "whep.sink": ["ViewerSink"],
    },
)
