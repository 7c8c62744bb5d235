"""One kind of number that is compared with a reference: how many agree, and the worst disagreement."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

ANYTHING, ANY_NUMBER = math.inf, sys.float_info.max
"""Tolerances of what is only shown; the second one's numbers must be numbers still."""


@dataclass(slots=True)
class Quantity:
    """One kind of number: how many were compared and differ, the largest disagreement, and the largest allowed."""

    name: str
    tolerance: float
    compared: int = 0
    differing: int = 0
    worst: float = 0.0
    where: str = ""

    @property
    def ok(self) -> bool:
        """Whether all that was compared agrees. A disagreement that is not a number is one."""
        return self.worst <= self.tolerance

    def add(self, difference: float, where: str) -> None:
        """Note one comparison."""
        self.compared += 1
        self.differing += difference != 0
        if math.isnan(difference):
            difference = math.inf
        if difference > self.worst:
            self.worst, self.where = difference, where
