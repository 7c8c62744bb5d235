"""The value every source yields: a decoded image with its place in the stream and its clocks.

Knows nothing of models, results or sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from saccade.sources.planes import YuvPlanes

CaptureClock = Literal["rtcp", "arrival", "file"]
"""Where `Frame.captured_at` comes from: the sender's RTCP report, its arrival here, or the file's own timestamps."""

RgbImage = NDArray[np.uint8]
"""An image of shape (height, width, 3), RGB, uint8, C-contiguous."""


@dataclass(slots=True, frozen=True)
class Frame:
    """One decoded frame: an image with its time and stream.

    Attributes:
        image: (height, width, 3) uint8 RGB, already rotated upright. Treat it as read-only: several sinks share it.
        stream: name of the stream, unique in one run.
        index: number of the frame in its stream as decoded, from 0; skipped frames keep their numbers.
        pts: presentation timestamp in units of `time_base`, exactly as in the container; grows strictly.
        time_base: seconds of one pts unit.
        captured_at: capture time in seconds; Unix time for live streams, seconds from the start for files.
        capture_clock: what `captured_at` was read from.
        decoded_at: `time.monotonic()` when the decoder returned the frame, in seconds.
        decode_ms: time spent demuxing, decoding and, but for `deferred` images, converting, in milliseconds.
        dropped_before: frames of this stream lost between the previous frame handed on and this one.
        pixel_aspect: width of a pixel by its height; of anamorphic video it is not 1, and `image` is as stored.
        damaged: whether parts are missing or smeared; only where damaged frames were asked for.
        convert: gives the image where it is made on first use only (`deferred`).
        size: width and height of a deferred image in pixels; None where only the image tells.
        planes: gives a deferred image as the decoder did, or None if it cannot.
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
        """A frame whose image is made when `image` is first read: never for a frame that a queue drops before.

        Converting costs 12 ms a 4K frame on one core, about as much as decoding it.

        Args:
            convert: gives the image, the same one on every call; called from any thread.
            others: the other attributes.
        """
        frame = cls(None, convert=convert, **others)  # type: ignore[arg-type]
        object.__delattr__(frame, "image")
        return frame

    def changed(self, **changes: Any) -> Self:
        """Itself, or a copy with other values of some attributes. A deferred image is not made for it."""
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
            """Make the image; Python comes here for an attribute that has no value."""
            if name != "image" or self.convert is None:
                raise AttributeError(f"a frame has no attribute {name!r}", name=name, obj=self)
            object.__setattr__(self, "image", self.convert())
            return self.image

    @property
    def steady_at(self) -> float:
        """When it was captured, in seconds on a clock that nobody sets: a file's own, or `time.monotonic()` on arrival.

        What lasts, or is to be found again, is measured by it; `captured_at` of live streams is for people.
        """
        return self.captured_at if self.capture_clock == "file" else self.decoded_at - self.decode_ms / 1e3

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height at which the image has square pixels, one of them being its own."""
        if self.pixel_aspect >= 1:
            return round(self.width * self.pixel_aspect), self.height
        return self.width, round(self.height / self.pixel_aspect)

    @property
    def width(self) -> int:
        """Width of the frame in pixels."""
        return int(self.image.shape[1]) if self.size is None else self.size[0]

    @property
    def height(self) -> int:
        """Height of the frame in pixels."""
        return int(self.image.shape[0]) if self.size is None else self.size[1]


_OTHERS = tuple(one.name for one in fields(Frame) if one.name != "image")
