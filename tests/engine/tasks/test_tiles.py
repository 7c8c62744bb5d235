from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saccade.engine.tasks.objects import distinct, merge, place
from saccade.engine.tasks.output_state import DecodedObject
from saccade.engine.tasks.tiles import Window, windows

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


@given(st.lists(finds, max_size=12))
def test_merging_keeps_the_best_of_each_and_is_done_once(many: list[DecodedObject]) -> None:
    kept = merge(many)
    assert merge(kept) == kept
    assert [one.score for one in kept] == sorted((one.score for one in kept), reverse=True)
    assert all(one in many for one in kept)
    if many:
        assert kept[0].score == max(one.score for one in many)


def test_two_views_of_one_object_merge_and_neighbours_stay() -> None:
    better, worse = DecodedObject(0.9, 0.5, 0.5, 0.2, 0.2), DecodedObject(0.6, 0.51, 0.5, 0.2, 0.2)
    beside, half = DecodedObject(0.3, 0.75, 0.5, 0.2, 0.2), DecodedObject(0.5, 0.45, 0.5, 0.1, 0.2)
    assert merge([half, worse, beside, better]) == [better, beside]


def test_a_box_that_repeats_an_earlier_one_is_dropped() -> None:
    first, again = DecodedObject(0.9, 0.5, 0.5, 0.2, 0.4), DecodedObject(0.8, 0.51, 0.5, 0.2, 0.4)
    beside, inside = DecodedObject(0.7, 0.6, 0.5, 0.2, 0.4), DecodedObject(0.6, 0.5, 0.45, 0.1, 0.2)
    assert distinct([first, again, beside, inside], 0.7) == [first, beside, inside]


def test_points_are_never_the_same() -> None:
    assert len(distinct([DecodedObject(0.9, 0.5, 0.5), DecodedObject(0.8, 0.5, 0.5)], 0.7)) == 2
