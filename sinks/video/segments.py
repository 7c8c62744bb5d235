"""Decides when a recording starts a new file (segment), and names the files."""

from __future__ import annotations

import re
from datetime import datetime
from fractions import Fraction
from functools import cached_property
from pathlib import Path

DEFAULT_S = 600.0
GAP_S = 30  # a longer gap, such as of a camera that was off, is not recorded: the next segment begins after it

_STAMP = "-%Y%m%d-%H%M%S"
_DIRECTIVE = re.compile(r"%[aAbBdfHIjmMpsSuUVwWyYzZ]")
_DIGITS = {
    "Y": 4,
    "f": 6,
    "j": 3,
    "u": 1,
    "w": 1,
    **dict.fromkeys("dHImMSUVWy", 2),
}  # of numbers


class Segmenter:
    """Decides at which frames a recording starts a new file (segment).

    A new file starts after `length_s`, or after a gap of more than `GAP_S` seconds. It also starts if the frame size or
    time base changes, or if a timestamp does not increase.

    Args:
        length_s: duration of a file in seconds.
    """

    __slots__ = ("_base", "_last", "_length_s", "_size", "_start")

    def __init__(self, length_s: float) -> None:
        self._length_s = Fraction(length_s)
        self._base = Fraction(1)
        self._start: int | None = None
        self._last = 0
        self._size = (0, 0)

    def starts_segment(self, pts: int, base: Fraction, size: tuple[int, int]) -> bool:
        """Return whether a frame starts a new file of the recording.

        Args:
            pts: presentation timestamp of the frame.
            base: seconds per unit of `pts`.
            size: width and height in pixels.
        """
        cut = self._start is None or not self._continues(pts, base, size) or self._age(pts) >= self._length_s
        if cut:
            self._start, self._base, self._size = pts, base, size
        self._last = pts
        return cut

    def is_continuous(self, pts: int, base: Fraction) -> bool:
        """Return whether a frame follows the previous frame without a gap of more than `GAP_S` seconds.

        Args:
            pts: presentation timestamp of the frame.
            base: seconds per unit of `pts`.
        """
        return base == self._base and 0 < (pts - self._last) * base <= GAP_S

    def _continues(self, pts: int, base: Fraction, size: tuple[int, int]) -> bool:
        return self.is_continuous(pts, base) and size == self._size

    def _age(self, pts: int) -> Fraction:
        return (pts - (self._start or 0)) * self._base


class SegmentNames:
    """File names of a recording's segments, from a path with `strftime` placeholders such as `%H`.

    Args:
        path: path such as `door-%Y%m%d-%H%M%S.mp4`. Folder names may contain placeholders too. If the path has no
            placeholders, date and time are inserted before the suffix.
    """

    def __init__(self, path: str) -> None:
        if not is_pattern(path):
            plain = Path(path.replace("%", "%%"))
            path = str(plain.with_name(plain.stem + _STAMP + plain.suffix))
        self.pattern = path

    @property
    def root(self) -> Path:
        """Folder that contains all files of the recording, such as `rec` for the path `rec/%Y/%H%M.mp4`."""
        parts = Path(self.pattern).parts
        fixed = next(n for n, part in enumerate(parts) if _DIRECTIVE.search(part))
        return Path(*(part.replace("%%", "%") for part in parts[:fixed]))

    def at(self, time: datetime, number: int = 0) -> Path:
        """Return the path of a segment.

        Args:
            time: start time of the segment.
            number: 0, or a number to append to the name if the path is already used.
        """
        path = Path(time.strftime(self.pattern))
        return path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path

    @property
    def depth(self) -> int:
        """Number of subfolder levels between `root` and a file of the recording."""
        return len(Path(self.pattern).parts) - len(self.root.parts) - 1

    def owns(self, path: Path) -> bool:
        """Return whether the name of a file belongs to this recording. Earlier runs and unfinished files count."""
        return self._mine.fullmatch(str(path)) is not None

    @cached_property
    def _mine(self) -> re.Pattern[str]:
        pattern = Path(self.pattern)
        text = ""
        for piece in re.split(r"(%.)", str(pattern.with_suffix(""))):
            if piece == "%%":
                text += "%"
            elif re.fullmatch("%.", piece):
                digits = _DIGITS.get(piece[1])
                text += rf"\d{{{digits}}}" if digits else "[^/]+"
            else:
                text += re.escape(piece)
        return re.compile(rf"{text}(-\d+)?{re.escape(pattern.suffix)}(\.part)?")


def is_pattern(path: str) -> bool:
    """Return whether a path contains a `strftime` placeholder such as `%H`."""
    return _DIRECTIVE.search(path.replace("%%", "")) is not None
