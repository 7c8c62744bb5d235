"""The interface of one connection to a live source, whatever its protocol.

Knows nothing of states or of reconnecting: a connection that fails raises, and is closed.
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
        decoded: the frame, not yet converted.
        timestamp: the sender's, in units of 1/90000 s, never wrapped; None when it gives none.
        arrived_at: `time.monotonic()` when its first byte arrived, in seconds.
        captured_at: Unix time in seconds by the sender's RTCP report; None while that is not known.
        lost_before: frames lost between the one before and this one.
        damaged: whether a part of it, or of a frame that it is predicted from, is missing.
        pixel_aspect: width of a pixel by its height, of the frame as it is decoded.
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
    """What a connection shows of its stream, beyond frames.

    Attributes:
        transport: how packets come, such as "tcp".
        received, lost: packets of the video.
        late: frames dropped because decoding was behind.
        key_interval_s: seconds from one key frame to the next; None before the second.
        clock_off_s: how far the sender's RTCP clock is ahead of ours, in seconds; None before its first report.
    """

    transport: str
    received: int
    lost: int
    late: int
    key_interval_s: float | None
    clock_off_s: float | None


class LiveConnection(Protocol):
    """One open connection. `read` and `close` are called from one thread."""

    @property
    def codec(self) -> str:
        """FFmpeg's name of the codec."""
        ...

    @property
    def decoder(self) -> str:
        """What decodes it, such as "h264 (cuda)"."""
        ...

    @property
    def rate(self) -> Fraction | None:
        """Frames a second, as announced; None when not announced."""
        ...

    @property
    def heard_at(self) -> float:
        """`time.monotonic()` when anything last arrived, in seconds."""
        ...

    @property
    def media_at(self) -> float:
        """`time.monotonic()` when a packet of the video last arrived, in seconds; 0 before the first."""
        ...

    @property
    def damaged(self) -> int:
        """Packets that were lost or could not be decoded."""
        ...

    @property
    def stats(self) -> StreamStats | None:
        """What is known of the stream; None where the protocol does not show it."""
        ...

    def read(self, timeout_s: float) -> LiveFrame | None:
        """The next frame; None if there is none after `timeout_s` seconds, or sooner.

        Raises:
            LiveError: if the connection is over.
            StreamEndedError: if the stream was of limited length and is over.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...
