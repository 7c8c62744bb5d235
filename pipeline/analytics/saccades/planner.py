"""Chooses the zoom windows of each frame, from motion, small objects, and areas without a recent zoom window.

A zoom window is a small region of a frame that the model processes at full resolution. Every request for a window has
an urgency, which increases with the time since the last window. A request with an urgency below 1 gets no window. The
most urgent request gets the first window. Other requests that fit into this window share it. If windows on a moving
region detect nothing, the urgency of the region decreases.

If more than a third of the frame shows motion, no window is chosen. The cause is then usually a moving camera, heavy
rain or a change of the exposure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.analytics.geometry import Rect, rect_area, shared_area
from saccade.pipeline.analytics.saccades.memory import EDGE, Found, Known, Memory, inside
from saccade.pipeline.analytics.saccades.sweep import Sweep

Reason = Literal["motion", "track", "unsure", "sweep"]

MOST_MOVING = 1 / 3  # fraction of the frame
_FLAT = 1.5  # aspect ratio of a window of a landscape frame; the model sees the window in as many rows as the frame
# Height of an object in model pixels at which the model detects it reliably. Recall of nano for persons 80 pixels
# high: .97 in windows of 1:1, .96 of 1:1.25, .92 of 1:1.5, .62 of 1:1.75 and .35 of 1:2.
_GOOD_ROWS = 80.0
_SWEEP_SCALES = (1.25, 1.125)  # frame pixels per model pixel, for the passes of the sweep
_SMALL_ROWS = 28.0  # height in model pixels below which the whole-frame pass misses an object
_MOST_SCALE = 2.0  # a window is at most twice as wide as the model's input, unless its object is larger
_SHARED_SCALE = 1.25  # a window is enlarged up to this scale so that other look requests fit
_SIZES = 8  # number of window sizes between two integer scales
_LEAST_GAIN = 1.3  # a window must magnify an object this much compared with the whole-frame pass
_THRIFTY_GAIN = 2.0  # no windows at 640x360: nano sees it at 1:1.5, and windows cost time without more detections
_MARGIN = 0.3  # margin of a window around an object, as a fraction of the object's size
_RIM = 0.08  # and as a fraction of the window's size
_SWEPT_SCALE = 1.3  # a window up to this scale counts as a look of the sweep
_UNSURE = 0.6  # a detection below this score is looked at again
_SURE_S = 0.25  # a detection this recent explains motion
_MOVING_S = 0.05  # a moving object is looked at again after this time without a detection
_UNSURE_S = 0.1  # the same for a detection with a low score
_MOTION_S = 0.1  # the same for motion; the time doubles with each look without a detection
_MOST_FRUITLESS = 5.0  # highest exponent of that doubling
_MOST_FRUITLESS_THERE = 1.0  # highest exponent at positions where objects were detected before
_FORGET_S = 20.0  # half-life of the count of looks without a detection
_MOST_URGENT = 10.0
_MOST_BLOBS = 32
_LEAST_BLOB = 3  # smallest blob, in cells of the motion map
_CELL_ROWS = 36  # rows of the grid that records looks at motion


@dataclass(slots=True, frozen=True)
class Look:
    """A zoom window: a region of a frame that the model processes at full resolution.

    Attributes:
        x, y, width, height: position of the upper left corner and size, in pixels.
        reason: why the region needs a zoom window: motion, a tracked object, an uncertain object, or the sweep.
    """

    x: int
    y: int
    width: int
    height: int
    reason: Reason

    @property
    def rect(self) -> Rect:
        """The corners x1, y1, x2 and y2 of the zoom window, in pixels."""
        return float(self.x), float(self.y), float(self.x + self.width), float(self.y + self.height)


@dataclass(slots=True, frozen=True)
class _WindowRequest:
    """A request for a zoom window on an object or a moving region.

    `misses` is the number of consecutive zoom windows that did not detect the object.
    """

    box: Rect
    reason: Reason
    urgency: float
    misses: int = 0


class Planner:
    """Chooses the zoom windows of one stream. Not thread-safe.

    Args:
        width, height: size of the frames in pixels.
        columns, rows: size of the model's input in pixels.
        sweep_s: time in which zoom windows cover the whole frame once, in seconds.
        thrifty: whether to use fewer zoom windows, for example by leaving stationary objects to the sweep.

    Raises:
        ValueError: if a size or the time is not above 0.
    """

    def __init__(
        self, width: int, height: int, columns: int, rows: int, sweep_s: float = 5.0, *, thrifty: bool = False
    ) -> None:
        if min(width, height, columns, rows) <= 0:
            raise ValueError(
                f"frame size and grid size should be above 0, got frame {width}x{height} and grid {columns}x{rows}"
            )
        if not 0 < sweep_s < float("inf"):
            raise ValueError(f"sweep_s (seconds to scan the whole frame) should be above 0, got {sweep_s}")
        self._width, self._height = width, height
        self._columns = float(columns)
        self._rows = float(rows) if columns <= rows else min(float(rows), columns / _FLAT)
        self._glance = max(width / columns, height / rows)  # frame pixels per model pixel
        self._memory = Memory(still_s=3 * sweep_s)
        self._thrifty = thrifty
        self._number = 0  # fraction of the frame
        self._new_last = False  # whether the last window showed a new object; the next window may belong to the sweep
        self._sweep: Sweep | None = None
        if self._glance >= _LEAST_GAIN * _SWEEP_SCALES[0]:
            self._sweep = Sweep(width, height, [self._size(scale) for scale in _SWEEP_SCALES], sweep_s)
        grid = _CELL_ROWS, max(1, round(_CELL_ROWS * width / height))
        self._tried: NDArray[np.float64] = np.full(grid, -np.inf)
        self._fruitless: NDArray[np.float64] = np.zeros(grid)
        self._forgot_s = 0.0
        self._recent: list[tuple[Rect, float]] = []  # boxes of the last frames, including large boxes

    @property
    def useful(self) -> bool:
        """Whether the frame is so much larger than the model's input that zoom windows show more detail."""
        return self._glance >= (_THRIFTY_GAIN if self._thrifty else _LEAST_GAIN)

    @property
    def expected(self) -> Sequence[Known]:
        """The remembered small objects, which were detected in earlier frames."""
        return self._memory.known

    def choose(
        self, seconds: float, most: int, changed: NDArray[np.bool_] | None = None, moving: float = 0.0
    ) -> list[Look]:
        """Return the zoom windows of a frame, the most urgent first.

        Args:
            seconds: time of the frame, in seconds.
            most: maximum number of windows.
            changed: (rows, columns) bool map of the pixels with motion, or None without motion.
            moving: fraction of the frame that shows motion, from 0 to 1.
        """
        if not self.useful:
            return []
        if moving > MOST_MOVING:
            return []
        blobs = [] if changed is None else self._blobs(changed)
        self._memory.note_motion(blobs, seconds)
        if self._sweep:
            self._sweep.pass_time(seconds)
        wishes = [*self._wishes_of_motion(blobs, seconds), *self._wishes_of_objects(seconds)]
        wishes = sorted((one for one in wishes if one.urgency >= 1), key=lambda one: -one.urgency)
        looks: list[Look] = []
        self._number += 1
        while len(looks) < most:
            sweeps = not wishes or self._sweeps(most - len(looks), most, wishes)
            look = self._sweep_look(seconds, taken=bool(wishes)) if sweeps else None
            if look is None:
                if not wishes:
                    break
                look, wishes = self._share(wishes, seconds)
            looks.append(look)
            self._new_last = look.reason not in ("sweep", "track")
            self._note_asked(look.rect, seconds)
            core = _enlarged(look.rect, -EDGE)
            wishes = [one for one in wishes if not inside(one.box, core)]
        return looks

    def note(self, seconds: float, looks: Sequence[Look], found: Sequence[Found]) -> list[Found]:
        """Store the detections of a frame. Return predicted detections of small objects outside the zoom windows.

        Args:
            seconds: time of the frame, in seconds.
            looks: zoom windows of the frame.
            found: the detected boxes of the frame, without duplicates.
        """
        windows = [look.rect for look in looks]
        if self._sweep:
            for window in windows:
                if self._swept(window):
                    self._sweep.note_seen(window, seconds)
        for look in looks:
            self._note_fruit(look, found, seconds)
        small = [one for one in found if self._is_small(one.box)]
        if self._sweep:
            for one in small:
                self._sweep.note_found(one.box)
        held = self._memory.update(small, windows, seconds)
        self._recent = [(box, at) for box, at in self._recent if 0 <= seconds - at < _SURE_S]
        self._recent += [(one.box, seconds) for one in found]
        return held

    def _is_small(self, box: Rect) -> bool:
        return box[3] - box[1] < _SMALL_ROWS * self._glance

    # ---- look requests

    def _wishes_of_motion(self, blobs: Sequence[Rect], seconds: float) -> list[_WindowRequest]:
        recent = [box for box, at in self._recent if 0 <= seconds - at < _SURE_S]
        boxes = [_enlarged(box, 0.4 if self._is_small(box) else 0.05) for box in recent]
        boxes += [_enlarged(one.box_at(seconds), 0.6) for one in self._memory.known]
        wishes = []
        for blob in blobs:
            if any(shared_area(blob, box) > 0.5 * rect_area(blob) for box in boxes):
                continue
            row, column = self._cell_of(blob)
            there = self._sweep is not None and self._sweep.has_appeared(blob)
            most = _MOST_FRUITLESS_THERE if there else _MOST_FRUITLESS
            patience = _MOTION_S * 2 ** min(self._fruitless[row, column], most)
            waited = seconds - self._tried[row, column]
            urgency = _MOST_URGENT if waited < 0 else min(_MOST_URGENT, waited / patience)
            wishes.append(_WindowRequest(blob, "motion", urgency))
        return wishes

    def _wishes_of_objects(self, seconds: float) -> list[_WindowRequest]:
        """Return the zoom window requests for small objects that need a new detection."""
        wishes = []
        for one in self._memory.known:
            waited = seconds - max(one.found_s, one.looked_s)
            unsure = not one.confirmed or one.found.score < _UNSURE
            if one.moves(seconds) or one.found_s < one.moved_s:  # the object was not detected since it came to rest
                urgency = waited / (_MOVING_S * 2**one.misses)
            elif not one.confirmed:
                urgency = waited / (_UNSURE_S * 2**one.misses)
            elif not self._thrifty:
                urgency = min(1.5, waited / _MOVING_S)  # lowest priority
            elif unsure:
                urgency = waited / (10 * _UNSURE_S)
            else:
                continue  # still objects are left to the sweep
            reason: Reason = "unsure" if unsure else "track"
            box = self._clipped(one.box_at(seconds))
            if rect_area(box) > 0:
                wishes.append(_WindowRequest(box, reason, min(_MOST_URGENT, urgency), one.misses))
        return wishes

    def _sweeps(self, left: int, most: int, wishes: Sequence[_WindowRequest]) -> bool:
        """Return whether the next zoom window of a frame belongs to the sweep.

        The sweep covers the whole frame with zoom windows, one after another.
        """
        if self._sweep is None or not self._sweep.due(taken=True):
            return False
        if most == 1:  # a new object has priority
            return self._number % 3 == 1 and (wishes[0].reason == "track" or self._new_last)
        return left == 1 or (self._sweep.first_pass and self._number % 3 == 1)

    def _sweep_look(self, seconds: float, *, taken: bool) -> Look | None:
        if self._sweep is None or not self._sweep.due(taken=taken):
            return None
        chosen = self._sweep.choose(seconds, taken=taken)
        return None if chosen is None else self._look(chosen, "sweep")

    # ---- windows

    def _share(self, wishes: Sequence[_WindowRequest], seconds: float) -> tuple[Look, list[_WindowRequest]]:
        """Return a zoom window for the first request, and the requests that do not fit into this window.

        The rest of the window covers the least recently processed part of the frame.
        """
        first = wishes[0]
        whole, scale, left = _enlarged(first.box, _MARGIN), self._scale(first.box), []
        for wish in wishes[1:]:
            joined, needed = _union(whole, _enlarged(wish.box, _MARGIN)), max(scale, self._scale(wish.box))
            fitting = max((joined[2] - joined[0]) / self._columns, (joined[3] - joined[1]) / self._rows) / (
                1 - 2 * _RIM
            )
            if fitting <= max(needed, _SHARED_SCALE):
                whole, scale = joined, max(needed, fitting)
            else:
                left.append(wish)
        width, height = self._size(scale)
        x, y = (whole[0] + whole[2] - width) / 2, (whole[1] + whole[3] - height) / 2
        window = x, y, x + width, y + height
        if self._sweep and scale <= _SWEPT_SCALE:
            rim = _RIM * width, _RIM * height
            shown = self._clipped((whole[0] - rim[0], whole[1] - rim[1], whole[2] + rim[0], whole[3] + rim[1]))
            if shown[2] - shown[0] <= width + 1 and shown[3] - shown[1] <= height + 1:
                # After a miss, the window is shifted, so that the object has a different background.
                window = self._sweep.place(shown, (width, height), seconds, first.misses)
        return self._look(window, first.reason), left

    def _scale(self, box: Rect) -> float:
        """Return the scale of a zoom window on an object, in frame pixels per pixel of the model's input."""
        width, height = box[2] - box[0], box[3] - box[1]
        best = min(_MOST_SCALE, max(1.0, height / _GOOD_ROWS))
        return max(best, 2 * width / self._columns, 2 * height / self._rows)

    def _size(self, scale: float) -> tuple[float, float]:
        """Return the width and height of a zoom window with this scale, in frame pixels.

        The scale is rounded up to a few values, because the GPU needs compiled kernels for each window size.
        """
        scale = math.ceil(scale * _SIZES - 1e-6) / _SIZES
        return min(self._width, self._columns * scale), min(self._height, self._rows * scale)

    def _look(self, window: Rect, reason: Reason) -> Look:
        """Shift a zoom window into the frame. Its position and size become even, because chroma is subsampled."""
        width, height = int(window[2] - window[0]) & ~1, int(window[3] - window[1]) & ~1
        x = int(min(max(0.0, window[0]), self._width - width)) & ~1
        y = int(min(max(0.0, window[1]), self._height - height)) & ~1
        return Look(x, y, max(2, width), max(2, height), reason)

    # ---- motion

    def _blobs(self, changed: NDArray[np.bool_]) -> list[Rect]:
        """Return the bounding boxes of regions with motion, in pixels, largest first. Large regions are omitted.

        Args:
            changed: (rows, columns) bool map of the pixels with motion.
        """
        rows, columns = changed.shape
        joined = cv2.dilate(changed.view(np.uint8), _KERNEL)
        count, _, stats, _ = cv2.connectedComponentsWithStats(joined, connectivity=8, ltype=cv2.CV_16U)
        if count < 2:
            return []
        stats = stats[1:]
        stats = stats[stats[:, cv2.CC_STAT_AREA] >= _LEAST_BLOB + 9]  # areas of dilated blobs
        stats = stats[np.argsort(-stats[:, cv2.CC_STAT_AREA])][:_MOST_BLOBS]
        across, down = self._width / columns, self._height / rows
        blobs: list[Rect] = []
        for x, y, w, h, _ in stats.tolist():
            box = (x + 1) * across, (y + 1) * down, (x + w - 1) * across, (y + h - 1) * down
            if self._scale(box) * _LEAST_GAIN <= self._glance:
                blobs.append(box)
        return blobs

    def _cell_of(self, box: Rect) -> tuple[int, int]:
        rows, columns = self._tried.shape
        x, y = (box[0] + box[2]) / 2 / self._width, (box[1] + box[3]) / 2 / self._height
        return min(rows - 1, max(0, int(y * rows))), min(columns - 1, max(0, int(x * columns)))

    def _cells(self, window: Rect) -> tuple[slice, slice]:
        rows, columns = self._tried.shape
        return (
            slice(int(window[1] / self._height * rows), int(np.ceil(window[3] / self._height * rows))),
            slice(int(window[0] / self._width * columns), int(np.ceil(window[2] / self._width * columns))),
        )

    def _note_asked(self, window: Rect, seconds: float) -> None:
        self._tried[self._cells(window)] = seconds
        self._memory.note_look(window, seconds)
        if self._sweep and self._swept(window):
            self._sweep.note_asked(window, seconds)

    def _swept(self, window: Rect) -> bool:
        """Return whether a zoom window is small enough (high magnification) to count as a sweep window."""
        return window[2] - window[0] <= _SWEPT_SCALE * self._columns

    def _note_fruit(self, look: Look, found: Sequence[Found], seconds: float) -> None:
        """Record whether an object was detected in a zoom window with motion. Older records have less weight."""
        if seconds > self._forgot_s + 1 or seconds < self._forgot_s:
            self._fruitless *= 0.5 ** (min(max(0.0, seconds - self._forgot_s), 60.0) / _FORGET_S)
            self._forgot_s = seconds
        if look.reason != "motion":
            return
        if any(shared_area(one.box, look.rect) > 0.5 * rect_area(one.box) for one in found):
            self._fruitless[self._cells(look.rect)] = 0
        else:
            self._fruitless[self._cells(look.rect)] += 1

    def _clipped(self, box: Rect) -> Rect:
        return max(0.0, box[0]), max(0.0, box[1]), min(float(self._width), box[2]), min(float(self._height), box[3])


_KERNEL = np.ones((3, 3), np.uint8)


def _enlarged(box: Rect, by: float) -> Rect:
    x, y = by * (box[2] - box[0]), by * (box[3] - box[1])
    return box[0] - x, box[1] - y, box[2] + x, box[3] + y


def _union(a: Rect, b: Rect) -> Rect:
    return min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])
