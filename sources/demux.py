"""Demuxer for media files: skips damaged parts and makes the timestamps of all streams continuous.

All code that reads media files uses this module.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error
from av.container import InputContainer
from av.format import Flags
from av.stream import Discard

from saccade.sources.timestamps import InputClock

log = logging.getLogger(__name__)

NOMINAL_RATE = Fraction(25)
"""Frames per second assumed for a file that states no rate."""
_READ_FAILURES_IN_A_ROW = 50  # then the rest of the file counts as unreadable; retrying would not end
_INDEX_S = 1  # least distance of two index entries: in Motion JPEG every frame is a keyframe


class FileDemuxer:
    """Reads the packets of a media file. Jumps of the timestamps in the file are removed.

    Args:
        container: the open file, positioned at its beginning or at a keyframe.
        video: the video stream to read; None to read no video.
        shift: seconds to add to all timestamps, if the file is positioned after a jump; see `KeyFrame.shift`.
    """

    def __init__(
        self, container: InputContainer, video: av.VideoStream | None, *, shift: Fraction = Fraction(0)
    ) -> None:
        self._container = container
        # Audio is read along with video: only both together tell a clock jump from a pause of one stream.
        streams: list[Any] = [one for one in (video, *container.streams.audio[:1]) if one is not None]
        for one in streams:
            one.discard = Discard.default
        self._streams = streams
        clock = InputClock(jumps=clock_may_jump(container), shift=shift)
        self._clocks = {
            one.index: clock.stream(one.time_base or Fraction(1, av.time_base), _step(one)) for one in streams
        }

    def shift_of(self, stream: av.stream.Stream) -> Fraction:
        """Return the number of seconds that was added to the timestamps of the newest packet of `stream`."""
        clock = self._clocks[stream.index]
        return clock.shift * (stream.time_base or Fraction(1, av.time_base))

    def packets_of(self, stream: av.VideoStream) -> Iterator[av.Packet[av.VideoStream]]:
        """Yield the packets of one stream. At the end, yield an empty packet to flush the decoder."""
        return (packet for packet in self.packets() if packet.stream_index == stream.index)

    def packets(
        self, damaged: Callable[[], object] | None = None, closed: threading.Event | None = None
    ) -> Iterator[av.Packet[Any]]:
        """Yield the packets of all streams, and at the end one empty packet per stream to flush its decoder.

        Args:
            damaged: called for each part of the file that cannot be read; None to ignore damage.
            closed: event; setting it ends the iteration.
        """
        packets, failures = self._container.demux(*self._streams), 0
        held: dict[int, av.Packet[Any]] = {}  # the newest packet of each stream, until its successor is read
        while closed is None or not closed.is_set():
            try:
                packet = next(packets)
            except (StopIteration, av.error.EOFError):
                break
            except av.error.FFmpegError as error:
                failures += 1
                if damaged is not None:
                    damaged()
                if failures == _READ_FAILURES_IN_A_ROW:
                    log.warning("%s: the rest of the file cannot be read (%s)", self._container.name, error.strerror)
                    break
                packets = self._container.demux(*self._streams)
                continue
            failures = 0
            index = packet.stream_index
            if (before := held.pop(index, None)) is not None:
                yield self._placed(before, packet)
            if packet.size:
                held[index] = packet
            else:
                yield packet
        if closed is None or not closed.is_set():
            for packet in held.values():
                yield self._placed(packet, None)

    def _placed(self, packet: av.Packet[Any], following: av.Packet[Any] | None) -> av.Packet[Any]:
        time = None if following is None else following.pts if following.dts is None else following.dts
        clock = self._clocks[packet.stream_index]
        packet.pts, packet.dts = clock.place(packet.pts, packet.dts, packet.duration, time)
        return packet


def clock_may_jump(container: InputContainer) -> bool:
    """Return whether timestamps may jump in the container's format, such as MPEG-TS."""
    return bool(Flags(container.format.flags) & Flags.ts_discont)


def _step(stream: Any) -> Fraction | None:
    """Return the average time between two packets of `stream` in seconds; None if unknown."""
    if stream.type != "video":
        return None
    return 1 / Fraction(stream.average_rate or stream.guessed_rate or NOMINAL_RATE)


@dataclass(slots=True, frozen=True)
class KeyFrame:
    """A keyframe of a video file. Decoding can start there.

    Attributes:
        time: presentation timestamp with discontinuities removed, in units of the video's time base.
        pts: presentation timestamp in the file, in units of the video's time base.
        position: byte offset in the file; None if unknown.
        shift: `time` minus `pts`, converted to seconds.
    """

    time: int
    pts: int
    position: int | None
    shift: Fraction


class FileIndex:
    """Index of the keyframes of a video file that have been read so far. Thread-safe.

    Args:
        path: path of the file.
        base: seconds per unit of the video's timestamps.
        origin: timestamp of the video's beginning.
    """

    def __init__(self, path: Path, base: Fraction, origin: int) -> None:
        self.path, self.base, self.origin = path, base, origin
        self._keys: list[KeyFrame] = []  # grows at its end only

    def add(self, key: KeyFrame) -> None:
        """Add a keyframe to the index, unless the newest keyframe in the index is less than 1 s older."""
        if not self._keys or (key.time - self._keys[-1].time) * self.base >= _INDEX_S:
            self._keys.append(key)

    def before(self, time: int) -> KeyFrame | None:
        """Return the last keyframe in the index whose `time` is not after the given time, or None."""
        at = bisect.bisect_right(self._keys, time, key=lambda one: one.time)
        return self._keys[at - 1] if at else None


def seek(container: InputContainer, stream: av.VideoStream, key: KeyFrame) -> bool:
    """Move the container's read position to a keyframe. Return False if the container cannot seek."""
    try:
        if not clock_may_jump(container):
            container.seek(key.pts, stream=stream, backward=True)
        elif key.position is None:
            return False
        else:  # the same timestamp may occur twice in the file
            container.seek(key.position, unsupported_byte_offset=True)
    except av.error.FFmpegError:
        return False
    return True
