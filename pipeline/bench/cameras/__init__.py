"""`saccade bench cameras`: cameras of mixed rates that offer more than the model can answer."""

from saccade.pipeline.bench.cameras.measure import time_cameras
from saccade.pipeline.bench.cameras.report import CameraLog, CameraRow, CamerasBench, fair_shares, jain, summarize

__all__ = [
    "CameraLog",
    "CameraRow",
    "CamerasBench",
    "fair_shares",
    "jain",
    "summarize",
    "time_cameras",
]
