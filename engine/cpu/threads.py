"""Chooses the number of OpenMP threads for models on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator

from saccade.engine.process import limit_spinning
from saccade.processors import usable_processors

_WORTH = 0.93  # many threads are used if an image takes at most this fraction of its time on few threads
_RECENT, _TRIAL = 9, 16  # images per median; processing time depends on the image
_LOST_AFTER, _LOST = 3, 1.2  # a trial ends early after 3 images that take 1.2 times as long
_AGAIN, _AGAIN_MOST = 400, 25_600  # images between trials; doubled after each trial without improvement


def set_threads(threads: int) -> None:
    """Set the number of OpenMP threads for all later operations of the calling thread.

    `torch.set_num_threads` would also affect threads that start later. Without OpenMP, the call has no effect.
    """
    import torch  # loads the OpenMP library of torch

    set_omp = _omp_set_num_threads()
    if set_omp is not None and torch.backends.openmp.is_available():
        # Torch sets the thread count at the first query in a thread; do this before ours is set.
        torch.get_num_threads()
        set_omp(threads)


class ImageThreads:
    """Chooses the faster of two thread counts for an image, by measurement.

    The faster count depends on other load. On two idle CPUs, two threads are faster than one. If a video decoder
    occupies one CPU, two threads are slower. The unused count is measured again every few hundred images, or earlier if
    images become slower.

    Args:
        few: lower number of threads.
        many: higher number of threads, or the same number.
    """

    def __init__(self, few: int, many: int) -> None:
        self._used, self._other, self._few = few, many, few
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of the latest images on `_used` threads
        self._trial: list[float] = []  # seconds of images on `_other` threads; the first image is a warm-up
        self._trying, self._until_trial, self._again = False, _RECENT, _AGAIN
        self._usual = math.inf  # seconds on `_used` threads in the last trial that they won

    def choose(self) -> int:
        """Return the number of OpenMP threads for the next image."""
        return self._other if self._trying else self._used

    def took(self, seconds: float) -> None:
        """Record how long an image took with the chosen number of threads, in seconds."""
        if self._used == self._other:
            return
        if self._trying:
            self._trial.append(seconds)
            measured = self._trial[1:]
            most = _LOST * statistics.median(self._recent)
            lost = len(measured) >= _LOST_AFTER and statistics.median(measured) > most
            if lost or len(measured) == _TRIAL:
                self._compare()
            return
        self._recent.append(seconds)
        self._until_trial -= 1
        slower = self._used != self._few and statistics.median(self._recent) > self._usual / _WORTH
        if len(self._recent) == _RECENT and (slower or self._until_trial <= 0):
            self._trying = True

    def _compare(self) -> None:
        own, other = statistics.median(self._recent), statistics.median(self._trial[1:])
        few, many = (own, other) if self._used == self._few else (other, own)
        if (many < _WORTH * few) == (self._used == self._few):
            self._used, self._other, own = self._other, self._used, other
            self._again = _AGAIN
        else:
            self._again = min(2 * self._again, _AGAIN_MOST)
        self._usual = own
        self._recent.clear()
        self._trial.clear()
        self._trying, self._until_trial = False, self._again


def step_threads() -> int:
    """Return the number of threads for the operations of a batch step.

    PyTorch's number is used if it is below the number of CPUs or set by OMP_NUM_THREADS. Otherwise it is half of the
    CPUs. With one thread on every CPU, any other process delays all threads.

    | nano on two loaded CPUs, time per image | p50 | p99 |
    |---|---|---|
    | two threads | 1,263 ms | 7 s |
    | one thread | 98 ms | 170 ms |
    """
    import torch

    threads, processors = torch.get_num_threads(), usable_processors()
    return threads if threads < processors or "OMP_NUM_THREADS" in os.environ else max(1, processors // 2)


def image_threads() -> ImageThreads:
    """Create an `ImageThreads` that chooses between `step_threads()` and one thread per CPU.

    It always chooses `step_threads()` if busy-waiting of OpenMP threads cannot be limited (`limit_spinning`).
    """
    import torch

    few = step_threads()
    processors = usable_processors()
    return ImageThreads(few, processors if limit_spinning() and torch.get_num_threads() >= processors else few)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run the `with` block with one OpenMP thread, so that OpenMP starts no additional threads.

    Additional threads would stay alive, and slow down batch steps.
    """
    import torch

    before = torch.get_num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


@functools.cache
def _omp_set_num_threads() -> Callable[[int], None] | None:
    if sys.platform == "win32":
        return None
    found: Callable[[int], None] | None = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    return found
