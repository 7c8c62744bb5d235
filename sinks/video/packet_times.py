"""Makes any timestamps into ones that FFmpeg's muxers accept. Pure integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

LONGEST_UNITS = 2**31 - 2
"""The longest that an MP4 can show a frame, in units of its track."""
_REORDERED_S = 600  # presentation is never further behind decoding
_LIMIT = 2**56  # muxers multiply timestamps by time scales


@dataclass(slots=True, frozen=True)
class Times:
    """What a packet is written with, in units of the file."""

    pts: int
    dts: int
    duration: int


class PacketTimes:
    """The times of one stream of a file that is being written.

    FFmpeg refuses a packet whose time of decoding does not grow or is after its time of presentation. A gap of 2^31
    units or more ends the whole process: FFmpeg asserts that there is none.

    - A file begins at 0. What was before that is moved there.
    - A missing time is taken from the packet's other one, else from the packet before it.
    - Where decoding does not grow it is 1 unit after the packet before.
    - A packet that would leave a gap longer than a file can hold has no place in it.

    Args:
        base: seconds of one unit of the stream in the file.

    Attributes:
        base: as given.

    Raises:
        ValueError: if `base` is not more than 0.
    """

    __slots__ = ("_last", "_reordered", "_step", "base")

    def __init__(self, base: Fraction) -> None:
        if base <= 0:
            raise ValueError(f"a time base is more than 0, not {base}")
        self.base = base
        self._reordered = min(LONGEST_UNITS, round(_REORDERED_S / base))
        self._step = 1  # from the packet before the last to the last
        self._last: int | None = None

    def place(self, pts: int | None, dts: int | None, duration: int | None, base: Fraction | None) -> Times | None:
        """The times of the next packet; None where it has no place in the file.

        Args:
            pts: its time of presentation, or None. Any value is allowed, here and in the others.
            dts: its time of decoding, likewise.
            duration: for how long it lasts, likewise.
            base: seconds of one unit of these three; None if it is not known.
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
            decoded = max(decoded, last + 1)
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
        """A time of a packet in units of the file; None if it cannot be true."""
        if value is None or base is None or base <= 0:
            return None
        units = round(value * base / self.base)
        return units if -_LIMIT < units < _LIMIT else None
