"""How long before a prefill ends the next images are admitted, so that they are prepared when it does.

Admitted when a prefill is done, images are as new as can be. But to prepare 8 takes the interpreter some milliseconds,
and behind a prefill it is wanted for steps that take the device 1.5 ms each: the device waits for them. While a prefill
of 30 ms runs there is nothing else to do. So the lead is what nearly all images take, not less by the decode steps.
Simulated (`tests.support.engine.simulation`), FP8, 3 ms for an image of 640×360 and 30 in 4K: 92 % of a closed loop's
rate without a lead, frames at launch 22 ms old in the median, 78 at the 99th percentile; 99.8 % with it, 29 and 72 ms.

Where next to no decode steps come between two prefills, as answers are drafted, the next prefill is launched before the
one ahead ends: else the device waits while the host reads one and launches the other.

Pure arithmetic: knows no images, no devices and no clock.
"""

from __future__ import annotations

import math
from collections import deque

from saccade.engine.core.streams import ServiceTime

_SELDOM = 0.5  # decode steps between two prefills
_SOONER = 0.9  # else a first prefill that was slow is what all take, as the next are admitted that late, and read
_KEPT = 16  # prefills of a size, of which the shortest counts: too early is better than too late


class AdmissionLead:
    """Learns what prefills and preparations take.

    Args:
        decodes: steps between two prefills, until that is learned, too.
    """

    def __init__(self, decodes: int) -> None:
        self._prefills: dict[int, deque[float]] = {}
        self._prepare, self._launch = ServiceTime(), ServiceTime()
        self._between, self._decoded = float(decodes), 0  # decode steps between prefills, and since the last one

    @property
    def follow(self) -> bool:
        """Whether prefills follow each other, with next to no decode steps between."""
        return self._between < _SELDOM

    def launched(self, seconds: float) -> None:
        """Learn from how long the host took to launch a prefill."""
        self._launch.measured(seconds)

    def prefilled(self, images: int, seconds: float, *, waited: bool = True) -> None:
        """Learn from a prefill of so many images.

        Args:
            images: of the prefill.
            seconds: until it was read.
            waited: whether it was waited for then; else it has taken less, as when the moment to admit came after it.
        """
        if not waited:
            seconds *= _SOONER
        self._between += (self._decoded - self._between) / 8
        self._decoded = 0
        self._prefills.setdefault(images, deque(maxlen=_KEPT)).append(seconds)

    def decoded(self) -> None:
        """Note a decode step."""
        self._decoded += 1

    def prepared(self, seconds: float) -> None:
        """Learn from an image, from its admission on."""
        self._prepare.measured(seconds)

    def admit_at(self, images: int, begun: float) -> float:
        """When, during a prefill, the next images are to be admitted; infinity: behind it.

        Args:
            images: of the prefill.
            begun: when it began, in seconds.
        """
        known, lead = self._prefills.get(images), self._prepare.seconds
        if self.follow:
            lead += self._launch.seconds
        return begun + max(0.0, min(known) - lead) if known and lead > 0 else math.inf

    def launch_at(self, images: int, begun: float) -> float:
        """When the next images are to be launched, likewise, after they are admitted; infinity: behind it."""
        known = self._prefills.get(images)
        if not known or not self.follow:
            return math.inf
        return begun + max(0.0, min(known) - self._launch.seconds)
