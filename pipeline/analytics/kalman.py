"""The Kalman filter of a tracker: centre and size of many boxes at once, with velocities, over real time.

The model is BoT-SORT's (centre, width, height and their velocities, noise in proportion to the size of the box), for
any time between two frames. All its covariances are diagonal in the four coordinates, so that the 8 × 8 covariance of
a box falls apart into four symmetric 2 × 2 matrices: three numbers a coordinate, and no matrix is ever inverted.

A state is a float64 array of shape (5, n, 2, 2): for n boxes, their centre and size in x and y: the value, its
velocity, the variance of the value, the covariance of both, and the variance of the velocity. Knows numbers only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEP_S = 1 / 30
"""The unit of time of velocities and noise, in seconds: the frame of the videos on which BoT-SORT chose its noise."""

# Standard deviations, in sizes of the box: of a measured position, and of what a velocity changes by in a step.
_POSITION = 1 / 20
_VELOCITY = 1 / 160

_LEAST_SIZE = 1e-6


def start(boxes: Floats) -> Floats:
    """States of boxes seen for the first time, standing still.

    Args:
        boxes: (n, 2, 2), centre and size, each in x and y, in any unit.
    """
    state = np.zeros((5, *boxes.shape))
    size = boxes[:, 1:]  # the width for x and width, the height for y and height
    state[0] = boxes
    state[2] = (2 * _POSITION * size) ** 2
    state[4] = (10 * _VELOCITY * size) ** 2
    return state


def predict(state: Floats, seconds: float) -> None:
    """Move the states on by a time of at least 0, in place.

    The noise is white in the acceleration and in the position, so that two predictions one after the other are one of
    the sum of their times: what is predicted over dropped frames is what would have been predicted frame by frame.
    """
    steps = seconds / STEP_S
    value, velocity, value_var, cov, velocity_var = state
    size_var = value[:, 1:] ** 2
    value += steps * velocity
    np.maximum(value[:, 1], _LEAST_SIZE, out=value[:, 1])
    by_velocity = steps * velocity_var
    noise = _VELOCITY**2 * steps
    value_var += steps * (2 * cov + by_velocity) + (steps**2 / 3 * noise + _POSITION**2 * steps) * size_var
    cov += by_velocity + (steps / 2 * noise) * size_var
    velocity_var += noise * size_var


def correct(state: Floats, boxes: Floats) -> Floats:
    """The states with measured boxes taken in.

    Args:
        state: (5, n, 2, 2), predicted for the time of the boxes.
        boxes: (n, 2, 2), as in `start`, in the order of the states.
    """
    value, velocity, value_var, cov, velocity_var = state
    measured = value_var + (_POSITION * value[:, 1:]) ** 2
    gain, velocity_gain = value_var / measured, cov / measured
    off = boxes - value
    rest = 1 - gain
    out = np.empty_like(state)
    out[0] = value + gain * off
    out[1] = velocity + velocity_gain * off
    out[2] = rest * value_var
    out[3] = rest * cov
    out[4] = velocity_var - velocity_gain * cov
    return out
