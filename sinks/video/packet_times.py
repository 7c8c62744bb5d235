"""Repairs the timestamps of packets so that FFmpeg's muxers accept them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

LONGEST_UNITS = 2**31 - 2
"""Longest time that an MP4 can show a frame, in units of its track."""
_REORDERED_S = 600  # presentation is never further behind decoding
_LIMIT = 2**56  # muxers multiply timestamps by time scales


@dataclass(slots=True, frozen=True)
class Times:
    """Corrected timestamps of a packet, in the time base of the output stream."""

    pts: int
    dts: int
    duration: int


class PacketTimes:
    """Computes timestamps for one stream of an output file that FFmpeg's muxer accepts.

    - The file starts at 0; earlier timestamps become 0.
    - A missing timestamp is derived from the packet's other timestamp, or from the previous packet.
    - If the decoding timestamp (DTS) does not increase, it becomes the previous DTS plus 1 unit.
    - A packet after a gap of 2^31 units or more is rejected.

    Args:
        base: time base of the stream in the file: seconds per unit.

    Attributes:
        base: time base of the stream in the file: seconds per unit.

    Raises:
        ValueError: if `base` is not positive.
    """

    __slots__ = ("_last", "_reordered", "_step", "base")

    def __init__(self, base: Fraction) -> None:
        if base <= 0:
            raise ValueError(f"the time base must be positive, not {base}")
        self.base = base
        self._reordered = min(LONGEST_UNITS, round(_REORDERED_S / base))
        self._step = 1  # from the packet before the last to the last
        self._last: int | None = None

    def place(self, pts: int | None, dts: int | None, duration: int | None, base: Fraction | None) -> Times | None:
        """Return the corrected timestamps of the next packet, or None if the packet does not fit into the file.

        Args:
            pts: presentation timestamp, or None.
            dts: decoding timestamp, or None.
            duration: duration, or None.
            base: seconds per unit of `pts`, `dts` and `duration`; None if unknown.
        """
        shown, decoded, lasts = (self._units(value, base) for value in (pts, dts, duration))
        last = self._last
        if decoded is None:
            decoded = shown if last is None or shown is None else min(shown, last + self._step)
        if decoded is None:
            decoded = 0 if last is None else last + self._step
        if last is None:
            decoded = max(decoded, 0)
            if decoded > LONGEST_UNITS:
                return None
        else:
            decoded = max(decoded, last + 1)  # FFmpeg rejects others, and a gap of 2^31 units aborts the process
            if decoded - last > LONGEST_UNITS:
                return None
            self._step = decoded - last
        self._last = decoded
        if shown is None or not 0 <= shown - decoded <= self._reordered:
            shown = decoded
        if lasts is None or not 0 < lasts <= LONGEST_UNITS:
            lasts = self._step
        return Times(shown, decoded, lasts)

    def _units(self, value: int | None, base: Fraction | None) -> int | None:
        """Convert a timestamp to the time base of the output stream. Return None if it is missing or out of range."""
        if value is None or base is None or base <= 0:
            return None
        units = round(value * base / self.base)
        return units if -_LIMIT < units < _LIMIT else None
