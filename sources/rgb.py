"""Converts decoded frames to upright RGB arrays. Knows nothing of where they come from."""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import cv2
import numpy as np
from av.sidedata.sidedata import Type
from av.video.reformatter import VideoReformatter

from saccade.sources.frame import RgbImage
from saccade.sources.planes import YuvPlanes, planes_of


@dataclass(slots=True, frozen=True)
class Orientation:
    """What makes a frame upright: first its sides are exchanged, then it is mirrored."""

    transpose: bool = False
    mirror_x: bool = False
    mirror_y: bool = False


_UPRIGHT = Orientation()
_MOST_ASPECT = Fraction(10)  # of a pixel; the most that is in use is 64/33
_TURNED = {90: (0, -1, 1, 0), -90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), -180: (-1, 0, 0, -1)}
"""The display matrix, without its unit of 65536, that `rotation` stands for: degrees against the clock."""


def display_matrix_of(frame: av.VideoFrame) -> tuple[int, ...] | None:
    """The display matrix of a frame, as containers keep it: 9 numbers; None where it has none.

    Not for every frame: PyAV's `side_data` makes a cycle of references, so that only the cyclic collector frees the
    frame. At 1080p 500 MB of them were waiting for it.
    """
    try:
        side_data: Any = frame.side_data  # not `rotation`, to which mirrored is the same as upside down
    except ValueError:  # there is a kind that PyAV does not know, such as EXIF
        if (turned := _TURNED.get(frame.rotation)) is None:
            return None
        a, b, c, d = (number << 16 for number in turned)
        return a, b, 0, c, d, 0, 0, 0, 1 << 30
    data = side_data.get(Type.DISPLAYMATRIX)
    return None if data is None or len(raw := bytes(data)) < 36 else struct.unpack_from("=9i", raw)


def orientation_of(frame: av.VideoFrame) -> Orientation:
    """What the display matrix of a frame asks for, which is read as `display_matrix_of` does."""
    return orientation_of_matrix(display_matrix_of(frame))


def orientation_of_matrix(matrix: tuple[int, ...] | None) -> Orientation:
    """What a display matrix asks for. Turns by other angles than 90° are not supported."""
    if matrix is None:
        return _UPRIGHT
    x_to_x, x_to_y, _, y_to_x, y_to_y = matrix[:5]
    if abs(x_to_x) + abs(y_to_y) >= abs(x_to_y) + abs(y_to_x):
        return Orientation(False, x_to_x < 0, y_to_y < 0)
    return Orientation(True, y_to_x < 0, x_to_y < 0)


def pixel_aspect_of(*told: Fraction | None) -> Fraction:
    """The width of a stored pixel by its height, as the first says that says it; 1 where none can be true."""
    for aspect in told:
        if aspect and 1 / _MOST_ASPECT <= aspect <= _MOST_ASPECT:
            return Fraction(aspect)
    return Fraction(1)


class RgbConverter:
    """Converts the frames of one connection when their images are needed, one at a time; from any thread.

    It keeps its scalers: 0.4 ms a 640×360 frame against 7 for `VideoFrame.to_ndarray()`, which builds one, and its
    threads, for each call. One thread converts a 1080p frame in 1.0 ms; with swscale's own choice, a thread for each
    processor and stream, 64 streams had a thousand of them.
    """

    def __init__(self) -> None:
        self._to_rgb, self._to_planar = VideoReformatter(), VideoReformatter()
        self._lock = threading.Lock()

    def later(self, frame: av.VideoFrame, orientation: Orientation | None = None) -> DecodedImage:
        """The frame's image, to be made when it is needed; `orientation` as in `convert`."""
        return DecodedImage(frame, self, orientation)

    def convert(self, frame: av.VideoFrame, orientation: Orientation | None = None) -> RgbImage:
        """The frame as (height, width, 3) uint8 RGB, turned and mirrored as its display matrix says.

        Pass its orientation where it is known; detected here, a frame that is only mirrored vertically is not noticed.

        Raises:
            FFmpegError, ValueError: if swscale cannot convert the frame's pixel format.
        """
        with self._lock:
            planar = frame
            if "nv12" in (frame.format.name, frame.sw_format and frame.sw_format.name):
                # As GPUs decode: 1.1 ms at 1080p, and the bytes that other decoders' frames give, against 7.4 at once.
                planar = self._to_planar.reformat(frame, format="yuv420p", threads=1)
            rgb: Any = self._to_rgb.reformat(planar, format="rgb24", threads=1).to_ndarray()
        if orientation is None:
            orientation = orientation_of(frame) if frame.rotation else _UPRIGHT
        if orientation.transpose:
            rgb = cv2.transpose(rgb)
        if orientation.mirror_x or orientation.mirror_y:
            rgb = cv2.flip(rgb, 1 if not orientation.mirror_y else 0 if not orientation.mirror_x else -1)
        return np.ascontiguousarray(rgb, dtype=np.uint8)


class DecodedImage:
    """A decoded frame whose upright RGB image is made when it is first called for; made by `RgbConverter`.

    Attributes:
        size: width and height of the image in pixels.
    """

    __slots__ = ("_converter", "_frame", "_image", "_lock", "_orientation", "size")

    def __init__(self, frame: av.VideoFrame, converter: RgbConverter, orientation: Orientation | None) -> None:
        self._frame: av.VideoFrame | None = frame
        self._image: RgbImage | None = None
        self._converter, self._orientation = converter, orientation
        self._lock = threading.Lock()
        sideways = orientation.transpose if orientation is not None else abs(frame.rotation) == 90
        self.size = (frame.height, frame.width) if sideways else (frame.width, frame.height)

    def __call__(self) -> RgbImage:
        """The image, the same one each time; downloaded, if the frame is on a GPU. Errors as `RgbConverter.convert`."""
        with self._lock:
            if self._image is None:
                assert self._frame is not None
                self._image = self._converter.convert(self._frame, self._orientation)
                self._frame = None  # the decoder's buffer is free again
            return self._image

    def planes(self) -> YuvPlanes | None:
        """The frame as the decoder gave it, see `planes_of`; None where the image is made already."""
        with self._lock:
            turned = self._orientation is not None and self._orientation != _UPRIGHT
            return None if self._frame is None or turned else planes_of(self._frame)
