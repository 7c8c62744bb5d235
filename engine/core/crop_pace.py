"""How long an image takes to be cut into crops, learned from past ones: a deadline that leaves less is refused at once.

Pure arithmetic: knows no images, no devices and no clock.
"""

from __future__ import annotations

CPU_SECONDS_PER_PIXEL = 10e-9
"""Before anything is measured. A 48-megapixel image takes 20 ns a pixel on an idle server core, 40 on a busy one."""
_LARGE = 1 << 18  # pixels; of a smaller image what is measured is mostly the resampling of its output
_SHARE = 0.5  # of what was measured: a lower bound for an image of any size, on a machine that is less busy
_DOUBT = 0.9  # times the estimate after each refusal, so that one slow image does not refuse all others for ever


class CropPace:
    """A lower bound of seconds per source pixel. Any thread may call it.

    Args:
        seconds_per_pixel: what holds until a large image has been measured.
    """

    __slots__ = ("_doubted", "_rate")

    def __init__(self, seconds_per_pixel: float) -> None:
        self._rate, self._doubted = seconds_per_pixel, True

    def seconds(self, pixels: int) -> float:
        """At least so long takes an image of so many pixels."""
        return self._rate * pixels

    def measured(self, pixels: int, seconds: float) -> None:
        """Learn from an image that was cut."""
        if pixels >= _LARGE:
            rate = _SHARE * seconds / pixels
            self._rate = rate if self._doubted else min(self._rate, rate)
            self._doubted = False

    def refused(self) -> None:
        """Note that an image was refused for its estimate, which is trusted a little less from then on."""
        self._rate *= _DOUBT
        self._doubted = True
