"""Overlaps with known values, and assignments against every possible one."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.pipeline.analytics.association import assign, corners_of, iou


@pytest.mark.parametrize(
    ("other", "overlap"),
    [
        ((0.0, 0.0, 2.0, 2.0), 1.0),
        ((1.0, 0.0, 3.0, 2.0), 1 / 3),
        ((1.0, 1.0, 3.0, 3.0), 1 / 7),
        ((0.5, 0.5, 1.5, 1.5), 1 / 4),
        ((2.0, 0.0, 4.0, 2.0), 0.0),
        ((5.0, 5.0, 6.0, 6.0), 0.0),
        ((1.0, 1.0, 1.0, 1.0), 0.0),
    ],
)
def test_overlaps_have_their_known_values(other: tuple[float, ...], overlap: float) -> None:
    box = np.array([[0.0, 0.0, 2.0, 2.0]])
    assert iou(box, np.array([other]))[0, 0] == pytest.approx(overlap)
    assert iou(np.array([other]), box)[0, 0] == pytest.approx(overlap)


def test_corners_lie_half_a_size_from_the_centre() -> None:
    assert corners_of(np.array([[0.5, 0.25, 0.2, 0.1]]).T)[:, 0] == pytest.approx([0.4, 0.2, 0.6, 0.3])


def test_two_that_compete_are_solved_together() -> None:
    # Alone, the first row would take the first column, and leave nothing to the second.
    rows, columns = assign(np.array([[0.9, 0.8], [0.85, 0.1]]), 0.3)
    assert dict(zip(rows.tolist(), columns.tolist(), strict=True)) == {0: 1, 1: 0}


@given(st.data())
def test_no_other_assignment_is_better(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    values = data.draw(st.lists(st.floats(0, 1), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    likeness, least = np.array(values).reshape(shape), data.draw(st.floats(0.05, 0.9))
    rows, columns = assign(likeness, least)
    assert len(set(rows.tolist())) == len(rows)
    assert len(set(columns.tolist())) == len(columns)
    assert (likeness[rows, columns] >= least - 1e-9).all()
    wide = likeness if shape[0] <= shape[1] else likeness.T
    best = max(
        sum(max(0.0, wide[row, column] - least) for row, column in enumerate(order))
        for order in permutations(range(wide.shape[1]), wide.shape[0])
    )
    assert (likeness[rows, columns] - least).sum() == pytest.approx(best, abs=1e-9)
