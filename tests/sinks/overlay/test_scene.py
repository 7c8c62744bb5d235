"""Zones, lines, counts, trails and track numbers on an image, read back from its pixels."""

from __future__ import annotations

from collections.abc import Mapping

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from saccade.engine.results import Box, Detections, ExtraPart, Points, Result, Timings
from saccade.sinks import color_of, draw, make_record
from saccade.sinks.overlay import Line, Trail, Zone
from tests.support.sinks.results import FRAME, LATENCY

SIZES = [(640, 360), (1920, 1080), (3840, 2160), (360, 640)]
SQUARE = ((0.25, 0.25), (0.75, 0.25), (0.75, 0.75), (0.25, 0.75))
GROUND = 128


def scene(*parts: Zone | Line | Trail, boxes: tuple[Box, ...] = ()) -> Result:
    extras: Mapping[str, tuple[ExtraPart, ...]] = {
        key: tuple(part for part in parts if part.key == key) for key in ("zones", "lines", "trails")
    }
    return Result(Detections(boxes, 1, 1), Points((), 1, 1), (), Timings(), extras)


def drawn(size: tuple[int, int], *parts: Zone | Line | Trail, boxes: tuple[Box, ...] = ()) -> NDArray[np.uint8]:
    return draw(np.full((size[1], size[0], 3), GROUND, np.uint8), scene(*parts, boxes=boxes))


def near(image: NDArray[np.uint8], color: tuple[int, int, int]) -> NDArray[np.bool_]:
    return np.asarray(np.abs(image.astype(int) - color).max(axis=2) <= 45)


def along(mask: NDArray[np.bool_], start: tuple[float, float], end: tuple[float, float]) -> float:
    """The part of the way between two points, as fractions of the image, beside which the mask is set."""
    height, width = mask.shape
    grown = cv2.dilate(mask.astype(np.uint8), np.ones((3, 3), np.uint8))
    steps = np.linspace(0.05, 0.95, 400)
    x = ((start[0] + (end[0] - start[0]) * steps) * width).astype(int)
    y = ((start[1] + (end[1] - start[1]) * steps) * height).astype(int)
    return float(grown[y, x].mean())


@pytest.mark.parametrize("size", SIZES)
def test_a_zone_is_dashed_when_empty_and_solid_when_not(size: tuple[int, int]) -> None:
    for inside, (least, most) in ((0, (0.4, 0.85)), (2, (0.95, 1.0))):
        image = drawn(size, Zone("bay", SQUARE, inside))
        line = near(image, color_of("bay"))
        shares = [along(line, a, b) for a, b in zip(SQUARE, (*SQUARE[1:], SQUARE[0]), strict=True)]
        assert all(least <= share <= most for share in shares), (inside, shares)
        for x, y in SQUARE:  # every corner is drawn
            corner = line[round(y * size[1]) - 6 : round(y * size[1]) + 7, round(x * size[0]) - 6 :][:, :13]
            assert corner.any()
    centre = image[size[1] * 2 // 5 : size[1] * 3 // 5, size[0] * 2 // 5 : size[0] * 3 // 5]
    assert (centre == GROUND).all()  # what happens in it stays visible


@pytest.mark.parametrize("size", SIZES)
def test_counts_are_written_and_grow_with_the_image(size: tuple[int, int]) -> None:
    plain, counted = drawn(size, Zone("bay", SQUARE, 1)), drawn(size, Zone("bay", SQUARE, 1, 14, 12))
    difference = (plain != counted).any(axis=2)
    rows = np.flatnonzero(difference.any(axis=1))
    assert 0.02 < (rows[-1] - rows[0]) / min(size) < 0.09
    assert difference.sum() > 200
    assert near(counted, (245, 247, 250)).sum() > 60  # light letters


@pytest.mark.parametrize("size", SIZES)
def test_the_arrow_of_a_line_shows_the_forward_direction(size: tuple[int, int]) -> None:
    for start, end, forward in (((0.2, 0.5), (0.8, 0.5), 1), ((0.8, 0.5), (0.2, 0.5), -1)):
        line = near(drawn(size, Line("gate", start, end, 3, 4)), color_of("gate"))
        assert along(line, start, end) > 0.95
        above, below = line[: size[1] // 2].sum(), line[size[1] // 2 + 1 :].sum()
        assert (below - above) * forward > 0  # seen from start to end, forward is from left to right


@pytest.mark.parametrize("size", SIZES)
def test_a_trail_is_drawn_from_old_to_new_and_gets_thicker(size: tuple[int, int]) -> None:
    points = tuple((0.1 + 0.02 * n, 0.5) for n in range(31))
    trail = near(drawn(size, Trail(7, "person", points)), color_of("person"))
    assert along(trail, points[0], points[-1]) > 0.95
    old, new = (trail[:, round(x * size[0])].sum() for x in (0.15, 0.65))
    assert new >= old
    assert near(drawn(size, Trail(7, "person", points[:1])), color_of("person")).sum() == 0


def test_the_number_of_a_track_stands_before_its_label() -> None:
    box = Box("person", 0.93, 0.25, 0.3, 0.75, 0.8)
    plain = drawn((640, 360), boxes=(box,))
    tracked = drawn((640, 360), boxes=(Box("person", 0.93, 0.25, 0.3, 0.75, 0.8, 17),))
    changed = np.flatnonzero((plain != tracked).any(axis=(0, 2)))
    assert changed[0] < 0.27 * 640
    assert near(tracked, (245, 247, 250)).sum() > 100 > near(plain, (245, 247, 250)).sum()


def test_counts_are_in_the_record_and_trails_are_not() -> None:
    result = scene(Zone("bay", SQUARE, 1, 14, 12), Zone("yard", SQUARE), Line("gate", (0, 0), (1, 1), 3, 4))
    with_trail = scene(*result.extras["zones"], *result.extras["lines"], Trail(1, "cat", SQUARE))  # type: ignore[arg-type]
    record = make_record(FRAME, with_trail, LATENCY)
    assert record["zones"] == [
        {"name": "bay", "inside": 1, "entered": 14, "left": 12},
        {"name": "yard", "inside": 0},
    ]
    assert record["lines"] == [{"name": "gate", "forward": 3, "backward": 4}]
    assert "trails" not in record


@pytest.mark.parametrize("corners", [(), SQUARE[:2], (*SQUARE, (float("nan"), 0.5))])
def test_a_zone_that_is_no_polygon_is_refused(corners: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"3 corners|finite"):
        Zone("bay", corners)


place = st.tuples(st.floats(-50, 50, allow_nan=False), st.floats(-50, 50, allow_nan=False))
places = st.lists(place, min_size=3, max_size=6).map(tuple)


@settings(max_examples=40, deadline=None)
@given(places, place, place, st.text(max_size=20), st.integers(0, 10**9), st.sampled_from([(64, 48), (16, 16), (1, 1)]))
def test_any_scene_can_be_drawn(
    corners: tuple[tuple[float, float], ...],
    start: tuple[float, float],
    end: tuple[float, float],
    name: str,
    count: int,
    size: tuple[int, int],
) -> None:
    for inside in (0, count):
        zone = Zone(name, corners, inside, count, count)
        image = drawn(size, zone, Line(name, start, end, count, count), Trail(count, name, corners))
        assert image.shape == (size[1], size[0], 3)
