"""Process-wide settings that the engine changes.

| setting | when |
|---|---|
| `GOMP_SPINCOUNT` in the environment, see `limit_spinning` | `import saccade.engine`, before torch is loaded |
| glibc's arenas and `MALLOC_ARENA_MAX`, see `limit_arenas` | `import saccade.engine`; the command line starts |
| glibc's thresholds, see `keep_freed_memory` | an engine on a CPU is loaded |
| `malloc_trim` once a minute, see `_give_back` | while an engine is open |
| the filter of torch's `TracerWarning`, see `silence_tracer` | an engine on a CPU is loaded |
| `gc.freeze`, see `shorten_collections` | only on request of an application |
| `gc.unfreeze` | the last engine closes, if an application has frozen a model |

The engine's threads are daemons named `saccade-…`. Torch's thread count is unchanged: `cpu.threads` sets OpenMP's count
for the engine's own threads only.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_ARENAS = 2
_MIB = 1 << 20
_TUNABLES = "GLIBC_TUNABLES"
_SPINS = 20_000  # some 0.4 ms: with 40 µs, as long as a decode step, helpers sleep and are woken late too often
_TRIM_S = 60.0
_SET_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")

_lock = threading.Lock()
_open_engines = 0
_all_closed = threading.Event()  # of the thread that gives memory back
_trimming: threading.Thread | None = None
_frozen_model = False


def engine_opened() -> None:
    """Count an open engine; the first one starts returning freed memory to the kernel."""
    global _open_engines, _all_closed, _trimming
    with _lock:
        _open_engines += 1
        if _open_engines == 1 and (trim := _glibc("malloc_trim")) is not None:
            _all_closed = threading.Event()
            arguments = (trim, _all_closed)
            _trimming = threading.Thread(target=_give_back, args=arguments, name="saccade-memory", daemon=True)
            _trimming.start()


def engine_closed() -> None:
    """Count a closed engine; after the last one, models are garbage-collected again, see `shorten_collections`."""
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
    """Exclude all loaded objects from garbage collection; call before the first model is loaded.

    Torch and other imports have 240,000 permanent objects. A full collection stopped all threads for 190 ms, and frames
    of 64 cameras missed their deadlines of 250 ms; without these objects it takes 9 ms. Later objects, such as models,
    are collected as usual.

    Args:
        model: also exclude loaded models; use this if a model stays for the life of the process. On an H200, the model
            and the kernel compiler made a collection take 165 ms again.
    """
    global _frozen_model
    if model:
        gc.collect()
        _frozen_model = True
    if model or not gc.get_freeze_count():
        gc.freeze()


def limit_arenas() -> None:
    """Limit glibc to two heap arenas for all threads; call before threads start.

    By default glibc creates up to 8 arenas per CPU, and memory freed in one is unavailable to others. A process with
    two cameras grew by 60 MB in its first 20 minutes. With two arenas it does not grow, at equal CPU time. Child
    processes inherit the limit by environment variable. A limit set by the user is kept.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get(_TUNABLES, "") or _glibc("mallopt") is None:
        return
    os.environ["MALLOC_ARENA_MAX"] = str(_ARENAS)
    _mallopt(_ARENA_MAX, _ARENAS)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next image instead of returning it to the kernel.

    A vision encoder's activations are blocks of up to 3 MB, allocated and freed in the same order for each image; page
    faults cost nano 19 of 64 ms. Larger blocks are frames above 1080p. Keeping them took 1.8 GB for six 4K cameras, so
    they stay mapped. Does nothing without glibc.
    """
    _mallopt(_MMAP_THRESHOLD, 4 * _MIB)
    _mallopt(_TRIM_THRESHOLD, 256 * _MIB)


def _give_back(trim: Callable[[int], int], ended: threading.Event) -> None:
    """Return free heap pages to the kernel once a minute until the last engine is closed.

    Connections and decoders that come and go leave gaps in the heap. With eight cameras, a process grew by 1.5 MB per
    minute.
    """
    while not ended.wait(_TRIM_S):
        trim(0)


def _mallopt(parameter: int, value: int) -> None:
    """Set a parameter of glibc's malloc."""
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(parameter, value)


def _glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc, or None on other systems."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def limit_spinning() -> bool:
    """Let waiting OpenMP threads sleep after about 0.4 ms instead of 5; call before torch is loaded.

    Spinning for 0.4 ms allows one thread per CPU, see `cpu.threads.step_threads`: a preempted thread delays the others
    only briefly. nano on two idle CPUs, median and p99 per image: one thread 33.3 and 46.6 ms; two threads 29.9 and
    45.3 with 40 µs of spinning, 27.7 and 35.8 with 0.4 ms, 28.6 and 43.5 with 20 ms.

    Returns:
        Whether the limit applies: False if torch is already loaded, OpenMP is not libgomp, or the user has set a limit.
    """
    ours = os.environ.get(_SET_BY[0]) == str(_SPINS)
    if ours or sys.platform != "linux" or "torch" in sys.modules or any(name in os.environ for name in _SET_BY):
        return ours
    os.environ[_SET_BY[0]] = str(_SPINS)
    return True


def silence_tracer() -> None:
    """Hide torch's TracerWarning about constants, which here depend only on shapes.

    The filter applies to the whole process, because `warnings.catch_warnings` is not thread-safe.
    """
    from torch.jit._trace import TracerWarning

    warnings.filterwarnings("ignore", category=TracerWarning)
