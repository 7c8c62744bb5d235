"""Scenes, and frames with results, of objects on known ways, as rules are shown them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import time

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.events.scene import Scene, Track
from saccade.sources import Frame
from tests.support.sinks.results import live_frame

BOX = (0.4, 0.2, 0.6, 0.8)


def scene(
    seconds: float,
    tracks: Mapping[int, str] | None = None,
    *,
    inside: Mapping[str, Mapping[int, float]] | None = None,
    crossed: Mapping[str, Mapping[int, str]] | None = None,
    hidden: Iterable[int] = (),
    clock: time = time(12),
    score: float = 0.9,
    box: tuple[float, float, float, float] = BOX,
    first_s: float = 0.0,
    signals: Iterable[str] = (),
) -> Scene:
    """A scene with tracks by number and label; `inside`: for how many seconds each has been in a zone.

    By default there are the zone `hall` and the line `gate`, with nobody in it and across it.
    """
    inside = {"hall": {}} if inside is None else inside
    crossed = {"gate": {}} if crossed is None else crossed
    found = {}
    for number, label in (tracks or {}).items():
        zones = tuple(zone for zone, dwell_s in inside.items() if number in dwell_s)
        seen_s = seconds - 0.5 if number in hidden else seconds
        found[number] = Track(number, label, score, box, zones, 0.1, first_s, seen_s)
    whole = Scene(seconds, 1000 + seconds, "arrival", 200, 100, clock, seconds, found, inside, crossed)
    return replace(whole, signals=frozenset(signals))


Way = Callable[[float], tuple[float, float] | None]
"""Where an object stands (the middle of its lower edge) at a time in seconds; None while it is not there."""


def walk(
    ways: Mapping[str, Way],
    seconds: float,
    fps: float = 10,
    size: tuple[float, float] = (0.1, 0.3),
    stream: str = "door",
) -> Iterable[tuple[Frame, Result]]:
    """Frames of 200 × 100 pixels with the boxes of objects, by label, or label and a number such as `person 2`."""
    for number in range(round(seconds * fps)):
        t = number / fps
        boxes = []
        for name, way in ways.items():
            if (at := way(t)) is not None:
                x, y = at
                corners = (max(x - size[0] / 2, 0.0), max(y - size[1], 0.0), min(x + size[0] / 2, 1.0), min(y, 1.0))
                boxes.append(Box(name.rstrip(" 0123456789"), 0.9, *corners))
        yield live_frame(t, stream), Result(Detections(tuple(boxes), 200, 100), Points((), 200, 100))


def straight(start: tuple[float, float], end: tuple[float, float], begin_s: float, end_s: float) -> Way:
    """From one place to another between two times; before and after, it is not there."""

    def at(t: float) -> tuple[float, float] | None:
        if not begin_s <= t <= end_s:
            return None
        k = (t - begin_s) / (end_s - begin_s)
        return start[0] + k * (end[0] - start[0]), start[1] + k * (end[1] - start[1])

    return at
