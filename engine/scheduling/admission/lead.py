"""How long before a prefill ends the next images are admitted, so that they are prepared when their turn comes.

Admitted when a prefill is done, images are as new as can be; but where preparing them takes longer than the decode
steps behind that prefill, the device waits, or decodes what is better decoded together. So they are admitted earlier
by the difference. With threads as busy as 64 cameras make them (`tests.support.engine.timed_executor`), an image is
prepared in 3 ms in the median, in 10 at the 90th percentile, and three decode steps take 5. Simulated, FP8, 3 ms for
an image of 640×360 and 30 in 4K: 92 % of a closed loop's rate without a lead, 98.9 with it (an H200 had 88 without),
frames at launch 22 and 26 ms old in the median, 78 and 71 at the 99th percentile; with two deviations instead of a
half 99.8 %, 47 and 103 ms.

Where next to no decode steps come between two prefills, as answers are drafted, the next prefill is launched before the
one ahead ends: else the device waits while the host reads one and launches the other.

Pure arithmetic: knows no images, no devices and no clock.
"""

from __future__ import annotations

import math
from collections import deque

from saccade.engine.scheduling.admission.streams import ServiceTime

_DEVIATIONS = 0.5  # above the mean
_SELDOM = 0.5  # decode steps between two prefills
_KEPT = 16  # prefills of a size, of which the shortest counts: too early is better than too late


class AdmissionLead:
    """Learns what steps and preparations take.

    Args:
        decodes: steps between two prefills.
    """

    def __init__(self, decodes: int) -> None:
        self._decodes = decodes
        self._prefills: dict[int, deque[float]] = {}
        self._decode, self._prepare, self._launch = ServiceTime(), ServiceTime(), ServiceTime()
        self._between, self._decoded = float(decodes), 0  # decode steps between prefills, and since the last one

    def launched(self, seconds: float) -> None:
        """Learn from how long the host took to launch a prefill."""
        self._launch.measured(seconds)

    def prefilled(self, images: int, seconds: float) -> None:
        """Learn from a prefill of so many images."""
        self._between += (self._decoded - self._between) / 8
        self._decoded = 0
        self._prefills.setdefault(images, deque(maxlen=_KEPT)).append(seconds)

    def decoded(self, seconds: float) -> None:
        """Learn from a decode step."""
        self._decoded += 1
        self._decode.measured(seconds)

    def prepared(self, seconds: float) -> None:
        """Learn from an image, from its admission on."""
        self._prepare.measured(seconds)

    def admit_at(self, images: int, begun: float) -> float:
        """When, during a prefill, the next images are to be admitted; infinity: behind it.

        Args:
            images: of the prefill.
            begun: when it began, in seconds.
        """
        known = self._prefills.get(images)
        lead = self._prepare.mean + _DEVIATIONS * self._prepare.deviation
        lead += self._launch.seconds if self._between < _SELDOM else -self._decodes * self._decode.mean
        return begun + max(0.0, min(known) - lead) if known and lead > 0 else math.inf

    def launch_at(self, images: int, begun: float) -> float:
        """When the next images are to be launched, likewise, after they are admitted; infinity: behind it."""
        known = self._prefills.get(images)
        if not known or self._between >= _SELDOM:
            return math.inf
        return begun + max(0.0, min(known) - self._launch.seconds)
