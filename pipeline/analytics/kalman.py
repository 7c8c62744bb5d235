"""The Kalman filter of a tracker: centre and size of many boxes at once, with velocities, over real time.

The model is BoT-SORT's (centre, width, height and their velocities, noise in proportion to the size of the box), for
any time between two frames. All its covariances are diagonal in the four coordinates, so that the 8 × 8 covariance of
a box falls apart into four symmetric 2 × 2 matrices: three numbers a coordinate, and no matrix is ever inverted.

A state is a float64 array of shape (5, 4, n): the value, its velocity, the variance of the value, the covariance of
both, and the variance of the velocity, of the centre in x and y, the width and the height of n boxes. With few boxes
the time goes to numpy's calls, about a microsecond each, so it is they that are few here. Knows numbers only.
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
_STILL = np.eye(5)


def start(boxes: Floats) -> Floats:
    """States of boxes seen for the first time, standing still.

    Args:
        boxes: (4, n), centre x and y, width and height, in any unit.
    """
    state = np.zeros((5, *boxes.shape))
    size = np.concatenate((boxes[2:], boxes[2:]))  # the width for x and width, the height for y and height
    state[0] = boxes
    state[2] = (2 * _POSITION * size) ** 2
    state[4] = (10 * _VELOCITY * size) ** 2
    return state


def predict(state: Floats, seconds: float) -> Floats:
    """The states after a time of at least 0.

    The noise is white in the acceleration and in the position, so that two predictions one after the other are one of
    the sum of their times: what is predicted over dropped frames is what would have been predicted frame by frame.
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
    """The states with measured boxes taken in.

    Args:
        state: (5, 4, n), predicted for the time of the boxes.
        boxes: (4, n), as in `start`, in the order of the states.
    """
    values, velocity_var = state[:4].reshape(2, 2, 2, 2, -1), state[4].reshape(2, 2, -1)
    (value, _), variances = values
    noise = _POSITION**2 * (value[1] * value[1])
    gains = variances / (variances[0] + noise)  # of the value, and of its velocity
    out = np.empty_like(state)
    new_values, new_variances = out[:4].reshape(2, 2, 2, 2, -1)
    np.multiply(gains, boxes.reshape(2, 2, -1) - value, out=new_values)
    new_values += values[0]
    np.multiply(gains, noise, out=new_variances)  # which is variances * (1 - gains[0])
    np.subtract(velocity_var, gains[1] * variances[1], out=out[4].reshape(2, 2, -1))
    return out
