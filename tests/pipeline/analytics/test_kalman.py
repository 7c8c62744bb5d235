"""The filter of a tracker against the matrices that it stands for, and over any division of time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.pipeline.analytics.kalman import STEP_S, correct, predict, start

BOXES = np.array([[0.5, 0.4, 0.1, 0.3], [0.2, 0.7, 0.05, 0.06]]).T


def moving() -> np.ndarray:
    """States that have seen some boxes, with velocities."""
    state = start(BOXES)
    for number in range(1, 5):
        state = predict(state, 0.05)
        state = correct(state, BOXES + np.array([[number * 0.01, 0.002 * number, 0, 0]]).T)
    return state


@given(st.floats(0, 2), st.floats(0, 2))
def test_predicting_twice_is_predicting_the_sum(first: float, second: float) -> None:
    state = moving()
    state[1, 2:] = 0  # the noise goes with the size, which must not change in between
    once = predict(state, first + second)
    twice = predict(predict(state, first), second)
    np.testing.assert_allclose(once, twice, rtol=1e-9, atol=1e-15)


def test_a_correction_is_that_of_the_whole_matrices() -> None:
    state = predict(moving(), 0.1)
    measured = BOXES + 0.01
    corrected = correct(state, measured)
    for box in range(2):
        value, velocity, value_var, cov, velocity_var = state[:, :, box]
        mean = np.concatenate((value, velocity))
        covariance = np.block([[np.diag(value_var), np.diag(cov)], [np.diag(cov), np.diag(velocity_var)]])
        observe = np.eye(4, 8)
        noise = np.diag((np.tile(value[2:], 2) / 20) ** 2)
        gain = covariance @ observe.T @ np.linalg.inv(observe @ covariance @ observe.T + noise)
        mean = mean + gain @ (measured[:, box] - value)
        covariance = (np.eye(8) - gain @ observe) @ covariance
        np.testing.assert_allclose(corrected[:2, :, box].ravel(), mean, rtol=1e-9)
        np.testing.assert_allclose(corrected[2, :, box], np.diag(covariance)[:4], rtol=1e-9)
        np.testing.assert_allclose(corrected[3, :, box], np.diag(covariance[:4, 4:]), rtol=1e-9)
        np.testing.assert_allclose(corrected[4, :, box], np.diag(covariance)[4:], rtol=1e-9)


@pytest.mark.parametrize("fps", [5, 10, 30, 60])
def test_the_velocity_becomes_the_true_one(fps: int) -> None:
    state = start(BOXES[:, :1])
    for number in range(1, 3 * fps):
        state = predict(state, 1 / fps)
        state = correct(state, BOXES[:, :1] + np.array([[0.12 * number / fps, -0.06 * number / fps, 0, 0]]).T)
    np.testing.assert_allclose(state[1, :2, 0] / STEP_S, [0.12, -0.06], rtol=0.05)


def test_a_size_never_falls_below_nothing() -> None:
    state = start(BOXES)
    state[1, 2:] = -1.0
    assert (predict(state, 5.0)[0, 2:] > 0).all()
