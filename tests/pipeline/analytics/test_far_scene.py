"""Small persons in 4K scenes, with the real model: three that move and two that stand still, with two windows."""

from __future__ import annotations

from benchmarks.far_scene import random_places
from benchmarks.saccades import find_far
from saccade.engine import Engine


def test_two_windows_find_who_is_far_away_in_4k() -> None:
    with Engine.load("nano") as engine:
        rows = find_far(engine, [2], seeds=[None, 3], frames=75).rows
    assert len(rows) == 2
    for row in rows:
        assert row.moving is not None
        assert row.still is not None
        assert row.precision is not None
        assert row.moving >= 0.85
        assert row.still >= 0.80
        assert row.precision >= 0.95
        assert sum(row.looks.values()) <= 2 * 75


def test_random_places_lie_in_the_scene_and_apart() -> None:
    for seed in range(20):
        places = random_places(seed)
        assert [place.still for place in places] == [False] * 3 + [True] * 2
        assert all(60 <= place.person <= 75 for place in places)
