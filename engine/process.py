"""Settings of the whole process that the engine changes.

| setting | when |
|---|---|
| `GOMP_SPINCOUNT` in the environment, see `limit_spinning` | `import saccade.engine`, before PyTorch is loaded |
| glibc's arenas and `MALLOC_ARENA_MAX`, see `limit_arenas` | `import saccade.engine`, or start of the command line |
| glibc's thresholds, see `keep_freed_memory` | when an engine on a CPU is loaded |
| `malloc_trim` once a minute, see `_give_back` | while an engine is open |
| filter of PyTorch's `TracerWarning`, see `silence_tracer` | when an engine on a CPU is loaded |
| `gc.freeze`, see `shorten_collections` | only on request of an application |
| `gc.unfreeze` | when the last engine closes, if an application has frozen a model |

The engine's threads are daemon threads named `saccade-…`. The engine does not change PyTorch's thread count:
`cpu.threads` sets OpenMP's thread count only for the engine's own threads.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # constants of glibc's malloc.h
_ARENAS = 2
_MIB = 1 << 20
_TUNABLES = "GLIBC_TUNABLES"
_SPINS = 20_000  # about 0.4 ms; with 40 µs, the time of a decode step, threads sleep and wake up late too often
_TRIM_S = 60.0
_SET_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")

_lock = threading.Lock()
_open_engines = 0
_all_closed = threading.Event()  # ends the thread that returns memory to the kernel
_trimming: threading.Thread | None = None
_frozen_model = False


def engine_opened() -> None:
    """Increment the number of open engines. The first one starts the thread that frees heap pages."""
    global _open_engines, _all_closed, _trimming
    with _lock:
        _open_engines += 1
        if _open_engines == 1 and (trim := _glibc("malloc_trim")) is not None:
            _all_closed = threading.Event()
            arguments = (trim, _all_closed)
            _trimming = threading.Thread(target=_give_back, args=arguments, name="saccade-memory", daemon=True)
            _trimming.start()


def engine_closed() -> None:
    """Decrement the number of open engines. At 0, loaded models become subject to garbage collection again."""
    global _open_engines, _frozen_model, _trimming
    ended = None
    with _lock:
        _open_engines -= 1
        if not _open_engines:
            _all_closed.set()
            ended, _trimming = _trimming, None
        if _frozen_model and not _open_engines:
            _frozen_model = False
            gc.unfreeze()
    if ended is not None:
        ended.join(1.0)


def shorten_collections(*, model: bool = False) -> None:
    """Exclude all existing objects from garbage collection. Call this before the first model is loaded.

    Later objects are collected as usual.

    Args:
        model: whether to exclude loaded models too. Use True if a model stays loaded until the process ends.
    """
    global _frozen_model
    if model:
        gc.collect()
        _frozen_model = True
    # Imports create 240,000 permanent objects. A full collection that visits them stops all threads for 190 ms.
    if model or not gc.get_freeze_count():
        gc.freeze()


def limit_arenas() -> None:
    """Limit glibc to two heap arenas, unless the user has set a limit. Call this before threads start.

    Child processes inherit the limit.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get(_TUNABLES, "") or _glibc("mallopt") is None:
        return
    # With the default of 8 arenas per CPU, a process with two cameras grows by 60 MB in the first 20 minutes.
    os.environ["MALLOC_ARENA_MAX"] = str(_ARENAS)
    _mallopt(_ARENA_MAX, _ARENAS)


def keep_freed_memory() -> None:
    """Configure glibc to reuse freed memory blocks of up to 4 MiB. Without glibc, the call has no effect."""
    # Page faults of the vision encoder's blocks (up to 3 MB) took 19 of 64 ms per image of the model nano.
    # Larger blocks go back to the kernel: keeping the video frames of six 4K cameras takes 1.8 GB.
    _mallopt(_MMAP_THRESHOLD, 4 * _MIB)
    _mallopt(_TRIM_THRESHOLD, 256 * _MIB)


def _give_back(trim: Callable[[int], int], ended: threading.Event) -> None:
    """Return free heap pages to the kernel once a minute, until the last engine is closed."""
    # Opening and closing connections fragments the heap: 1.5 MB per minute with eight cameras.
    while not ended.wait(_TRIM_S):
        trim(0)


def _mallopt(parameter: int, value: int) -> None:
    """Set a parameter of glibc's malloc. Without glibc, the call has no effect."""
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(parameter, value)


def _glibc(name: str) -> Callable[..., int] | None:
    """Return the glibc function with this name, or None on systems without glibc."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def limit_spinning() -> bool:
    """Reduce the time for which waiting OpenMP threads spin from 5 ms to 0.4 ms. Call this before PyTorch is loaded.

    With short spinning, the engine can use one thread per CPU (`cpu.threads.image_threads`). If another process
    preempts one of these threads, it delays the other threads only briefly.

    | nano on two idle CPUs, time per image | p50 | p99 |
    |---|---|---|
    | one thread | 33.3 ms | 46.6 ms |
    | two threads, 40 µs of spinning | 29.9 ms | 45.3 ms |
    | two threads, 0.4 ms | 27.7 ms | 35.8 ms |
    | two threads, 20 ms | 28.6 ms | 43.5 ms |

    Returns:
        Whether the limit applies. It is False if PyTorch is already loaded, if OpenMP is not libgomp, or if the user
        has set a limit.
    """
    ours = os.environ.get(_SET_BY[0]) == str(_SPINS)
    if ours or sys.platform != "linux" or "torch" in sys.modules or any(name in os.environ for name in _SET_BY):
        return ours
    os.environ[_SET_BY[0]] = str(_SPINS)
    return True


def silence_tracer() -> None:
    """Hide PyTorch's TracerWarning about constants in a trace. In this project, these constants depend only on shapes.

    The filter applies to the whole process, because `warnings.catch_warnings` is not thread-safe.
    """
    from torch.jit._trace import TracerWarning

    warnings.filterwarnings("ignore", category=TracerWarning)
