"""Packets of a file: damage is skipped, and all streams are on one clock. Whoever reads a file reads it through this.

Knows nothing of decoding, models or sinks.
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
"""Frames a second, where a file gives no rate."""
_READ_FAILURES_IN_A_ROW = 50  # after so many the rest of the file is unreadable, and asking again would not end
_INDEX_S = 1  # between two key frames of an index: cameras of JPEGs have nothing else


class FileDemuxer:
    """Reads the packets of one container.

    Args:
        container: the file, open, at its beginning or where `shift` holds.
        video: the stream whose frames are wanted; None for none.
        shift: seconds that the clock has been moved by before this place.
    """

    def __init__(
        self, container: InputContainer, video: av.VideoStream | None, *, shift: Fraction = Fraction(0)
    ) -> None:
        self._container = container
        # Sound is read wherever video is: both together tell a jump of the clock from a pause of one.
        streams: list[Any] = [one for one in (video, *container.streams.audio[:1]) if one is not None]
        for one in streams:
            one.discard = Discard.default
        self._streams = streams
        clock = InputClock(jumps=clock_may_jump(container), shift=shift)
        self._clocks = {
            one.index: clock.stream(one.time_base or Fraction(1, av.time_base), _step(one)) for one in streams
        }

    def shift_of(self, stream: av.stream.Stream) -> Fraction:
        """Seconds that the newest packet of a stream was moved by."""
        clock = self._clocks[stream.index]
        return clock.shift * (stream.time_base or Fraction(1, av.time_base))

    def packets_of(self, stream: av.VideoStream) -> Iterator[av.Packet[av.VideoStream]]:
        """Yield the packets of one stream, as `packets` does."""
        return (packet for packet in self.packets() if packet.stream_index == stream.index)

    def packets(
        self, damaged: Callable[[], object] | None = None, closed: threading.Event | None = None
    ) -> Iterator[av.Packet[Any]]:
        """Yield the packets of all streams, and for each stream at the end the empty one that flushes its decoder.

        Args:
            damaged: called where a part of the file cannot be read.
            closed: ends it.
        """
        packets, failures = self._container.demux(*self._streams), 0
        held: dict[int, av.Packet[Any]] = {}  # of each stream the newest, until the one after it is there
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
    """Whether the container's format is one whose clock may jump, such as MPEG-TS."""
    return bool(Flags(container.format.flags) & Flags.ts_discont)


def _step(stream: Any) -> Fraction | None:
    """Seconds from one packet to the next, where it is known."""
    if stream.type != "video":
        return None
    return 1 / Fraction(stream.average_rate or stream.guessed_rate or NOMINAL_RATE)


@dataclass(slots=True, frozen=True)
class KeyFrame:
    """Where decoding of a file may begin.

    Attributes:
        time: of presentation on the file's one clock, in units of the video.
        pts: as the container has it.
        position: in bytes from the beginning of the file; None where it is not known.
        shift: seconds by which timestamps are moved from here on, see `InputClock`.
    """

    time: int
    pts: int
    position: int | None
    shift: Fraction


class FileIndex:
    """The key frames of a file's video that have been read so far. Every method is callable from any thread.

    Args:
        path: the file.
        base: seconds of one unit of the video's timestamps.
        origin: timestamp of the video's beginning, which is 0 s.
    """

    def __init__(self, path: Path, base: Fraction, origin: int) -> None:
        self.path, self.base, self.origin = path, base, origin
        self._keys: list[KeyFrame] = []  # grows at its end only

    def add(self, key: KeyFrame) -> None:
        """Add the next one; those that come again, or soon after the last one, are left out."""
        if not self._keys or (key.time - self._keys[-1].time) * self.base >= _INDEX_S:
            self._keys.append(key)

    def before(self, time: int) -> KeyFrame | None:
        """The last one at or before a time, in units; None if none is known."""
        at = bisect.bisect_right(self._keys, time, key=lambda one: one.time)
        return self._keys[at - 1] if at else None


def seek(container: InputContainer, stream: av.VideoStream, key: KeyFrame) -> bool:
    """Go to a key frame; False where the container cannot."""
    try:
        if not clock_may_jump(container):
            container.seek(key.pts, stream=stream, backward=True)
        elif key.position is None:
            return False
        else:  # its timestamps may be there twice
            container.seek(key.position, unsupported_byte_offset=True)
    except av.error.FFmpegError:
        return False
    return True
