"""Slope of a measured value over time with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
_Z95 = 1.96


@dataclass(slots=True, frozen=True)
class Slope:
    """Slope of a measured value per minute, and the half-width of its 95 % confidence interval."""

    per_minute: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.per_minute:+.3f} ± {self.half_width:.3f}"


def slope_of(minutes: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Return the least-squares slope of the values with its 95 % confidence interval, or None for fewer than 3 values.

    Args:
        minutes: time of each value in minutes.
        values: the measured values.
    """
    x, y = np.asarray(minutes, dtype=float), np.asarray(values, dtype=float)
    if len(x) < 3:
        return None
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    residuals = y - y.mean() - slope * centred
    power = float(residuals @ residuals)
    lag = float(residuals[1:] @ residuals[:-1]) / power if power > 0 else 0.0
    lag = min(max(lag, 0.0), 0.99)  # successive values are autocorrelated: fewer independent samples
    effective = max(3.0, len(x) * (1 - lag) / (1 + lag))
    error = math.sqrt(power / (effective - 2) / spread)
    degrees = int(effective) - 2
    return Slope(slope, (_T95[degrees - 1] if degrees <= len(_T95) else _Z95) * error)
