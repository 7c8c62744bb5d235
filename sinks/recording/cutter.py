"""Groups encoded frames into MP4 fragments, and computes the decoding and presentation times of the frames.

Packets arrive in decoding order. With B-frames, this order differs from the presentation order.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.sinks.video.fragments import VIDEO_SCALE
from saccade.sources.live.packets import CodedPacket

FRAGMENT_S = 1.0
"""A fragment ends after this many seconds, or at a keyframe."""

_MOST_REORDERED = 64  # packets of one group; more is a clock that stands still


@dataclass(slots=True, frozen=True)
class TimedPacket:
    """An encoded frame with its timestamps in the MP4 file, in units of 1/90000 s.

    Attributes:
        packet: the encoded frame.
        decode: decoding timestamp.
        duration: time until the next frame is decoded.
        offset: presentation timestamp minus decoding timestamp.
    """

    packet: CodedPacket
    decode: int
    duration: int
    offset: int


class FragmentCutter:
    """Groups the video packets of one MP4 file into fragments. The first packet must be a keyframe."""

    def __init__(self) -> None:
        self._group: list[CodedPacket] = []
        self._taken: list[CodedPacket] = []  # whole groups of the fragment
        self._origin: int | None = None
        self._top = 0  # the latest time of presentation so far
        self._end = -1  # of decoding, of what was handed out
        self._step = VIDEO_SCALE // 25

    @property
    def empty(self) -> bool:
        """Whether no packets are waiting for the next fragment."""
        return not self._group and not self._taken

    def push(self, packet: CodedPacket) -> list[TimedPacket]:
        """Add a packet. Return the fragment's packets if a fragment is now complete, else an empty list."""
        found: list[TimedPacket] = []
        if self._group and (packet.pts > self._top or len(self._group) >= _MOST_REORDERED):
            found = self._end_group()
        self._top = max(self._top, packet.pts) if self._group else packet.pts
        self._group.append(packet)
        return found

    def close(self) -> list[TimedPacket]:
        """Return the remaining packets as the last fragment."""
        found, self._taken, self._group = [*self._taken, *self._group], [], []
        return self._timed(found, None)

    def _end_group(self) -> list[TimedPacket]:
        group, self._group = self._group, []
        start = min(one.pts for one in group)
        taken = self._taken
        long = bool(taken) and start - min(one.pts for one in taken[:_MOST_REORDERED]) >= FRAGMENT_S * VIDEO_SCALE
        if taken and (group[0].key or long):
            self._taken = group
            return self._timed(taken, start)
        self._taken = [*taken, *group]
        return []

    def _timed(self, packets: list[CodedPacket], end: int | None) -> list[TimedPacket]:
        if not packets:
            return []
        times = sorted(one.pts for one in packets)
        if self._origin is None:
            self._origin = times[0]
        shown = [one.pts - self._origin for one in packets]
        decoded: list[int] = []
        for time in times:
            decoded.append(max(time - self._origin, (decoded[-1] if decoded else self._end - 1) + 1))
        if len(times) > 1:
            self._step = max(1, (times[-1] - times[0]) // (len(times) - 1))
        last = decoded[-1] + self._step if end is None else max(end - self._origin, decoded[-1] + 1)
        self._end = last
        ends = [*decoded[1:], last]
        return [
            TimedPacket(packet, decode, until - decode, pts - decode)
            for packet, decode, until, pts in zip(packets, decoded, ends, shown, strict=True)
        ]
