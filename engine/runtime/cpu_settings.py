"""Settings of the process that a model on the CPU runs much better with. Knows no models."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_MIB = 1 << 20


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next image instead of giving it back to the kernel each time.

    A vision encoder's activations are blocks of up to 3 MB, allocated and freed in the same order on every image.
    Mapped anew each time, in a thread that is not the main one, their page faults cost nano 19 of 64 ms. Larger blocks
    are frames of more than 1080p, which threads of their own allocate: kept, six 4K cameras took 1.8 GB for good;
    mapped, they cost nano no page fault. Does nothing elsewhere.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 4 * _MIB)
        mallopt(_TRIM_THRESHOLD, 256 * _MIB)


def set_threads(threads: int) -> None:
    """Let so many threads work on each operation that the calling thread starts from now on; the others' stay as is.

    `torch.set_num_threads` would apply to every later thread, too. Does nothing where torch has no OpenMP.
    """
    import torch  # loads the OpenMP that it uses

    set_omp = _omp_set_num_threads()
    if set_omp is not None and torch.backends.openmp.is_available():
        torch.get_num_threads()  # torch sets a thread's number when it is first asked there, and would undo ours
        set_omp(threads)


def step_threads() -> int:
    """How many threads share an operation of a step: as many as torch is set to, but not on all CPUs: half of those.

    Threads that share operations of 50 µs wait for each other by spinning, some 300 times an image. With one on every
    CPU, each other process or thread that runs (a decoder, a page) makes all of them wait for the one it displaced:
    nano on two threads of two CPUs that others loaded twice took 1,263 ms an image (p99 7 s), on one 98 (170).
    """
    import torch

    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = torch.get_num_threads()
    return threads if threads < cpus or "OMP_NUM_THREADS" in os.environ else max(1, cpus // 2)


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
