from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saccade.engine.tasks.objects import DecodedObject, distinct, fuse, place
from saccade.engine.tasks.task import Window, windows

sides = st.integers(1, 4000)
parts = st.floats(0.01, 0.99)
finds = st.builds(DecodedObject, parts, parts, parts, st.floats(0.001, 0.9), st.floats(0.001, 0.9))


def test_one_tile_is_the_image_alone() -> None:
    assert windows(640, 360, 1) == [Window(0, 0, 640, 360)]


@given(sides, sides, st.integers(2, 6))
@example(6, 6, 5)  # rounded to the nearest, one pixel fell between two windows
def test_windows_lie_inside_the_image_and_cover_it(width: int, height: int, tiles: int) -> None:
    whole, *closer = windows(width, height, tiles)
    assert whole == Window(0, 0, width, height)
    assert len(closer) == tiles * tiles
    across, down = np.zeros(width, bool), np.zeros(height, bool)
    for window in closer:
        assert window.width >= 1
        assert window.height >= 1
        assert 0 <= window.x <= width - window.width
        assert 0 <= window.y <= height - window.height
        across[window.x : window.x + window.width] = True
        down[window.y : window.y + window.height] = True
    assert across.all()
    assert down.all()


def test_neighbours_overlap_by_a_fifth_or_so() -> None:
    first, second = windows(1000, 1000, 2)[1:3]
    assert first == Window(0, 0, 620, 620)
    assert second == Window(380, 0, 620, 620)


@given(finds, st.integers(2, 5))
def test_an_object_of_the_whole_image_keeps_its_place(found: DecodedObject, tiles: int) -> None:
    whole = windows(800, 600, tiles)[0]
    placed = place(found, whole, 800, 600)
    assert placed is not None
    assert dataclasses.astuple(placed) == pytest.approx(dataclasses.astuple(found))


def test_a_find_is_moved_and_scaled_with_its_window() -> None:
    placed = place(DecodedObject(0.7, 0.5, 0.25, 0.2, 0.4), Window(400, 300, 400, 300), 800, 600)
    assert placed is not None
    assert dataclasses.astuple(placed) == pytest.approx((0.7, 0.75, 0.625, 0.1, 0.2))


@pytest.mark.parametrize(
    ("found", "window", "kept"),
    [
        (DecodedObject(0.9, 0.05, 0.5, 0.1, 0.1), Window(400, 150, 300, 300), False),  # touches an inner left edge
        (DecodedObject(0.9, 0.95, 0.5, 0.1, 0.1), Window(100, 150, 300, 300), False),
        (DecodedObject(0.9, 0.5, 0.05, 0.1, 0.1), Window(100, 150, 300, 300), False),
        (DecodedObject(0.9, 0.5, 0.95, 0.1, 0.1), Window(100, 150, 300, 300), False),
        (
            DecodedObject(0.9, 0.05, 0.5, 0.1, 0.1),
            Window(0, 150, 300, 300),
            True,
        ),  # the image's own edges cut nothing
        (DecodedObject(0.9, 0.95, 0.5, 0.1, 0.1), Window(500, 150, 300, 300), True),
        (DecodedObject(0.9, 0.5, 0.05, 0.1, 0.1), Window(100, 0, 300, 300), True),
        (DecodedObject(0.9, 0.5, 0.95, 0.1, 0.1), Window(100, 300, 300, 300), True),
        (DecodedObject(0.9, 0.5, 0.5, 0.1, 0.1), Window(100, 150, 300, 300), True),
    ],
)
def test_what_an_inner_edge_has_cut_is_left_to_the_next_window(
    found: DecodedObject, window: Window, kept: bool
) -> None:
    assert (place(found, window, 800, 600) is not None) == kept


WHOLE = Window(0, 0, 800, 600)
PARTS = [WHOLE, Window(0, 0, 400, 300), Window(200, 100, 300, 200), Window(500, 300, 300, 300)]


@given(st.lists(st.lists(finds, max_size=5), min_size=4, max_size=4))
def test_fusing_keeps_the_best_of_each_object_with_its_score(views: list[list[DecodedObject]]) -> None:
    kept = fuse(zip(PARTS, views, strict=True), 800, 600)
    placed = [
        one for part, view in zip(PARTS, views, strict=True) for each in view if (one := place(each, part, 800, 600))
    ]
    assert [one.score for one in kept] == sorted((one.score for one in kept), reverse=True)
    assert all(one in placed for one in kept)
    assert bool(kept) == bool(placed)
    assert len(kept) <= len(placed)


