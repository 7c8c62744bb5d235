"""The settings of a run by what they are about, as the manual and the help of `saccade run` list them."""

from __future__ import annotations

from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.config import RunConfig
from saccade.pipeline.config.cluster import ClusterSettings
from saccade.pipeline.events.settings import EventSettings

_SECTIONS = {
    "what to watch": ["source", "streams", "name", "vid_stride", "start", "end", "loop", "realtime", "hwaccel"],
    "how cameras are reached": ["rtsp_transport", "loss", "tls"],
    "what to find": [
        "detect",
        "point",
        "segment",
        "polygons",
        "query",
        "task",
        "conf",
        "max_objects",
        "tiles",
        "saccades",
        "saccade_sweep",
        "stages",
        "gates",
    ],
    "over time": list(AnalyticsSettings.model_fields),
    "events": [*EventSettings.model_fields, "ask", "store", "store_keep", "store_max_gb"],
    "with what": [
        "model",
        "device",
        "dtype",
        "kv_dtype",
        "imgsz",
        "refiner",
        "in_flight",
        "queue",
        "weight",
        "max_fps",
        "deadline_ms",
    ],
    "on several processes": ["workers", *ClusterSettings.model_fields],
    "where results go": ["out", "jsonl", "sinks", "display"],
}
_LAST_SECTION = "what other programs can ask"


def sections() -> dict[str, list[str]]:
    """Heading → the keys below it, each key once."""
    listed = {key for keys in _SECTIONS.values() for key in keys}
    return {**_SECTIONS, _LAST_SECTION: [key for key in RunConfig.model_fields if key not in listed]}
