"""The `Frame` that all sources yield: a decoded image with its timestamps and the name of its stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from saccade.sources.planes import YuvPlanes

CaptureClock = Literal["rtcp", "arrival", "file"]
"""Source of `Frame.captured_at`: the sender's RTCP report, the time of arrival, or the file's timestamps."""

RgbImage = NDArray[np.uint8]
"""An image of shape (height, width, 3), RGB, uint8, C-contiguous."""


@dataclass(slots=True, frozen=True)
class Frame:
    """One decoded frame: an image with its timestamps and its stream.

    Attributes:
        image: (height, width, 3) uint8 RGB, already rotated upright. Treat it as read-only: several sinks share
            it.
        stream: name of the stream, unique in one run.
        index: number of the frame in its stream, from 0. Frames skipped by `vid_stride` count too.
        pts: presentation timestamp in units of `time_base`; strictly increasing.
        time_base: seconds per unit of `pts`.
        captured_at: capture time in seconds; Unix time for live streams, seconds from the start for files.
        capture_clock: origin of `captured_at`: "rtcp" (sender's report), "arrival" or "file".
        decoded_at: `time.monotonic()` when the decoder returned the frame, in seconds.
        decode_ms: milliseconds spent on demuxing, decoding and, except for `deferred` images, conversion.
        dropped_before: number of frames dropped between the previously yielded frame of this stream and this
            frame.
        pixel_aspect: pixel width divided by pixel height. Not 1 for anamorphic video, because `image` is not scaled to
            square pixels.
        damaged: whether parts of the image are missing or smeared. Set only if damaged frames were requested.
        convert: function that makes a deferred image (see `deferred`); None for other frames.
        size: (width, height) of a deferred image in pixels; None for other frames.
        planes: function that returns a deferred image in the decoder's own format, or None if not possible.
    """

    image: RgbImage
    stream: str
    index: int
    pts: int
    time_base: Fraction
    captured_at: float
    capture_clock: CaptureClock
    decoded_at: float
    decode_ms: float
    dropped_before: int = 0
    damaged: bool = False
    pixel_aspect: Fraction = Fraction(1)
    convert: Callable[[], RgbImage] | None = field(default=None, repr=False, compare=False)
    size: tuple[int, int] | None = field(default=None, repr=False, compare=False)
    planes: Callable[[], YuvPlanes | None] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def deferred(cls, convert: Callable[[], RgbImage], **others: Any) -> Self:
        """Create a frame whose image is converted to RGB when `image` is first read.

        This saves CPU time, because dropped frames are never converted.

        Args:
            convert: function that returns the image, the same array on each call. May be called in any thread.
            others: the other attributes of the frame, by name.
        """
        frame = cls(None, convert=convert, **others)  # type: ignore[arg-type]
        object.__delattr__(frame, "image")
        return frame

    def changed(self, **changes: Any) -> Self:
        """Return a copy of the frame with changed attributes, or the frame itself if nothing changes.

        An image that is not yet converted to RGB stays unconverted.
        """
        if "image" not in changes and all(getattr(self, name) == value for name, value in changes.items()):
            return self
        values = {name: getattr(self, name) for name in _OTHERS} | changes
        try:
            image = object.__getattribute__(self, "image")
        except AttributeError:
            return self.deferred(**values)
        return type(self)(**{"image": image} | values)

    if not TYPE_CHECKING:  # a type checker would believe that a frame has every attribute

        def __getattr__(self, name: str) -> RgbImage:
            """Convert a deferred image to RGB when `image` is first read."""
            if name != "image" or self.convert is None:
                raise AttributeError(f"a frame has no attribute {name!r}", name=name, obj=self)
            object.__setattr__(self, "image", self.convert())
            return self.image

    @property
    def steady_at(self) -> float:
        """Capture time in seconds, for measuring durations: unlike `captured_at`, it is never adjusted.

        For live streams, `time.monotonic()` on arrival; for files, seconds from the start.
        """
        return self.captured_at if self.capture_clock == "file" else self.decoded_at - self.decode_ms / 1e3

    @property
    def shown_size(self) -> tuple[int, int]:
        """(width, height) in pixels of the image after scaling to square pixels."""
        return square_size(self.width, self.height, self.pixel_aspect)

    @property
    def width(self) -> int:
        """Width of the image in pixels."""
        return int(self.image.shape[1]) if self.size is None else self.size[0]

    @property
    def height(self) -> int:
        """Height of the image in pixels."""
        return int(self.image.shape[0]) if self.size is None else self.size[1]


_OTHERS = tuple(one.name for one in fields(Frame) if one.name != "image")


def square_size(width: int, height: int, pixel_aspect: Fraction) -> tuple[int, int]:
    """Return (width, height) in pixels after scaling to square pixels. Only one side changes: it becomes longer.

    Args:
        width: stored width in pixels.
        height: stored height in pixels.
        pixel_aspect: pixel width divided by pixel height.
    """
    if pixel_aspect >= 1:
        return round(width * pixel_aspect), height
    return width, round(height / pixel_aspect)
