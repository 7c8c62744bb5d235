"""Where a stream's model looks again: motion, small tracks, unsure finds and the sweep, on plain numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from saccade.pipeline.analytics.geometry import Rect
from saccade.pipeline.analytics.saccades.memory import KEPT_S, Found, inside
from saccade.pipeline.analytics.saccades.planner import MOST_MOVING, Look, Planner
from saccade.pipeline.analytics.saccades.sweep import Sweep

HD, UHD, NANO = (1920, 1080), (3840, 2160), (416, 288)
NOTHING: NDArray[np.bool_] = np.zeros((180, 320), bool)


def planner(size: tuple[int, int] = HD, sweep_s: float = 5.0, *, swept: bool = True, thrifty: bool = True) -> Planner:
    """A planner; `swept`: after its first pass, with nothing found, at time 0."""
    made = Planner(*size, *NANO, sweep_s, thrifty=thrifty)
    if swept:
        for number in range(200):
            seconds = -0.01 * (200 - number)
            made.note(seconds, made.choose(seconds, 4), [])
    return made


def moving(*boxes: Rect, size: tuple[int, int] = HD) -> tuple[NDArray[np.bool_], float]:
    """The motion map of rectangles in pixels, and the area that it covers."""
    changed = NOTHING.copy()
    for x1, y1, x2, y2 in boxes:
        across, down = 320 / size[0], 180 / size[1]
        changed[int(y1 * down) : int(np.ceil(y2 * down)), int(x1 * across) : int(np.ceil(x2 * across))] = True
    return changed, float(changed.mean())


PERSON = (900.0, 500.0, 930.0, 580.0)


def boxes_of(least: float, most: float) -> st.SearchStrategy[Rect]:
    """Persons in 4K, so many pixels high."""
    return st.tuples(st.floats(0, 3700), st.floats(0, 2000), st.floats(least, most)).map(
        lambda b: (b[0], b[1], b[0] + 0.4 * b[2], b[1] + b[2])
    )


def look_at(looks: list[Look], box: Rect) -> Look:
    return next(look for look in looks if inside(box, look.rect))


def test_motion_that_no_box_explains_is_looked_at_closely() -> None:
    look = look_at(planner().choose(0.0, 1, *moving(PERSON)), PERSON)
    assert look.reason == "motion"
    assert look.width in (416, 468)  # at 1:1 or nearly


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        (PERSON, None),  # the same object
        ((890.0, 480.0, 940.0, 600.0), None),  # a little larger
        ((300.0, 500.0, 330.0, 580.0), "motion"),  # another one
    ],
)
def test_motion_of_an_object_that_the_glance_finds_is_explained(box: Rect, reason: str | None) -> None:
    made = planner()
    made.note(-0.02, [], [Found("person", 0.9, box)])
    made.note(-0.01, [], [Found("person", 0.9, box)])
    reasons = [look.reason for look in made.choose(0.0, 1, *moving(PERSON)) if inside(PERSON, look.rect)]
    assert [one for one in reasons if one == "motion"] == ([reason] if reason else [])


@pytest.mark.parametrize("area", [0.34, 0.5, 1.0])
def test_a_moving_camera_spends_no_window(area: float) -> None:
    changed = np.zeros((180, 320), bool)
    changed[: int(180 * area) + 1] = True
    assert area > MOST_MOVING
    assert planner(swept=False).choose(0.0, 4, changed, area) == []


def test_a_frame_no_larger_than_the_model_sees_it_is_never_looked_at_again() -> None:
    small = Planner(416, 234, *NANO)
    assert not small.useful
    assert small.choose(0.0, 4, *moving((10.0, 10.0, 60.0, 90.0), size=(416, 234))) == []


@pytest.mark.parametrize(("thrifty", "useful"), [(False, True), (True, False)])
def test_auto_leaves_a_small_frame_alone(thrifty: bool, useful: bool) -> None:
    assert Planner(640, 360, *NANO, thrifty=thrifty).useful == useful


def test_overlapping_wishes_share_a_window_and_distant_ones_do_not() -> None:
    beside = (960.0, 500.0, 990.0, 580.0)
    looks = planner().choose(0.0, 4, *moving(PERSON, beside))
    assert len([look for look in looks if look.reason == "motion"]) == 1
    look_at(looks, PERSON)
    look_at(looks, beside)
    far = (200.0, 200.0, 230.0, 280.0)
    assert len([look for look in planner().choose(0.0, 4, *moving(PERSON, far)) if look.reason == "motion"]) == 2


@settings(deadline=None)
@given(st.lists(boxes_of(60.0, 90.0), min_size=1, max_size=5))
def test_what_a_window_is_for_lies_within_its_edges(people: list[Rect]) -> None:
    """A box at the edge of a window would count as cut, and as not looked at."""
    made = planner(UHD)
    for look in made.choose(0.0, 4, *moving(*people, size=UHD)):
        if look.reason == "motion":
            rim_x, rim_y = 0.05 * look.width, 0.05 * look.height
            core = look.x + rim_x, look.y + rim_y, look.x + look.width - rim_x, look.y + look.height - rim_y
            edges = look.x == 0, look.y == 0, look.x + look.width == 3840, look.y + look.height == 2160
            low = [-1.0 if at_edge else value for value, at_edge in zip(core[:2], edges[:2], strict=True)]
            high = [9999.0 if at_edge else value for value, at_edge in zip(core[2:], edges[2:], strict=True)]
            shown = low[0], low[1], high[0], high[1]
            assert any(inside(box, shown) for box in people)


def test_one_window_alternates_between_places() -> None:
    made, far, seen = planner(), (200.0, 200.0, 230.0, 280.0), []
    for number in range(8):
        looks = made.choose(number / 10, 1, *moving(PERSON, far))
        made.note(
            number / 10,
            looks,
            [Found("person", 0.9, box) for box in (PERSON, far) for look in looks if inside(box, look.rect)],
        )
        seen.append([inside(PERSON, look.rect) for look in looks if look.reason != "sweep"])
    assert {True, False} == set(itertools.chain(*seen))


def test_motion_in_which_nothing_is_found_is_looked_at_less_and_less() -> None:
    made = planner()
    leaves, counts = (900.0, 300.0, 960.0, 380.0), [0, 0]
    for number in range(100):
        looks = made.choose(number / 10, 1, *moving(leaves))
        made.note(number / 10, looks, [])
        counts[number >= 50] += sum(look.reason == "motion" for look in looks)
    assert 3 <= counts[0] <= 8
    assert counts[1] <= 4


def test_a_new_find_is_looked_at_again_at_once_and_then_held_while_nothing_moves() -> None:
    made = planner()
    assert made.note(0.0, [], [Found("person", 0.9, PERSON)]) == []
    looks = made.choose(0.1, 1, NOTHING, 0.0)
    assert look_at(looks, PERSON).reason == "unsure"
    assert made.note(0.1, looks, [Found("person", 0.9, PERSON)]) == []
    held = made.note(0.2, [], [])
    assert [one.box for one in held] == [PERSON]
    assert [one.score for one in made.note(3.0, [], [])] == [0.9]


def test_a_find_that_a_second_look_does_not_confirm_is_forgotten() -> None:
    made = planner()
    made.note(0.0, [], [Found("person", 0.9, PERSON)])
    looks = made.choose(0.1, 1, NOTHING, 0.0)
    made.note(0.1, looks, [])
    assert made.note(0.2, [], []) == []
    assert not made.expected


def test_an_object_that_stood_still_for_long_and_moves_is_looked_at_and_kept_until_then() -> None:
    made = planner()
    for number in range(3):
        made.note(number / 10, [], [Found("person", 0.9, PERSON)])
    looks = made.choose(4.0, 1, *moving(PERSON))  # it begins to move, 3.8 s after it was found
    assert look_at(looks, PERSON).reason == "track"
    assert [one.box for one in made.note(4.0, [], [])] == [PERSON]
    (known,) = made.expected
    assert known.started_s == 4.0
    made.note(4.0 + KEPT_S + 0.1, [], [])
    assert not made.expected or not made.expected[0].moves(4.0 + KEPT_S + 0.1)


def test_after_a_look_that_missed_it_an_object_is_looked_at_in_other_surroundings() -> None:
    made = planner(UHD)
    seen = set()
    for number in range(3):
        made.note(number / 10, [], [Found("person", 0.9, PERSON)])
    for number in range(3, 7):
        looks = made.choose(number / 10, 1, *moving(PERSON, size=UHD))
        made.note(number / 10, looks, [])
        seen |= {(look.x, look.y) for look in looks if look.reason == "track"}
    assert len(seen) >= 2


def test_a_busy_only_window_leaves_one_look_in_ten_to_the_sweep_after_its_first_pass() -> None:
    made, reasons = planner(swept=True, thrifty=False), []
    for number in range(200):
        x = 900.0 + 40 * np.sin(number / 5)
        box = (x, 500.0, x + 30, 580.0)
        looks = made.choose(number / 10, 1, *moving(box))
        made.note(number / 10, looks, [Found("person", 0.9, box)])
        reasons += [look.reason for look in looks]
    assert 2 <= reasons.count("sweep") <= 20


def test_a_still_object_that_is_unsure_is_looked_at_as_often_as_a_sure_one() -> None:
    made = planner(thrifty=False)
    for number in range(3):
        made.note(number / 10, [], [Found("person", 0.54, PERSON)])
    assert look_at(made.choose(0.3, 1, NOTHING, 0.0), PERSON).reason == "unsure"


def test_an_object_that_left_is_given_up_after_two_looks() -> None:
    made = planner()
    for number in range(3):
        made.note(number / 10, [], [Found("person", 0.9, PERSON)])
    look = Look(800, 400, 416, 276, "sweep")
    made.note(0.5, [look], [])
    assert made.note(0.6, [look], []) == []
    assert not made.expected


def test_a_small_object_that_moves_is_followed_where_its_speed_takes_it() -> None:
    made = planner()
    for number in range(10):
        x = 900.0 + 8 * number
        box = (x, 500.0, x + 30, 580.0)
        looks = made.choose(number / 10, 1, *moving(box))
        made.note(number / 10, looks, [Found("person", 0.9, box)])
    (held,) = made.note(1.2, [], [])
    assert held.box[0] == pytest.approx(900 + 8 * 12, abs=8)


@pytest.mark.parametrize("size", [HD, UHD, (1280, 720), (1080, 1920)])
def test_the_sweep_shows_every_place_in_its_time(size: tuple[int, int]) -> None:
    made = planner(size, swept=False)
    width, height = size
    seen = np.zeros((height // 20, width // 20), bool)
    for number in range(50):
        looks = made.choose(number / 10, 2, NOTHING, 0.0)
        made.note(number / 10, looks, [])
        for look in looks:
            assert look.reason == "sweep"
            seen[-(-look.y // 20) : (look.y + look.height) // 20, -(-look.x // 20) : (look.x + look.width) // 20] = True
    assert seen[:-1, :-1].mean() > 0.97


def test_the_sweep_goes_to_places_where_objects_appear_first() -> None:
    sweep = Sweep(3840, 2160, [(520, 346)], 5.0)
    sweep.pass_time(0.0)
    for _ in range(10):
        sweep.note_found((200.0, 1900.0, 230.0, 1980.0))
    window = sweep.choose(0.0)
    assert window is not None
    assert inside((200.0, 1900.0, 230.0, 1980.0), window)


boxes = st.tuples(st.floats(0, 1800), st.floats(0, 1000), st.floats(5, 200), st.floats(5, 300)).map(
    lambda b: (b[0], b[1], min(1920.0, b[0] + b[2]), min(1080.0, b[1] + b[3]))
)
frames = st.lists(st.tuples(st.lists(boxes, max_size=6), st.lists(boxes, max_size=6)), max_size=12)


@settings(deadline=None)
@given(frames, st.integers(0, 4), st.booleans(), st.floats(0.01, 2.0))
def test_windows_stay_in_the_frame_and_in_the_budget(
    many: list[tuple[list[Rect], list[Rect]]], most: int, thrifty: bool, step: float
) -> None:
    made = planner(swept=False, thrifty=thrifty)
    for number, (motion, found) in enumerate(many):
        looks = made.choose(number * step, most, *moving(*motion))
        assert len(looks) <= most
        for look in looks:
            assert 0 <= look.x <= 1920 - look.width
            assert 0 <= look.y <= 1080 - look.height
            assert min(look.width, look.height) >= 2
            assert {look.x % 2, look.y % 2, look.width % 2, look.height % 2} == {0}
        held = made.note(number * step, looks, [Found("person", 0.9, box) for box in found])
        assert all(one.box != box for one in held for box in found)


def test_a_clock_that_begins_again_begins_everything_again() -> None:
    made = planner()
    for seconds in (5.0, 5.1, 0.0, 0.1):
        made.note(seconds, made.choose(seconds, 2, *moving(PERSON)), [Found("person", 0.9, PERSON)])
    assert len(made.expected) == 1


@pytest.mark.parametrize(
    ("sizes", "sweep_s"),
    [
        ((0, 1080, 416, 288), 5.0),
        ((1920, 1080, 416, 0), 5.0),
        ((1920, 1080, 416, 288), 0.0),
        ((1920, 1080, 416, 288), float("inf")),
    ],
)
def test_sizes_and_times_are_checked(sizes: tuple[int, int, int, int], sweep_s: float) -> None:
    with pytest.raises(ValueError, match="should be"):
        Planner(*sizes, sweep_s)
