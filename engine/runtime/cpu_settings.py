"""Settings of the process that a model on the CPU runs much better with. Knows no models."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_MIB = 1 << 20


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next image instead of giving it back to the kernel each time.

    A vision encoder's activations are blocks of some megabytes, allocated and freed in the same order on every image.
    Mapped anew each time, in a thread that is not the main one, their page faults cost nano 19 of 64 ms. Does nothing
    elsewhere.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 * _MIB)  # the largest that glibc accepts
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


@functools.cache
def _omp_set_num_threads() -> Callable[[int], None] | None:
    if sys.platform == "win32":
        return None
    found: Callable[[int], None] | None = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    return found