@given(st.lists(finds, max_size=12))
def test_what_one_window_shows_stays_beside_each_other(many: list[DecodedObject]) -> None:
    kept = fuse([(WHOLE, many)], 800, 600)
    assert [one.score for one in kept] == sorted((one.score for one in many), reverse=True)


# In 800 x 600: a glance, and a window of 400 x 300 at (200, 150) that shows the middle twice as large.
CLOSER = Window(200, 150, 400, 300)


@pytest.mark.parametrize(
    ("glance", "closer", "kept"),
    [
        # The same object twice: the better view stays, with its score.
        ([(0.6, 0.5, 0.5, 0.1, 0.2)], [(0.9, 0.5, 0.5, 0.2, 0.4)], [0.9]),
        ([(0.9, 0.5, 0.5, 0.1, 0.2)], [(0.6, 0.5, 0.5, 0.2, 0.4)], [0.9]),
        # An object that only one of them has found.
        ([], [(0.7, 0.5, 0.5, 0.2, 0.4)], [0.7]),
        ([(0.8, 0.1, 0.1, 0.1, 0.1)], [(0.7, 0.5, 0.5, 0.2, 0.4)], [0.8, 0.7]),
        # The window's left edge has cut the person whom the glance shows whole.
        ([(0.6, 0.25, 0.5, 0.1, 0.4)], [(0.9, 0.05, 0.5, 0.1, 0.8)], [0.6]),
        # The part of an object, not quite at an edge, lies in the whole, whichever scores better.
        ([(0.9, 0.3, 0.5, 0.3, 0.4)], [(0.5, 0.14, 0.5, 0.2, 0.8)], [0.9]),
        ([(0.5, 0.3, 0.5, 0.3, 0.4)], [(0.9, 0.14, 0.5, 0.2, 0.8)], [0.5]),
        # Someone far away whose box lies in that of someone near.
        ([(0.9, 0.5, 0.5, 0.6, 0.9)], [(0.8, 0.5, 0.5, 0.1, 0.2)], [0.9, 0.8]),
        # A child in front of an adult: both views have both, and both stay.
        (
            [(0.9, 0.5, 0.5, 0.2, 0.4), (0.8, 0.5, 0.55, 0.08, 0.2)],
            [(0.95, 0.5, 0.5, 0.4, 0.8), (0.85, 0.5, 0.6, 0.16, 0.4)],
            [0.95, 0.85],
        ),
    ],
)
def test_a_glance_and_a_window_give_one_box_for_each_object(
    glance: list[tuple[float, ...]], closer: list[tuple[float, ...]], kept: list[float]
) -> None:
    views = [(WHOLE, [DecodedObject(*one) for one in glance]), (CLOSER, [DecodedObject(*one) for one in closer])]
    assert [one.score for one in fuse(views, 800, 600)] == kept


def test_chosen_windows_follow_the_tiles_and_are_clipped_to_the_image() -> None:
    chosen = [Window(700, 500, 300, 300), Window(2000, 0, 10, 10)]
    assert windows(800, 600, 1, chosen) == [WHOLE, Window(700, 500, 100, 100), Window(799, 0, 1, 10)]
    assert len(windows(800, 600, 2, chosen)) == 7


@pytest.mark.parametrize("window", [(-1, 0, 5, 5), (0, -1, 5, 5), (0, 0, 0, 5), (0, 0, 5, 0)])
def test_a_window_without_pixels_is_refused(window: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 pixel"):
        Window(*window)


def test_a_box_that_repeats_an_earlier_one_is_dropped() -> None:
    first, again = DecodedObject(0.9, 0.5, 0.5, 0.2, 0.4), DecodedObject(0.8, 0.51, 0.5, 0.2, 0.4)
    beside, inside = DecodedObject(0.7, 0.6, 0.5, 0.2, 0.4), DecodedObject(0.6, 0.5, 0.45, 0.1, 0.2)
    assert distinct([first, again, beside, inside], 0.7) == [first, beside, inside]


def test_points_are_never_the_same() -> None:
    assert len(distinct([DecodedObject(0.9, 0.5, 0.5), DecodedObject(0.8, 0.5, 0.5)], 0.7)) == 2
