"""The heatmap of object positions, and the stage that writes the heatmap as an image at the end of a stream."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.engine.results import Box, Result, Spot
from saccade.pipeline.analytics.track import bottom_of, time_of
from saccade.sinks import SinkError
from saccade.sinks.os_errors import write_failure

if TYPE_CHECKING:
    from saccade.sources import Frame

log = logging.getLogger(__name__)

_ROWS = 180
_SPREAD = 0.02  # standard deviation of an object's spot, as a fraction of the height
_MOST_S = 1.0  # longest time that one frame accounts for, even after dropped frames


class Heat:
    """Accumulates how long objects were at each position of the frame since the start of the stream, in seconds.

    Only one thread may add frames. Other threads can read concurrently.
    """

    def __init__(self) -> None:
        self._seconds = np.zeros((0, 0), np.float32)
        self._last_s: float | None = None

    def add(self, frame: Frame, result: Result) -> None:
        """Add the object positions of the next frame to the heatmap. Predicted boxes of lost tracks are ignored."""
        rows, columns = _ROWS, max(1, round(_ROWS * frame.width / frame.height))
        if self._seconds.shape != (rows, columns):
            self._seconds, self._last_s = np.zeros((rows, columns), np.float32), None
        now = time_of(frame)
        passed = 0.0 if self._last_s is None else now - self._last_s
        self._last_s = now
        if passed > 0:
            found: list[Box | Spot] = [*result.detections.boxes, *result.points.points]
            for one in found:
                if not one.predicted:
                    x, y = bottom_of(one)
                    at = min(rows - 1, int(y * rows)), min(columns - 1, int(x * columns))
                    self._seconds[at] += min(passed, _MOST_S)

    def values(self) -> NDArray[np.float32]:
        """Return the blurred heatmap as (180, width) float32 from 0 to 1.

        The width follows from the aspect ratio of the frame. The array is empty before the first frame.
        """
        if not self._seconds.size:
            return self._seconds
        spread = _SPREAD * _ROWS
        heat = cv2.GaussianBlur(self._seconds, (0, 0), spread) * (2 * np.pi * spread**2)
        # The square root: otherwise one standing person would outshine every path that people walked.
        values: NDArray[np.float32] = np.sqrt(heat / max(float(heat.max()), 1e-9))
        return values

    def overlay(self) -> NDArray[np.uint8]:
        """Return the heatmap as (180, width, 4) uint8 RGBA, to show over the video.

        The width follows from the aspect ratio of the frame. Positions without objects are transparent.
        """
        heat = self.values()
        if not heat.size:
            return np.zeros((1, 1, 4), np.uint8)
        colors = cv2.cvtColor(_colors(heat), cv2.COLOR_BGR2RGB)
        return np.dstack([colors, np.rint(_opacity(heat) * 255).astype(np.uint8)])


class HeatmapStage:
    """Writes a heatmap image at the end of a stream. Colors show how long objects were at each position.

    The background is the last frame in grayscale.

    Args:
        path: .png or .jpg file to write. `{stream}` in the path is replaced by the name of the stream.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._heat = Heat()
        self._last: Frame | None = None

    def process(self, frame: Frame, result: Result) -> Result:
        """Add the result of a frame to the heatmap. Return the result unchanged."""
        self._heat.add(frame, result)
        self._last = frame
        return result

    def close(self) -> None:
        """Write the heatmap image.

        Raises:
            SinkError: if the image cannot be written, for example because the disk is full.
        """
        if self._last is None:
            return
        frame = self._last
        size = frame.width, frame.height
        heat: NDArray[np.float32] = cv2.resize(self._heat.values(), size).astype(np.float32, copy=False)
        grey = cv2.cvtColor(frame.image, cv2.COLOR_RGB2GRAY)[..., None] * 0.6
        opacity = _opacity(heat)[..., None]
        drawn = np.rint(grey * (1 - opacity) + _colors(heat) * opacity).astype(np.uint8)
        path = Path(self._path.replace("{stream}", frame.stream))
        done, data = cv2.imencode(path.suffix, drawn)
        if not done:
            raise ValueError(f"{path}: cannot encode the heatmap as an image")
        try:
            path.write_bytes(data.tobytes())
        except OSError as error:
            raise SinkError(f"cannot write {path}: {write_failure(path, error)}") from None
        log.info("stream %s: wrote the heatmap to %s", frame.stream, path)


def _colors(heat: NDArray[np.float32]) -> NDArray[np.uint8]:
    colors: NDArray[np.uint8] = cv2.applyColorMap((heat * 255).astype(np.uint8), cv2.COLORMAP_TURBO).astype(np.uint8)
    return colors


def _opacity(heat: NDArray[np.float32]) -> NDArray[np.float32]:
    opacity: NDArray[np.float32] = np.minimum(heat * 1.5, np.float32(0.8))
    return opacity
