"""Zones and lines over tables of ways: who is counted, when, and for how long; and how they are written down."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from saccade.pipeline.analytics.geometry import area, contains, cross, distance
from saccade.pipeline.analytics.settings import LineSettings, Regions, SizeSettings, ZoneSettings
from saccade.pipeline.analytics.zones import Anchors, LineCounter, Sighting, ZoneCounter

SQUARE = ".4,.4,.6,.4,.6,.6,.4,.6"
Way = Sequence[tuple[float, float]]


def at(x: float, y: float, track: int = 1, label: str = "person", score: float = 0.9) -> Sighting:
    """An object of 0.1 × 0.2 that stands at a place."""
    return Sighting(track, label, score, (x - 0.05, y - 0.2, x + 0.05, y))


def crossings(way: Way, **values: object) -> tuple[int, int]:
    """Of the line from left to right in the middle, by one that takes a way."""
    counter = LineCounter(LineSettings.model_validate({"points": ".2,.5,.8,.5", **values}))
    for x, y in way:
        counter.update(Anchors([at(x, y)]), {1})
    return counter.forward.total(), counter.backward.total()


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ([(0.5, 0.4), (0.5, 0.6)], (1, 0)),
        ([(0.5, 0.6), (0.5, 0.4)], (0, 1)),
        ([(0.5, 0.4), (0.5, 0.5), (0.5, 0.6)], (1, 0)),
        ([(0.5, 0.4), (0.5, 0.505), (0.5, 0.4)], (0, 0)),
        ([(0.5, 0.49), (0.5, 0.505), (0.5, 0.495), (0.5, 0.508), (0.5, 0.6)], (1, 0)),
        ([(0.5, 0.4), (0.5, 0.6), (0.5, 0.4), (0.5, 0.6)], (1, 1)),
        ([(0.1, 0.4), (0.1, 0.6)], (0, 0)),
        ([(0.1, 0.4), (0.1, 0.6), (0.5, 0.6), (0.5, 0.4)], (0, 1)),
        ([(0.5, 0.5), (0.5, 0.6)], (0, 0)),
        ([(0.1, 0.45), (0.9, 0.55)], (1, 0)),
    ],
)
def test_a_line_counts_ways_across_it(way: Way, expected: tuple[int, int]) -> None:
    assert crossings(way) == expected
    assert crossings([(1 - x, 1 - y) for x, y in way]) == expected[::-1]


@given(st.lists(st.floats(-0.009, 0.009), max_size=50))
def test_jitter_at_a_line_counts_nothing(offsets: list[float]) -> None:
    assert crossings([(0.5, 0.3), *((0.5, 0.5 + off) for off in offsets), (0.5, 0.3)]) == (0, 0)
    assert crossings([(0.5, 0.3), *((0.5, 0.5 + off) for off in offsets), (0.5, 0.7)]) == (1, 0)


@pytest.mark.parametrize(
    ("values", "counted"),
    [
        ({}, True),
        ({"classes": ["person", "dog"]}, True),
        ({"classes": "dog"}, False),
        ({"min_score": 0.95}, False),
        ({"min_size": 0.019}, True),
        ({"min_size": 0.021}, False),
        ({"anchor": "center"}, False),
        ({"margin": 0.2}, False),
    ],
)
def test_only_what_concerns_a_line_counts(values: dict[str, object], counted: bool) -> None:
    assert crossings([(0.5, 0.42), (0.5, 0.58)], **values) == ((1, 0) if counted else (0, 0))


def test_each_class_and_track_counts_for_itself() -> None:
    counter = LineCounter(LineSettings(points=".2,.5,.8,.5"))  # type: ignore[arg-type]
    for y in (0.4, 0.6):
        counter.update(Anchors([at(0.3, y, 1), at(0.5, y, 2, "dog"), at(0.7, 1 - y, 3)]), {1, 2, 3})
    assert (dict(counter.forward), dict(counter.backward)) == ({"person": 1, "dog": 1}, {"person": 1})


def visits(
    y_of: Callable[[float], float | None], fps: float = 25, seconds: float = 10, drop: int = 0, **values: object
) -> tuple[ZoneCounter, list[float]]:
    """The zone in the middle after one has taken a way, its y by time; and the times of the frames not lost."""
    counter = ZoneCounter(ZoneSettings.model_validate({"polygon": SQUARE, **values}))
    dice = random.Random(drop)
    times = [n / fps for n in range(round(seconds * fps)) if not (drop and dice.random() < 0.5)]
    for t in times:
        y = y_of(t)
        counter.update(Anchors([] if y is None else [at(0.5, y)]), {1}, t)
    return counter, times


@pytest.mark.parametrize("fps", [5, 10, 30])
@pytest.mark.parametrize("drop", range(4))
def test_a_visit_lasts_from_its_first_frame_to_its_last(fps: float, drop: int) -> None:
    counter, times = visits(lambda t: 0.5 if 2 <= t < 6 else 0.2, fps, drop=drop)
    inside = [t for t in times if 2 <= t < 6]
    assert (counter.entered.total(), counter.left.total(), counter.inside) == (1, 1, {})
    assert counter.dwells == [pytest.approx(inside[-1] - inside[0])]
    if not drop:
        assert counter.dwells == [pytest.approx(4 - 1 / fps)]


@pytest.mark.parametrize(
    ("y_of", "entered", "left"),
    [
        (lambda t: 0.5, 1, 0),
        (lambda t: 0.2, 0, 0),
        (lambda t: 0.5 if 2 <= t < 2.1 else 0.2, 0, 0),
        (lambda t: 0.41 if int(t * 25) % 3 else 0.39, 0, 0),
        (lambda t: 0.5 if t < 5 or t >= 5.1 else 0.39, 1, 0),
        (lambda t: 0.5 if t < 3 else None, 1, 0),
        (lambda t: 0.5 if t % 4 < 2 else 0.2, 3, 2),
    ],
)
def test_a_zone_counts_who_comes_and_goes(y_of: Callable[[float], float], entered: int, left: int) -> None:
    counter, _ = visits(y_of)
    assert (counter.entered.total(), counter.left.total()) == (entered, left)


def test_a_track_that_ends_inside_has_left() -> None:
    counter, _ = visits(lambda t: 0.5, seconds=3)
    assert set(counter.inside) == {1}
    assert counter.update(Anchors([]), set(), 4.0) == set()
    assert (counter.left["person"], counter.dwells) == (1, [pytest.approx(2.96)])


@pytest.mark.parametrize("box", [(0.4, 0.6, 0.6, 1.0), (1.0, 0.3, 1.0, 0.3), (0.0, 0.0, 0.0, 0.0)])
def test_what_the_image_edge_cuts_off_is_in_a_zone_up_to_it(box: tuple[float, float, float, float]) -> None:
    counter = ZoneCounter(ZoneSettings.model_validate({"polygon": "0,0,1,0,1,1,0,1", "inertia": 0}))
    assert counter.update(Anchors([Sighting(1, "person", 0.9, box)]), {1}, 0.0) == {1}


@pytest.mark.parametrize("place", [(0.5, 0.5), (0.5, 0.7), (0.7, 0.5), (0.3, 0.5)])
def test_of_zones_side_by_side_one_has_each_point(place: tuple[float, float]) -> None:
    quarters = [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.5, 0.5)]
    corners = [[(x, y), (x + 0.5, y), (x + 0.5, y + 0.5), (x, y + 0.5)] for x, y in quarters]
    assert sum(contains(one, place) for one in corners) == 1


@pytest.mark.parametrize(
    ("point", "inside"), [((0.5, 0.5), True), ((0.3, 0.5), False), ((0.5, 0.9), False), ((0.41, 0.59), True)]
)
def test_a_polygon_contains_what_is_inside(point: tuple[float, float], inside: bool) -> None:
    polygon = ZoneSettings.model_validate({"polygon": SQUARE}).polygon
    assert contains(polygon, point) is inside
    assert contains(polygon[::-1], point) is inside
    assert area(polygon) == pytest.approx(0.04)


def test_a_polygon_may_have_a_dent() -> None:
    dented = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.2), (0.0, 1.0)]
    assert not contains(dented, (0.5, 0.5))
    assert contains(dented, (0.1, 0.5))


def test_right_of_a_line_is_positive() -> None:
    assert distance((0, 0), (1, 0), (0.5, 0.2)) == pytest.approx(0.2)
    assert distance((1, 0), (0, 0), (0.5, 0.2)) == pytest.approx(-0.2)
    assert cross((0.5, -1), (0.5, 1), (0, 0), (1, 0))
    assert not cross((1.5, -1), (1.5, 1), (0, 0), (1, 0))


def test_zones_are_written_as_texts_mappings_and_points() -> None:
    text = Regions.model_validate({"zones": [f"door={SQUARE}"], "lines": "gate=.1,.5,.9,.5"})
    points = [[0.4, 0.4], [0.6, 0.4], [0.6, 0.6], [0.4, 0.6]]
    assert text == Regions.model_validate({"zones": {"door": SQUARE}, "lines": {"gate": [0.1, 0.5, 0.9, 0.5]}})
    assert text == Regions.model_validate(
        {"zones": {"door": {"polygon": points}}, "lines": {"gate": [(0.1, 0.5), (0.9, 0.5)]}}
    )
    assert Regions.model_validate(text.model_dump(mode="json")) == text


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"zones": ["door"]}, "NAME=X,Y"),
        ({"zones": [f"a={SQUARE}", f"a={SQUARE}"]}, "twice"),
        ({"zones": ["door=.1,.2,.3"]}, "pairs"),
        ({"zones": ["door=.1,.2,.3,.4"]}, "three corners"),
        ({"zones": ["door=.1,.1,.2,.2,.3,.3"]}, "three corners"),
        ({"zones": ["door=.1,.2,.3,.4,.5,1.6"]}, "normalized to the image size"),
        ({"zones": ["door=.1,.2,.3,.4,.5,nan"]}, "normalized to the image size"),
        ({"zones": ["door=a,b"]}, "coordinates should be numbers separated by commas"),
        ({"zones": {"door": {"polygon": SQUARE, "anchor": "left"}}}, "anchor"),
        ({"zones": {"door": {"polygon": SQUARE, "inertia": -1}}}, "inertia"),
        ({"lines": ["gate=.1,.2,.1,.2"]}, "different end points"),
        ({"lines": ["gate=.1,.2,.3,.4,.5,.6"]}, "two different end points"),
    ],
)
def test_what_is_no_zone_or_line_is_refused(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        Regions.model_validate(values)


STREET = SizeSettings.model_validate({"near": "0.1,0.4,0.3,0.9", "far": "0.6,0.3,0.64,0.4"})


@pytest.mark.parametrize(
    ("box", "fits"),
    [
        ((0.1, 0.4, 0.3, 0.9), True),
        ((0.6, 0.3, 0.64, 0.4), True),
        ((0.4, 0.35, 0.52, 0.65), True),  # half way, of the size half way
        ((0.5, 0.8, 0.54, 0.9), False),  # near, as small as a far one
        ((0.2, 0.01, 0.5, 0.4), False),  # far, larger than a near one
        ((0.5, 0.9, 0.55, 1.0), True),  # the image's edge cuts it off
        ((0.6, 0.1, 0.601, 0.105), False),  # above the far one: a size of 0 is never expected
        ((0.6, 0.3, 0.62, 0.35), True),
    ],
)
def test_a_size_is_interpolated_between_near_and_far(box: tuple[float, float, float, float], fits: bool) -> None:
    assert STREET.fits(box) is fits


@given(st.floats(0, 1))
def test_sizes_between_the_samples_fit(k: float) -> None:
    near, far = (0.1, 0.4, 0.3, 0.9), (0.6, 0.3, 0.64, 0.4)
    box = tuple(a + k * (b - a) for a, b in zip(near, far, strict=True))
    assert STREET.fits(box)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("far", "complaint"),
    [
        ("0.6,0.3,0.64,0.95", "should be above that of the close box"),
        ("0.6,0.3,0.6,0.4", "x1,y1,x2,y2"),
        ("0.6,0.3", "x1,y1,x2,y2"),
    ],
)
def test_wrong_sizes_are_refused(far: str, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        SizeSettings.model_validate({"near": "0.1,0.4,0.3,0.9", "far": far})


def test_a_zone_with_sizes_counts_what_fits() -> None:
    zone = ZoneCounter(ZoneSettings.model_validate({"polygon": "0,0,1,0,1,1,0,1", "inertia": 0, "sizes": STREET}))
    seen = [Sighting(1, "person", 0.9, (0.1, 0.4, 0.3, 0.9)), Sighting(2, "person", 0.9, (0.5, 0.8, 0.54, 0.9))]
    assert zone.update(Anchors(seen), {1, 2}, 0.0) == {1}
