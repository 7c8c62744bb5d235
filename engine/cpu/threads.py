"""How many threads share an operation of a model on the CPU. Knows no models."""

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

_WORTH = 0.93  # of an image's time on few threads is the most that it may take on many for these to be used
_RECENT, _TRIAL = 9, 16  # images whose median counts: what is found in them takes as much as what is gained
_LOST_AFTER, _LOST = 3, 1.2  # a trial ends when so many images took that much longer
_AGAIN, _AGAIN_MOST = 400, 25_600  # images between two trials; twice as many after each that found nothing better


def set_threads(threads: int) -> None:
    """Let so many threads work on each operation that the calling thread starts from now on; the others' stay as is.

    `torch.set_num_threads` would apply to every later thread, too. Does nothing where torch has no OpenMP.
    """
    import torch  # loads the OpenMP that it uses

    set_omp = _omp_set_num_threads()
    if set_omp is not None and torch.backends.openmp.is_available():
        torch.get_num_threads()  # torch sets a thread's number when it is first asked there, and would undo ours
        set_omp(threads)


class ImageThreads:
    """How many threads share an image: as many as there are CPUs, where images show that it is worth it.

    What runs beside the engine decides that: alone on two CPUs, two threads take less time than one, but not where a
    decoder or another process has one of them. So every now and then a few images try the other number, four of them
    where that is much slower; sooner when many threads take longer than they did.

    Args:
        few: threads.
        many: threads; the same where there is nothing to choose.
    """

    def __init__(self, few: int, many: int) -> None:
        self._used, self._other, self._few = few, many, few
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of the latest images on `_used` threads
        self._trial: list[float] = []  # seconds of images on `_other` threads; the first prepares what the later use
        self._trying, self._until_trial, self._again = False, _RECENT, _AGAIN
        self._usual = math.inf  # seconds on `_used` threads when they were last found to be the better ones

    def choose(self) -> int:
        """For the next image."""
        return self._other if self._trying else self._used

    def took(self, seconds: float) -> None:
        """What an image took on the threads chosen."""
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
    """How many threads share an operation of a step: as many as torch is set to, but not on all CPUs: half of those.

    Threads that share operations of 50 µs wait for each other by spinning, some 300 times an image. With one on every
    CPU, each other process or thread that runs (a decoder, a page) makes all of them wait for the one it displaced:
    nano on two threads of two CPUs that others loaded twice took 1,263 ms an image (p99 7 s), on one 98 (170).
    """
    import torch

    threads, processors = torch.get_num_threads(), usable_processors()
    return threads if threads < processors or "OMP_NUM_THREADS" in os.environ else max(1, processors // 2)


def image_threads() -> ImageThreads:
    """How many threads share an image: `step_threads`, or as many as there are CPUs where these do not spin long."""
    import torch

    few = step_threads()
    processors = usable_processors()
    return ImageThreads(few, processors if limit_spinning() and torch.get_num_threads() >= processors else few)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let the calling thread work alone on what it does in the block.

    A thread that has once shared an operation keeps its helpers. OpenMP (libgomp) counts those of all threads, and as
    soon as there are more than CPUs, a helper sleeps between any two operations and is woken for each, 30 µs late, of
    which nano's tower has some 300. So only the thread that runs the steps has helpers.
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
