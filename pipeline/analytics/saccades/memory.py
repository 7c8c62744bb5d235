"""Stores the small objects of a stream, and predicts their positions between two detections.

The model detects a small object only in a frame with a zoom window on the object. In other frames, the position is
predicted. The position of a moving object is extrapolated from its velocity for a short time. A stationary object is
predicted at its last position while there is no motion. Boxes are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from saccade.pipeline.analytics.association import Floats, assign, iou
from saccade.pipeline.analytics.geometry import Rect, rect_area, shared_area

MOVING_S = 0.7  # an object counts as moving for this time after motion at its position
HELD_MOVING_S = 0.8  # how long a moving object is predicted without a detection
KEPT_S = 1.5  # how long the planner looks for a moving object
_CONFIRMED = 2  # detections after which an object is predicted between looks
_MISSES = 2  # consecutive looks without a detection after which a still object is forgotten
_MISSES_MOVING = 4  # the same for a moving object, which may be hidden for a while
_BRIDGED, _BRIDGED_S = 2, 0.5  # a well-known object stays visible after a missed look, for this time
EDGE = 0.06  # fraction of a window at its edges where an object may be cut off
_GAIN = 0.5  # weight of the newly measured speed at each detection
_LEAST_LIKENESS = 0.15
_GROWTH = 0.6  # boxes are enlarged by this fraction of their size before their overlap is measured


@dataclass(slots=True, frozen=True)
class Found:
    """A detection of the model.

    Attributes:
        label: class of the object.
        score: score of the model, from 0 to 1.
        box: box in pixels.
    """

    label: str
    score: float
    box: Rect


@dataclass(slots=True)
class Known:
    """A small object that was detected earlier.

    Attributes:
        found: the last detection.
        speed: velocity of the centre in x and y, in pixels per second.
        first_s, found_s: time of the first detection and of the last detection, in seconds.
        looked_s: time of the last zoom window that contained the object, in seconds.
        moved_s: time of the last motion at the object's position, in seconds.
        started_s: time at which the last movement started, in seconds.
        finds: number of detections.
        misses: number of zoom windows since the last detection that did not detect the object.
    """

    found: Found
    speed: tuple[float, float]
    first_s: float
    found_s: float
    looked_s: float
    moved_s: float
    started_s: float = -math.inf
    finds: int = 1
    misses: int = 0

    def box_at(self, seconds: float) -> Rect:
        """Return the predicted box of the object at the time `seconds`, in pixels."""
        x1, y1, x2, y2 = self.found.box
        if not self.moves(seconds):
            return self.found.box
        passed = min(max(0.0, seconds - self.found_s), HELD_MOVING_S)
        dx, dy = self.speed[0] * passed, self.speed[1] * passed
        return x1 + dx, y1 + dy, x2 + dx, y2 + dy

    def moves(self, seconds: float) -> bool:
        """Return whether there was motion at the position of the object less than `MOVING_S` seconds ago."""
        return seconds - self.moved_s < MOVING_S

    def unseen(self, seconds: float) -> float:
        """Return the seconds since the last detection of the object, or since its motion began if that is later."""
        return seconds - max(self.found_s, self.started_s if self.moves(seconds) else self.found_s)

    def note_motion(self, seconds: float) -> None:
        """Record that the frame at the time `seconds` shows motion where the object is."""
        if not self.moves(seconds):
            self.started_s = seconds
        self.moved_s = seconds

    @property
    def confirmed(self) -> bool:
        """Whether the object was detected more than once."""
        return self.finds >= _CONFIRMED


class Memory:
    """Stores the small objects that were detected in one stream.

    Args:
        still_s: how long a stationary object is predicted without a detection, in seconds.
    """

    def __init__(self, still_s: float) -> None:
        self._still_s = still_s
        self.known: list[Known] = []

    def note_motion(self, blobs: Sequence[Rect], seconds: float) -> None:
        """Record the regions of a frame that show motion.

        Args:
            blobs: bounding boxes of the regions, in pixels.
            seconds: time of the frame, in seconds.
        """
        for one in self.known:
            if any(shared_area(one.found.box, blob) > 0 for blob in blobs):
                one.note_motion(seconds)

    def note_look(self, window: Rect, seconds: float) -> None:
        """Record which objects are in a zoom window that was submitted to the engine."""
        for one in self.known:
            if inside(one.box_at(seconds), _core(window)):
                one.looked_s = seconds

    def update(self, found: Sequence[Found], looked: Sequence[Rect], seconds: float) -> list[Found]:
        """Store the detections of a frame. Return predicted detections of small objects outside the zoom windows.

        An object inside a zoom window is also predicted if the model missed it only for a short time.

        Args:
            found: the detected small objects.
            looked: the zoom windows of the frame, in pixels.
            seconds: time of the frame, in seconds.
        """
        expected = [one.box_at(seconds) for one in self.known]
        cores = [_core(window) for window in looked]
        pairs = self._pair(found, expected)
        for row, column in pairs.items():
            _take(self.known[row], found[column], seconds)
        held, kept = [], []
        for row, (one, box) in enumerate(zip(self.known, expected, strict=True)):
            if row not in pairs:
                missed = any(inside(box, window) for window in cores)
                one.misses += missed
                if self._ended(one, seconds):
                    continue
                if one.confirmed and one.misses <= _BRIDGED and self._held(one, seconds, missed=one.misses > 0):
                    held.append(replace(one.found, box=box))
            kept.append(one)
        taken = set(pairs.values())
        new = [one for column, one in enumerate(found) if column not in taken]
        kept += [Known(one, (0.0, 0.0), seconds, seconds, seconds, -math.inf) for one in new]
        self.known = kept
        return [one for one in held if all(_apart(one, other) for other in found)]

    def _pair(self, found: Sequence[Found], expected: Sequence[Rect]) -> dict[int, int]:
        """Match stored objects to detections by their boxes.

        Return pairs {index of the object: index of the detection}.
        """
        if not found or not expected:
            return {}
        likeness = iou(_grown(expected), _grown([one.box for one in found]))
        for row, one in enumerate(self.known):
            for column, other in enumerate(found):
                if one.found.label != other.label:
                    likeness[row, column] = 0
        rows, columns = assign(likeness, _LEAST_LIKENESS)
        return dict(zip(rows.tolist(), columns.tolist(), strict=True))

    def _held(self, one: Known, seconds: float, *, missed: bool) -> bool:
        if missed:
            return seconds - one.found_s <= _BRIDGED_S and one.finds > _CONFIRMED
        return one.unseen(seconds) <= (HELD_MOVING_S if one.moves(seconds) else self._still_s)

    def _ended(self, one: Known, seconds: float) -> bool:
        age = seconds - one.found_s
        if age < 0:  # the clock restarted
            return True
        if one.moves(seconds):
            return one.unseen(seconds) > KEPT_S or one.misses >= _MISSES_MOVING
        return age > self._still_s or one.misses >= (_MISSES if one.confirmed else 1)


def inside(box: Rect, window: Rect) -> bool:
    """Return whether a box is completely inside a window."""
    return box[0] >= window[0] and box[1] >= window[1] and box[2] <= window[2] and box[3] <= window[3]


def _core(window: Rect) -> Rect:
    """Return a window without its margin. Objects in the margin can be cut off by the window edge."""
    x, y = EDGE * (window[2] - window[0]), EDGE * (window[3] - window[1])
    return window[0] + x, window[1] + y, window[2] - x, window[3] - y


def _take(one: Known, found: Found, seconds: float) -> None:
    passed = seconds - one.found_s
    if passed > 0:
        new, old = _centre(found.box), _centre(one.found.box)
        measured = ((new[0] - old[0]) / passed, (new[1] - old[1]) / passed)
        gain = 1.0 if one.finds == 1 else _GAIN
        one.speed = (
            one.speed[0] + gain * (measured[0] - one.speed[0]),
            one.speed[1] + gain * (measured[1] - one.speed[1]),
        )
    one.found, one.found_s, one.looked_s, one.misses = found, seconds, max(one.looked_s, seconds), 0
    one.finds += 1


def _apart(one: Found, other: Found) -> bool:
    """Return whether two detections are different objects: their labels differ, or their boxes overlap little."""
    shared = shared_area(one.box, other.box)
    return one.label != other.label or shared < 0.4 * min(rect_area(one.box), rect_area(other.box))


def _centre(box: Rect) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def _grown(boxes: Sequence[Rect]) -> Floats:
    """Return enlarged boxes (n, 4): the boxes of a fast small object in two frames then overlap."""
    corners = np.array(boxes, np.float64)
    size = (corners[:, 2:] - corners[:, :2]) * _GROWTH
    corners[:, :2] -= size
    corners[:, 2:] += size
    return corners
