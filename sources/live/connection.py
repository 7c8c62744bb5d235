"""Interface of one connection to a live source, for all protocols.

A connection does not reconnect. If it fails, `read` raises an error, and the caller must close the connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from av.video.frame import VideoFrame


@dataclass(slots=True, frozen=True)
class LiveFrame:
    """A decoded frame of a live source.

    Attributes:
        decoded: the decoded frame, not yet converted to RGB.
        timestamp: the sender's timestamp in units of 1/90000 s, without wrap-around; None if the sender sends none.
        arrived_at: `time.monotonic()` when the first byte arrived, in seconds.
        captured_at: capture time in Unix seconds, from the sender's RTCP report; None until a report arrives.
        lost_before: number of frames lost between the previous frame and this frame.
        damaged: whether a part of the frame, or of a reference frame, is missing.
        pixel_aspect: pixel width divided by pixel height, before rotation.
    """

    decoded: VideoFrame
    timestamp: int | None
    arrived_at: float
    captured_at: float | None = None
    lost_before: int = 0
    damaged: bool = False
    pixel_aspect: Fraction = Fraction(1)


@dataclass(slots=True, frozen=True)
class StreamStats:
    """Statistics of one connection to a live source.

    Attributes:
        transport: transport of the packets, such as "tcp".
        received: number of video packets received.
        lost: number of video packets lost.
        late: number of frames that were dropped because decoding was too slow.
        key_interval_s: seconds between the last two keyframes; None before the second keyframe.
        clock_off_s: sender's clock minus local clock, in seconds; None before the first RTCP report.
    """

    transport: str
    received: int
    lost: int
    late: int
    key_interval_s: float | None
    clock_off_s: float | None


class LiveConnection(Protocol):
    """One open connection to a live source. `read` and `close` must be called from the same thread."""

    @property
    def codec(self) -> str:
        """FFmpeg's name of the video codec, such as "h264"."""
        ...

    @property
    def decoder(self) -> str:
        """Name of the decoder in use, such as "h264 (cuda)"."""
        ...

    @property
    def rate(self) -> Fraction | None:
        """Frame rate that the stream declares, in frames per second, or None."""
        ...

    @property
    def heard_at(self) -> float:
        """Time at which the sender last sent any data, in seconds of `time.monotonic()`."""
        ...

    @property
    def media_at(self) -> float:
        """Arrival time of the newest video packet, in seconds of `time.monotonic()`; 0 before the first packet."""
        ...

    @property
    def damaged(self) -> int:
        """Number of packets that were lost or could not be decoded."""
        ...

    @property
    def stats(self) -> StreamStats | None:
        """Packet statistics of the connection; None if unavailable. Only RTSP connections provide them."""
        ...

    def read(self, timeout_s: float) -> LiveFrame | None:
        """Return the next frame, or None if no frame arrives within `timeout_s` seconds.

        Raises:
            LiveError: if the connection has failed.
            StreamEndedError: if a stream of limited length has ended.
        """
        ...

    def close(self) -> None:
        """Close the connection to the live source."""
        ...
