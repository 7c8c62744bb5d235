"""The Kalman filter of a tracker. It estimates the positions, sizes and velocities of all tracked boxes together.

The motion model is the model of BoT-SORT, extended to variable frame intervals. The state of a box consists of its
centre, width and height, and the velocity of each value. The noise is proportional to the size of the box.

The four values are uncorrelated. The 8 × 8 covariance of a box therefore splits into four symmetric 2 × 2 matrices
with three different numbers each, and no matrix is inverted.

A state is a float64 array (5, 4, n) for n boxes. The first axis is value, velocity, variance of the value, covariance
of value and velocity, and variance of the velocity. The second axis is centre x, centre y, width and height. For few
boxes, the overhead of numpy calls dominates, so the code minimizes the number of calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEP_S = 1 / 30
"""Time unit of velocities and noise, in seconds: the frame interval of the videos on which BoT-SORT was tuned."""

# Standard deviations in box sizes: of a measured position, and of the change of a velocity per step.
_POSITION = 1 / 20
_VELOCITY = 1 / 160

_LEAST_SIZE = 1e-6
_STILL = np.eye(5)


def start(boxes: Floats) -> Floats:
    """Return the initial Kalman states (5, 4, n) of boxes, with zero velocity.

    Args:
        boxes: (4, n) centre x, centre y, width and height, in any unit.
    """
    state = np.zeros((5, *boxes.shape))
    size = np.concatenate((boxes[2:], boxes[2:]))  # the width for x and width, the height for y and height
    state[0] = boxes
    state[2] = (2 * _POSITION * size) ** 2
    state[4] = (10 * _VELOCITY * size) ** 2
    return state


def predict(state: Floats, seconds: float) -> Floats:
    """Predict Kalman states for a time that is `seconds` later.

    One prediction over a gap gives the same result as several predictions for parts of the gap.

    Args:
        state: (5, 4, n) states.
        seconds: time difference, in seconds, at least 0.
    """
    steps = seconds / STEP_S
    noise = _VELOCITY**2 * steps
    move = _STILL.copy()
    move[0, 1] = move[3, 4] = steps
    move[2, 3], move[2, 4] = 2 * steps, steps**2
    moved: Floats = move.dot(state.reshape(5, -1)).reshape(state.shape)
    spread = np.array((steps**2 / 3 * noise + _POSITION**2 * steps, steps / 2 * noise, noise))
    size = state[0, 2:]
    moved[2:].reshape(3, 2, 2, -1)[...] += spread[:, None, None, None] * (size * size)
    np.maximum(moved[0, 2:], _LEAST_SIZE, out=moved[0, 2:])
    return moved


def correct(state: Floats, boxes: Floats) -> Floats:
    """Correct predicted Kalman states with measured boxes. Return the new states.

    Args:
        state: (5, 4, n) states, predicted for the time of the measured boxes.
        boxes: (4, n) centre x, centre y, width and height. Column i is the measurement for state i.
    """
    values, velocity_var = state[:4].reshape(2, 2, 2, 2, -1), state[4].reshape(2, 2, -1)
    (value, _), variances = values
    noise = _POSITION**2 * (value[1] * value[1])
    gains = variances / (variances[0] + noise)  # gains of the value and of its velocity
    out = np.empty_like(state)
    new_values, new_variances = out[:4].reshape(2, 2, 2, 2, -1)
    np.multiply(gains, boxes.reshape(2, 2, -1) - value, out=new_values)
    new_values += values[0]
    np.multiply(gains, noise, out=new_variances)  # equals variances * (1 - gains[0])
    np.subtract(velocity_var, gains[1] * variances[1], out=out[4].reshape(2, 2, -1))
    return out
