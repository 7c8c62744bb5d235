"""Converts decoded video frames to upright RGB arrays."""

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
    """The operations that make a frame upright: a transpose, then mirroring along x and y. Each is optional."""

    transpose: bool = False
    mirror_x: bool = False
    mirror_y: bool = False


_UPRIGHT = Orientation()
_MOST_ASPECT = Fraction(10)  # of a pixel; the largest ratio in use is 64/33
_TURNED = {90: (0, -1, 1, 0), -90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), -180: (-1, 0, 0, -1)}
"""Display matrix, divided by 65536, of each `rotation` in degrees counterclockwise."""


def display_matrix_of(frame: av.VideoFrame) -> tuple[int, ...] | None:
    """Return a frame's display matrix as 9 numbers, or None if the frame has none. Do not call this for each frame."""
    try:  # side_data makes a reference cycle, so that only the garbage collector frees the frame
        side_data: Any = frame.side_data  # not `rotation`, which cannot tell mirrored from upside down
    except ValueError:  # the side data has a kind unknown to PyAV, such as EXIF
        if (turned := _TURNED.get(frame.rotation)) is None:
            return None
        a, b, c, d = (number << 16 for number in turned)
        return a, b, 0, c, d, 0, 0, 0, 1 << 30
    data = side_data.get(Type.DISPLAYMATRIX)
    return None if data is None or len(raw := bytes(data)) < 36 else struct.unpack_from("=9i", raw)


def orientation_of(frame: av.VideoFrame) -> Orientation:
    """Return the orientation from a frame's display matrix. Do not call this for each frame."""
    return orientation_of_matrix(display_matrix_of(frame))


def orientation_of_matrix(matrix: tuple[int, ...] | None) -> Orientation:
    """Return the orientation from a display matrix. Only rotations by multiples of 90° are supported."""
    if matrix is None:
        return _UPRIGHT
    x_to_x, x_to_y, _, y_to_x, y_to_y = matrix[:5]
    if abs(x_to_x) + abs(y_to_y) >= abs(x_to_y) + abs(y_to_x):
        return Orientation(False, x_to_x < 0, y_to_y < 0)
    return Orientation(True, y_to_x < 0, x_to_y < 0)


def pixel_aspect_of(*told: Fraction | None) -> Fraction:
    """Return the first usable pixel aspect ratio (width / height) among the arguments, or 1 if there is none."""
    for aspect in told:
        if aspect and 1 / _MOST_ASPECT <= aspect <= _MOST_ASPECT:
            return Fraction(aspect)
    return Fraction(1)


class RgbConverter:
    """Converts the frames of a stream to RGB on demand, one at a time. Thread-safe."""

    def __init__(self) -> None:
        # A new swscale context per frame, as `VideoFrame.to_ndarray` makes, is 17 times slower at 640×360.
        self._to_rgb, self._to_planar = VideoReformatter(), VideoReformatter()
        self._lock = threading.Lock()

    def later(self, frame: av.VideoFrame, orientation: Orientation | None = None) -> DecodedImage:
        """Return an object that converts the frame to RGB when the object is called.

        Args:
            frame: the decoded frame.
            orientation: orientation of the frame; None to read it from the frame.
        """
        return DecodedImage(frame, self, orientation)

    def convert(self, frame: av.VideoFrame, orientation: Orientation | None = None) -> RgbImage:
        """Convert a frame to (height, width, 3) uint8 RGB, rotated and mirrored by its display matrix.

        Args:
            frame: the decoded frame.
            orientation: orientation of the frame; None to read its rotation from the frame.

        Raises:
            FFmpegError, ValueError: if swscale cannot convert the frame's pixel format.
        """
        with self._lock:
            planar = frame
            if "nv12" in (frame.format.name, frame.sw_format and frame.sw_format.name):
                # GPUs decode to NV12. The detour takes 1.1 ms at 1080p instead of 7.4, with identical bytes.
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
    """A decoded frame. Calling it returns the frame as an upright RGB image, which is cached.

    Attributes:
        size: (width, height) of the image in pixels.
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
        """Return the RGB image. Each call returns the same array.

        Raises:
            FFmpegError, ValueError: if swscale cannot convert the frame's pixel format.
        """
        with self._lock:
            if self._image is None:
                assert self._frame is not None
                self._image = self._converter.convert(self._frame, self._orientation)
                self._frame = None  # release the decoder's buffer
            return self._image

    def planes(self) -> YuvPlanes | None:
        """Return the YUV planes of the frame, or None after conversion to RGB or for an unsupported format."""
        with self._lock:
            turned = self._orientation is not None and self._orientation != _UPRIGHT
            return None if self._frame is None or turned else planes_of(self._frame)
