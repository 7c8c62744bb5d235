"""Groups the settings into sections, for the manual and for the help of `saccade run`."""

from __future__ import annotations

from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.config import RunConfig
from saccade.pipeline.config.cluster import ClusterSettings
from saccade.pipeline.events.settings import EventSettings

_SECTIONS = {
    "source": ["source", "streams", "name", "vid_stride", "start", "end", "loop", "realtime", "hwaccel"],
    "camera connections": ["rtsp_transport", "loss", "tls"],
    "prompts": [
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
    "tracking and counting": list(AnalyticsSettings.model_fields),
    "events": [*EventSettings.model_fields, "ask", "store", "store_keep", "store_max_gb"],
    "model and scheduling": [
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
    "several processes": ["workers", *ClusterSettings.model_fields],
    "outputs": ["out", "jsonl", "sinks", "record", "record_source", "display"],
}
_LAST_SECTION = "server"


def sections() -> dict[str, list[str]]:
    """Return the section headings of the manual, each with the keys of the settings in the section."""
    listed = {key for keys in _SECTIONS.values() for key in keys}
    return {**_SECTIONS, _LAST_SECTION: [key for key in RunConfig.model_fields if key not in listed]}
