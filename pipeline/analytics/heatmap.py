"""The stage that adds up where objects have been, and writes it as an image when the stream ends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from saccade.engine.results import Box, Result, Spot
from saccade.pipeline.analytics.track import bottom_of, time_of

if TYPE_CHECKING:
    from saccade.sources import Frame

log = logging.getLogger(__name__)

_ROWS = 180
_SPREAD = 0.02  # standard deviation of the spot that an object leaves, of the height
_MOST_S = 1.0  # that one frame stands for, however many were lost before it


class HeatmapStage:
    """Writes a heatmap: for how long an object stood where, in colours over the last frame in grey.

    Args:
        path: the image to write, .png or .jpg; `{stream}` in it is the stream's name.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._seconds = np.zeros((0, 0), np.float32)
        self._last: Frame | None = None

    def process(self, frame: Frame, result: Result) -> Result:
        """The result as it is."""
        rows, columns = _ROWS, max(1, round(_ROWS * frame.width / frame.height))
        if self._seconds.shape != (rows, columns):
            self._seconds, self._last = np.zeros((rows, columns), np.float32), None
        passed = 0.0 if self._last is None else time_of(frame) - time_of(self._last)
        self._last = frame
        if passed > 0:
            found: list[Box | Spot] = [*result.detections.boxes, *result.points.points]
            for one in found:
                if not one.predicted:
                    x, y = bottom_of(one)
                    at = min(rows - 1, int(y * rows)), min(columns - 1, int(x * columns))
                    self._seconds[at] += min(passed, _MOST_S)
        return result

    def close(self) -> None:
        """Write the image."""
        if self._last is None:
            return
        frame = self._last
        spread = _SPREAD * _ROWS
        heat = cv2.GaussianBlur(self._seconds, (0, 0), spread) * (2 * np.pi * spread**2)
        heat = np.sqrt(heat / max(float(heat.max()), 1e-9))  # or where someone stood would hide where all walked
        heat = cv2.resize(heat, (frame.width, frame.height), interpolation=cv2.INTER_LINEAR)[..., None]
        colors = cv2.applyColorMap((heat * 255).astype(np.uint8), cv2.COLORMAP_TURBO).astype(np.float32)
        grey = cv2.cvtColor(frame.image, cv2.COLOR_RGB2GRAY)[..., None] * 0.6
        opacity = np.minimum(heat * 1.5, 0.8)
        drawn = np.rint(grey * (1 - opacity) + colors * opacity).astype(np.uint8)
        path = Path(self._path.replace("{stream}", frame.stream))
        done, data = cv2.imencode(path.suffix, drawn)
        if not done:
            raise ValueError(f"{path}: cannot be written as an image")
        path.write_bytes(data.tobytes())
        log.info("%s: heatmap in %s", frame.stream, path)
