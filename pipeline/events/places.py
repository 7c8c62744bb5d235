"""Distinguishes moving objects from stationary objects, and remembers the places of stationary objects.

An object that is detected at a remembered place under another track ID is treated as the same object.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from saccade.pipeline.analytics.geometry import Rect, rect_area, shared_area

STILL_S = 10.0
"""Seconds after which an object that has not moved by its own size is stationary; Frigate's default at 5 fps."""

REMOVED_S = 5.0
"""Seconds for which a place must be visible without its object before the object counts as removed."""

MAX_PLACES = 64
_BEGIN_S = 5.0  # after the first frame, in which objects count as there before: some are detected late
_SAME = 0.5  # overlap (IoU) at which an object stands at a known place
_COVERED = 0.5  # share of a place behind another object, from which it cannot be seen to be empty
_FORGET_S = 86400.0


@dataclass(slots=True, frozen=True)
class Rest:
    """The motion state of a tracked object.

    Attributes:
        place: ID of the object's place. The ID changes when the object moves by the size of its bounding box.
        since_s: stream time at which the object arrived at the place, in seconds.
        moved: whether the object has changed its place since its first detection.
        known: whether the object was present when the stream started, or is at a remembered place.
        at: bounding box of the object on arrival, in normalized coordinates.
    """

    place: int
    since_s: float
    moved: bool
    known: bool
    at: Rect

    def stationary_for(self, seconds: float) -> float:
        """Return how long the object has been stationary at stream time `seconds`, in seconds."""
        return seconds - self.since_s

    def moving(self, seconds: float) -> bool:
        """Return whether the object is moving: it has changed its place in the last `STILL_S` seconds."""
        return self.moved and seconds - self.since_s < STILL_S


@dataclass(slots=True)
class Place:
    """A place where an object is or was stationary.

    Attributes:
        track: track ID of the object.
        label: label of the object.
        box: last bounding box of the object, in normalized coordinates.
        since_s: stream time at which the object arrived, in seconds.
        empty_s: how long the place has been visible without the object, in seconds.
        left: whether the object was seen moving away.
    """

    track: int
    label: str
    box: Rect
    since_s: float
    empty_s: float = 0.0
    left: bool = False


class Places:
    """Stores the places where objects are or were stationary in one stream.

    At most `MAX_PLACES` places are stored, each for up to 24 hours.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the places of all objects, for example when a looped video file restarts."""
        self._rests: dict[int, Rest] = {}
        self._places: dict[int, Place] = {}
        self._ids = itertools.count(1)
        self._first_s: float | None = None
        self._last_s = 0.0

    @property
    def places(self) -> Mapping[int, Place]:
        """The places where objects are or were stationary, by place ID."""
        return self._places

    def update(self, seconds: float, seen: Mapping[int, tuple[str, Rect]], alive: Mapping[int, object]) -> None:
        """Update the positions of stationary objects with the objects that were detected in one frame.

        Args:
            seconds: stream time of the frame, in seconds.
            seen: label and box of each track that was detected on the frame, by track ID.
            alive: IDs of all current tracks, including tracks that were not detected on this frame.
        """
        if self._first_s is None:
            self._first_s = self._last_s = seconds
        passed, self._last_s = seconds - self._last_s, seconds
        if len(self._rests) > len(alive) or not self._rests.keys() <= alive.keys():
            self._rests = {number: rest for number, rest in self._rests.items() if number in alive}
        for number, (label, box) in seen.items():
            rest = self._rests.get(number)
            if rest is None:
                rest = self._recognized(label, box, alive) or Rest(
                    next(self._ids), seconds, False, seconds - self._first_s < _BEGIN_S, box
                )
                if rest.place in self._places:
                    self._places[rest.place].track = number
            elif has_moved(rest.at, box):
                if (place := self._places.get(rest.place)) is not None:
                    place.left, place.empty_s = True, REMOVED_S
                rest = Rest(next(self._ids), seconds, True, rest.known, box)
            self._rests[number] = rest
            if seconds - rest.since_s >= STILL_S:
                if (place := self._places.get(rest.place)) is None:
                    self._settle(number, rest, label, box)
                else:
                    place.box = box
        if not self._places:
            return
        there = {rest.place for number, rest in self._rests.items() if number in seen}
        boxes = [box for _, box in seen.values()]
        for number, place in list(self._places.items()):
            if number in there:
                place.empty_s = 0.0
            elif place.empty_s > _FORGET_S:
                del self._places[number]
            elif not any(_share(place.box, box) >= _COVERED for box in boxes):
                place.empty_s += passed

    def of(self, track: int) -> Rest | None:
        """Return the motion state of a track. Return None for an unknown track ID."""
        return self._rests.get(track)

    def _recognized(self, label: str, box: Rect, alive: Mapping[int, object]) -> Rest | None:
        """Return the motion state of a new track at the place of an ended track with the same label, or None."""
        for number, place in self._places.items():
            lost = place.track not in alive and not place.left and place.label == label
            if lost and overlap(place.box, box) >= _SAME:
                return Rest(number, place.since_s, False, True, box)
        return None

    def _settle(self, track: int, rest: Rest, label: str, box: Rect) -> None:
        for number, other in list(self._places.items()):
            if other.empty_s and other.label == label and overlap(other.box, box) >= _SAME:
                del self._places[number]
        if len(self._places) >= MAX_PLACES:  # the longest empty one goes first, then the oldest
            del self._places[max(self._places, key=lambda number: self._places[number].empty_s)]
        self._places[rest.place] = Place(track, label, box, rest.since_s)


def has_moved(old: Rect, new: Rect) -> bool:
    """Return whether the centre of a bounding box has moved by at least the size of the box."""
    width, height = max(old[2] - old[0], new[2] - new[0], 1e-6), max(old[3] - old[1], new[3] - new[1], 1e-6)
    dx, dy = (new[0] + new[2] - old[0] - old[2]) / 2, (new[1] + new[3] - old[1] - old[3]) / 2
    return math.hypot(dx / width, dy / height) >= 1


def overlap(a: Rect, b: Rect) -> float:
    """Return the intersection over union (IoU) of two boxes."""
    shared = shared_area(a, b)
    return shared / max(rect_area(a) + rect_area(b) - shared, 1e-12)


def _share(of: Rect, by: Rect) -> float:
    return shared_area(of, by) / max(rect_area(of), 1e-12)
