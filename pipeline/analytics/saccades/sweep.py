"""The slow sweep over a frame: which part was not looked at for the longest time, and where objects appear.

The windows of a pass form a lattice that covers the frame, with an overlap in which an object is whole in one of two
neighbours; the next pass has another window size, and so another lattice. A grid of cells holds when each was last
shown by any window. A look goes to the window of the lattice whose cells have waited longest; cells near which an
object was ever found count more. A look is due when the pace asks for it: one pass in the time that was set. The first
pass takes every window that is free. Plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.analytics.saccades.memory import Rect

_ROWS = 48  # cells of the grid, from top to bottom
_OVERLAP = (0.06, 0.19)  # of a window's width and height, shared with its neighbours: persons are high and narrow
_APPEARED = 2.0  # how much more a cell counts where objects appear
_LEAST_WAITED = 0.02  # mean value of a window's cells below which it is not worth a look
_PENDING_S = 0.5  # for which a place is not chosen again while its result is awaited

Grid = NDArray[np.float32]


class Sweep:
    """The sweep of one stream.

    Args:
        width, height: of the frame in pixels.
        sizes: width and height of the windows in pixels, one for each pass in turn.
        period_s: in which the whole frame is looked at.
    """

    def __init__(self, width: int, height: int, sizes: Sequence[tuple[float, float]], period_s: float) -> None:
        self._width, self._height, self._period_s = width, height, period_s
        self._rows, self._columns = _ROWS, max(1, round(_ROWS * width / height))
        self._cell = (width / self._columns, height / self._rows)
        self._lattices = [self._lattice(size) for size in sizes]
        self._seen: Grid = np.full((self._rows, self._columns), -np.inf, np.float32)
        self._asked: Grid = self._seen.copy()
        self._appeared: Grid = np.zeros_like(self._seen)
        y, x = np.mgrid[-1 : 1 : self._rows * 1j, -1 : 1 : self._columns * 1j]
        self._order: Grid = (1.1 - 0.05 * (x * x + y * y)).astype(np.float32)  # among equals, the middle is first
        self._credit, self._made = 0.0, 0
        self._last: float | None = None

    @property
    def looks(self) -> int:
        """How many windows cover the frame once."""
        return len(self._lattices[0][0])

    def pass_time(self, seconds: float) -> None:
        """Count the looks that are due."""
        if self._last is None or seconds < self._last:
            self._seen[:] = self._asked[:] = seconds - self._period_s
        else:
            self._credit += (seconds - self._last) * self.looks / self._period_s
        self._credit = min(self._credit, 2.0)
        self._last = seconds

    @property
    def due(self) -> bool:
        """Whether it is time for a look."""
        return self._credit >= 1.0 or self.first_pass

    @property
    def first_pass(self) -> bool:
        """Whether the frame was not looked at once yet."""
        return self._made < self.looks

    def choose(self, seconds: float) -> Rect | None:
        """The window that has waited longest; None where all were seen of late. Takes the look as made."""
        self._credit = max(0.0, self._credit - 1.0)
        windows, cells = self._lattices[self._made // self.looks % len(self._lattices)]
        self._made += 1
        known = np.maximum(self._seen, np.where(seconds - self._asked < _PENDING_S, self._asked, -np.inf))
        waited = np.clip((seconds - known) / self._period_s, 0, 3)
        total = cv2.integral((waited * waited * (self._order + _APPEARED * self._appeared)).astype(np.float32))
        top, bottom, left, right = cells
        value = total[bottom, right] - total[top, right] - total[bottom, left] + total[top, left]
        value /= (bottom - top) * (right - left)
        best = int(value.argmax())
        if value[best] < _LEAST_WAITED:
            return None
        x1, y1, x2, y2 = windows[best].tolist()
        return x1, y1, x2, y2

    def note_asked(self, window: Rect, seconds: float) -> None:
        """A window is put here; its result comes later."""
        self._asked[self._within(window)] = seconds

    def note_seen(self, window: Rect, seconds: float) -> None:
        """The model has looked here."""
        self._seen[self._within(window)] = seconds

    def note_found(self, box: Rect) -> None:
        """An object was found here."""
        x, y = (box[0] + box[2]) / 2 / self._cell[0], (box[1] + box[3]) / 2 / self._cell[1]
        row, column = min(self._rows - 1, int(y)), min(self._columns - 1, int(x))
        near = self._appeared[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
        near += (1 - near) * 0.2

    def _lattice(self, size: tuple[float, float]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Windows (n, 4) that cover the frame, and the cells (4, n), top, bottom, left and right, that each answers."""
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
        """Top, bottom, left and right of the cells whose objects a window shows whole."""
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
