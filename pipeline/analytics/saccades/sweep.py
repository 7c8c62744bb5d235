"""Schedules zoom windows that together cover the whole frame (the sweep).

A zoom window is a region of a frame that the model processes at full resolution. A pass covers the whole frame with a
grid of overlapping windows. The next pass uses another window size.

The sweep chooses the window whose area has waited longest. Areas near earlier detections have a higher priority.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.analytics.geometry import Rect

_ROWS = 48  # rows of the grid
# Fractions of a window's width and height that are shared with its neighbours; persons are tall and narrow.
_OVERLAP = 0.06, 0.19
_APPEARED = 2.0  # extra weight of a cell where objects appear
_LEAST_WAITED = 0.02  # lowest mean value of a window's cells that justifies a look
_POSITIONS = 9  # number of window positions compared along each axis
_TAKEN = 6.0  # cost, in looks, of a look that takes a window from another request
_REST = 0.02  # fraction of the frame that the first pass may leave out
_PENDING_S = 0.5  # an area is not chosen again for this time while its result is pending

Grid = NDArray[np.float32]


class Sweep:
    """Schedules zoom windows that repeatedly cover the whole frame of one stream.

    Args:
        width, height: size of the frame in pixels.
        sizes: width and height of the windows in pixels. Each pass uses the next size.
        period_s: time for one pass, in seconds.
    """

    def __init__(self, width: int, height: int, sizes: Sequence[tuple[float, float]], period_s: float) -> None:
        self._width, self._height, self._period_s = width, height, period_s
        self._rows, self._columns = _ROWS, max(1, round(_ROWS * width / height))
        self._cell = (width / self._columns, height / self._rows)
        self._lattices = [self._lattice(size) for size in sizes]
        self._seen: Grid = np.full((self._rows, self._columns), -np.inf, np.float32)
        self._asked: Grid = self._seen.copy()
        self._appeared: Grid = np.zeros_like(self._seen)
        self._never: NDArray[np.bool_] = np.ones(self._seen.shape, bool)  # cells that were never looked at
        y, x = np.mgrid[-1 : 1 : self._rows * 1j, -1 : 1 : self._columns * 1j]
        self._order: Grid = (1.1 - 0.05 * (x * x + y * y)).astype(np.float32)  # the centre wins ties
        self._credit, self._made = 0.0, 0
        self._last: float | None = None

    @property
    def looks(self) -> int:
        """The number of zoom windows that cover the whole frame once."""
        return len(self._lattices[0][0])

    def pass_time(self, seconds: float) -> None:
        """Set the current time to `seconds`. The rate limit of the sweep (`due`) depends on this time."""
        if self._last is None or seconds < self._last:
            self._seen[:] = self._asked[:] = seconds - self._period_s
        else:
            self._credit += (seconds - self._last) * self.looks / self._period_s
        self._credit = min(self._credit, _TAKEN)
        self._last = seconds

    def due(self, *, taken: bool = False) -> bool:
        """Return whether the rate limit allows another zoom window of the sweep.

        Args:
            taken: whether the window would replace a zoom window with another purpose, such as motion.
        """
        if self.first_pass:
            return self._credit >= 1.0 or not taken
        return self._credit >= (_TAKEN if taken else 1.0)

    @property
    def first_pass(self) -> bool:
        """Whether the sweep is still covering the frame for the first time."""
        return self._made < 2 * self.looks and float(self._never.mean()) > _REST

    def choose(self, seconds: float, *, taken: bool = False) -> Rect | None:
        """Return the next zoom window of the sweep, or None if the whole frame was processed recently.

        Args:
            seconds: time of the frame, in seconds.
            taken: whether the window replaces a zoom window with another purpose, such as motion.
        """
        self._credit = max(0.0, self._credit - (_TAKEN if taken and not self.first_pass else 1.0))
        windows, cells = self._lattices[self._made // self.looks % len(self._lattices)]
        self._made += 1
        total = self._total(seconds)
        top, bottom, left, right = cells
        value = total[bottom, right] - total[top, right] - total[bottom, left] + total[top, left]
        value /= (bottom - top) * (right - left)
        best = int(value.argmax())
        if value[best] < _LEAST_WAITED:
            return None
        x1, y1, x2, y2 = windows[best].tolist()
        return x1, y1, x2, y2

    def place(self, shown: Rect, size: tuple[float, float], seconds: float, corner: int = 0) -> Rect:
        """Place a zoom window so that it contains a rectangle, and otherwise covers the area that has waited longest.

        Args:
            shown: the rectangle, in pixels. It must fit into the window.
            size: width and height of the window, in pixels.
            seconds: time of the frame, in seconds.
            corner: 0 to place the rectangle anywhere in the window; n to place it in corner n modulo 4 of the window.
        """
        total = self._total(seconds)
        xs = _positions(shown[0], shown[2], size[0], self._width)
        ys = _positions(shown[1], shown[3], size[1], self._height)
        if corner:
            xs, ys = xs[[-1 if corner % 4 in (0, 1) else 0]], ys[[-1 if corner % 4 in (1, 2) else 0]]
        across = np.clip(np.stack([xs, xs + size[0]]) / self._cell[0] + 0.5, 0, self._columns).astype(int)
        down = np.clip(np.stack([ys, ys + size[1]]) / self._cell[1] + 0.5, 0, self._rows).astype(int)
        (left, right), (top, bottom) = across, down
        value = total[bottom][:, right] - total[top][:, right] - total[bottom][:, left] + total[top][:, left]
        row, column = np.unravel_index(int(value.argmax()), value.shape)
        x, y = float(xs[column]), float(ys[row])
        return x, y, x + size[0], y + size[1]

    def _total(self, seconds: float) -> NDArray[np.float64]:
        """Return the integral image (`cv2.integral`) of the grid cells' priorities, as (rows + 1, columns + 1)."""
        known = np.maximum(self._seen, np.where(seconds - self._asked < _PENDING_S, self._asked, -np.inf))
        waited = np.clip((seconds - known) / self._period_s, 0, 3)
        value = waited * waited * (self._order + _APPEARED * self._appeared)
        return np.asarray(cv2.integral(value.astype(np.float32)), np.float64)

    def note_asked(self, window: Rect, seconds: float) -> None:
        """Record that a zoom window was submitted to the engine."""
        cells = self._within(window)
        self._asked[cells] = seconds
        self._never[cells] = False

    def note_seen(self, window: Rect, seconds: float) -> None:
        """Record that the model has processed a zoom window."""
        self._seen[self._within(window)] = seconds

    def note_found(self, box: Rect) -> None:
        """Increase the sweep priority of the area around a detection. `box` is in pixels."""
        row, column = self._cell_of(box)
        near = self._appeared[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
        near += (1 - near) * 0.2

    def has_appeared(self, box: Rect) -> bool:
        """Return whether the model has ever detected an object near the centre of `box`."""
        return bool(self._appeared[self._cell_of(box)] > 0)

    def _cell_of(self, box: Rect) -> tuple[int, int]:
        x, y = (box[0] + box[2]) / 2 / self._cell[0], (box[1] + box[3]) / 2 / self._cell[1]
        return min(self._rows - 1, max(0, int(y))), min(self._columns - 1, max(0, int(x)))

    def _lattice(self, size: tuple[float, float]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return a grid of windows that covers the frame, and the range of grid cells of each window.

        The windows are (n, 4) x1, y1, x2, y2 in pixels. The ranges are (4, n), see `_corners`.
        """
        w, h = min(float(self._width), size[0]), min(float(self._height), size[1])
        across, down = _OVERLAP[0] * w, _OVERLAP[1] * h
        n_x = max(1, math.ceil((self._width - across) / (w - across) - 1e-9))
        n_y = max(1, math.ceil((self._height - down) / (h - down) - 1e-9))
        xs, ys = np.linspace(0, self._width - w, n_x), np.linspace(0, self._height - h, n_y)
        x, y = (grid.ravel() for grid in np.meshgrid(xs, ys))
        windows = np.stack([x, y, x + w, y + h], axis=1)
        cells = np.array([self._corners(window) for window in windows.tolist()]).T
        return windows, cells

    def _corners(self, window: Sequence[float]) -> tuple[int, int, int, int]:
        """Return the range of grid cells in a window: first row, end row, first column, end column.

        Half of the overlap with each neighbouring window is excluded.
        """
        x1, y1, x2, y2 = window
        across, down = _OVERLAP[0] * (x2 - x1) / 2, _OVERLAP[1] * (y2 - y1) / 2
        left = 0 if x1 <= 0 else math.floor((x1 + across) / self._cell[0] + 0.5)
        top = 0 if y1 <= 0 else math.floor((y1 + down) / self._cell[1] + 0.5)
        right = self._columns if x2 >= self._width - 2 else math.floor((x2 - across) / self._cell[0] + 0.5)
        bottom = self._rows if y2 >= self._height - 2 else math.floor((y2 - down) / self._cell[1] + 0.5)
        left, top = min(left, self._columns - 1), min(top, self._rows - 1)
        return top, max(top + 1, bottom), left, max(left + 1, right)

    def _within(self, window: Rect) -> tuple[slice, slice]:
        top, bottom, left, right = self._corners(window)
        return slice(top, bottom), slice(left, right)


def _positions(low: float, high: float, size: float, side: float) -> NDArray[np.float64]:
    """Return possible positions along one axis of a window that contains a range of pixels.

    Args:
        low: start of the range, in pixels.
        high: end of the range, in pixels.
        size: size of the window along the axis, in pixels.
        side: size of the frame along the axis, in pixels.
    """
    first, last = max(0.0, min(high - size, side - size)), max(0.0, min(low, side - size))
    return np.linspace(min(first, last), max(first, last), _POSITIONS)
