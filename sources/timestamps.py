"""Corrects timestamps of media files: removes jumps between packets, and makes frame timestamps strictly increasing."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

_FALL_S = 1  # a stream that falls back by more has jumped; less is a careless muxer
_JUMP_S = 10  # FFmpeg's own limit for formats whose clocks may jump
_GAP_S = 24 * 3600  # in other formats a gap may be real, such as of a recorder that keeps only motion
_APART_S = 3600  # presentation and decoding are never further apart; a few frames are usual
_MOST_SHIFTS = 64
_LIMIT = 2**62  # timestamps beyond are garbage, and adding to them would leave 64 bits


class InputClock:
    """Removes jumps from the timestamps of a media file. All streams are shifted alike and stay synchronous.

    A jump is a decrease by more than 1 s, or an increase by more than 10 s (a day if `jumps` is False). If only one
    stream jumps ahead, this is treated as a pause.

    Args:
        jumps: whether timestamps of the file format may jump, as in MPEG-TS.
        shift: initial shift in seconds, if reading begins after a jump.
    """

    def __init__(self, *, jumps: bool, shift: Fraction = Fraction(0)) -> None:
        self.jumps = jumps
        self.shifts: deque[tuple[int, Fraction]] = deque([(0, shift)], _MOST_SHIFTS)  # number and seconds, newest last
        self.streams: list[StreamClock] = []

    def stream(self, base: Fraction, step: Fraction | None = None) -> StreamClock:
        """Add a stream of the file. Return the `StreamClock` that corrects the timestamps of the stream.

        Args:
            base: seconds per timestamp unit of the stream.
            step: duration in seconds of packets that state none; None for one timestamp unit.

        Raises:
            ValueError: if `base` or `step` is not positive.
        """
        stream = StreamClock(self, base, base if step is None else step)
        self.streams.append(stream)
        return stream


class StreamClock:
    """Removes jumps from the timestamps of one stream. Packets must be passed in the order of the file.

    Attributes:
        shift: correction that was added to the timestamps of the last packet, in timestamp units.
    """

    __slots__ = (
        "_apart",
        "_base",
        "_end",
        "_fall",
        "_input",
        "_jump",
        "_near",
        "_number",
        "_reordered",
        "_step",
        "shift",
    )

    def __init__(self, clock: InputClock, base: Fraction, step: Fraction) -> None:
        if base <= 0 or step <= 0:
            raise ValueError(f"the time base and the frame duration must be positive, not {base} and {step}")
        self._input = clock
        self._base = base
        self._step = max(1, round(step / base))
        self._fall = max(1, int(_FALL_S / base))
        self._reordered = max(16, int(_JUMP_S / base))  # of packets that only have a time of presentation
        self._jump = max(1, int((_JUMP_S if clock.jumps else _GAP_S) / base))
        self._near = max(1, int(_JUMP_S / base))
        self._apart = max(16, int((_JUMP_S if clock.jumps else _APART_S) / base))
        self._number, shift = clock.shifts[0]
        self.shift = round(shift / base)
        self._end: int | None = None  # of the latest packet, placed

    @property
    def end_s(self) -> Fraction | None:
        """End time of the last packet in seconds, in corrected time; None if unknown."""
        return None if self._end is None else self._end * self._base

    def place(
        self, pts: int | None, dts: int | None, duration: int | None, following: int | None = None
    ) -> tuple[int | None, int | None]:
        """Return the corrected presentation and decoding timestamps (PTS, DTS) of a packet.

        Args:
            pts: presentation timestamp, or None; any value is allowed.
            dts: decoding timestamp, or None; any value is allowed.
            duration: duration in timestamp units, or None.
            following: timestamp of the packet that follows in the stream, or None.

        Returns:
            PTS and DTS; None for a timestamp that is missing or impossible.
        """
        pts, dts = _plausible(pts), _plausible(dts)
        time = pts if dts is None else dts
        if time is None:
            return None, None
        ends = self._ends_of_others() if self._end is None and self._input.jumps else []
        if ends and all(abs((time + self.shift) * self._base - end) > _JUMP_S for end in ends):
            self._end = round(max(ends) / self._base)  # it begins far from where the others are
        if self._end is not None:
            ahead = time + self.shift - self._end
            fall = self._reordered if dts is None else self._fall
            if not -fall <= ahead <= self._near:
                following = _plausible(following)
                if following is not None and -fall <= following + self.shift - self._end <= self._near:
                    self._end += self._step
                    return None, None  # a wrong time of this packet alone
                if not -fall <= ahead <= self._jump:
                    self._follow(time, ahead)
        placed = time + self.shift
        if _plausible(placed) is None:  # by many small advances
            return None, None
        if duration is not None and 0 < duration <= self._reordered:
            self._step = duration
        end = placed + self._step
        self._end = end if self._end is None else max(self._end, end)
        if pts is not None and abs(pts - time) > self._apart:
            pts = None
        return _plausible(None if pts is None else pts + self.shift), None if dts is None else placed

    def _follow(self, time: int, ahead: int) -> None:
        """Shift the stream's timestamps after a jump, so that they continue without a gap.

        Args:
            time: the packet's timestamp.
            ahead: increase over the expected timestamp, in timestamp units; negative for a decrease.
        """
        assert self._end is not None
        others = self._ends_of_others()
        if ahead > 0 and any(abs((time + self.shift) * self._base - end) <= _JUMP_S for end in others):
            self._end = None  # a pause of this stream alone
            return
        self._number, self.shift = self._known_shift(time) or self._new_shift(time)
        self._end = None

    def _ends_of_others(self) -> list[Fraction]:
        return [end for one in self._input.streams if one is not self and (end := one.end_s) is not None]

    def _known_shift(self, time: int) -> tuple[int, int] | None:
        """Return a shift that another stream has already used and that fits this stream, or None.

        The result is the number of the shift, and the shift in timestamp units of this stream.
        """
        assert self._end is not None
        best: tuple[int, int, int] | None = None
        for number, seconds in self._input.shifts:
            shift = round(seconds / self._base)
            off = abs(time + shift - self._end)
            if number > self._number and off <= self._near and (best is None or off < best[0]):
                best = off, number, shift
        return best and best[1:]

    def _new_shift(self, time: int) -> tuple[int, int]:
        assert self._end is not None
        shift, number = self._end - time, self._input.shifts[-1][0] + 1
        self._input.shifts.append((number, shift * self._base))
        return number, shift


def _plausible(time: int | None) -> int | None:
    return time if time is not None and -_LIMIT < time < _LIMIT else None


class Timeline:
    """Makes the timestamps of decoded frames strictly increasing, and fills in missing timestamps.

    Args:
        step: duration of a frame at the nominal frame rate, in timestamp units; positive.
        first: timestamp of the first frame, if its timestamp is missing.

    Raises:
        ValueError: if `step` is not positive.
    """

    __slots__ = ("_anchor", "_last", "_missing", "_step")

    def __init__(self, step: Fraction, first: int = 0) -> None:
        if step <= 0:
            raise ValueError(f"the step between two timestamps must be positive, not {step}")
        self._step = step
        self._anchor = first  # what missing timestamps are counted from
        self._missing = 0
        self._last: int | None = None

    def place(self, pts: int | None) -> int:
        """Return the corrected timestamp of the next frame.

        Args:
            pts: timestamp of the frame, or None if it is missing.
        """
        last = self._last
        if pts is None:
            placed = self._anchor + round(self._missing * self._step)
            self._missing += 1
        else:
            placed, self._missing = pts, 1
        if last is not None:
            placed = max(placed, last + 1)
        if pts is not None:
            self._anchor = placed
        self._last = placed
        return placed
