"""`saccade run` that also reports memory statistics: `python -m benchmarks.soak.product ARGUMENTS…`.

The arguments are those of `saccade run`. For each line on standard input, the process writes one JSON line to the file
descriptor SACCADE_SOAK_OUT. With SACCADE_SOAK_TRACE=1, it also traces Python allocations, which is slow.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import tempfile
import threading
import tracemalloc
from collections import Counter
from typing import Any

_TYPES = 400  # most types that are reported
_TRACED = 12
_MALLINFO = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _Malloc(ctypes.Structure):
    """The C struct `mallinfo2` of glibc, with statistics of its memory allocator."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def allocated() -> dict[str, float]:
    """Return statistics of glibc's memory allocator: number of arenas, and MB of used, free and mapped memory."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return {}
    libc.mallinfo2.restype = _Malloc
    found = libc.mallinfo2()
    return {
        "heap_mb": found.arena / 1e6,
        "used_mb": found.uordblks / 1e6,
        "free_mb": found.fordblks / 1e6,
        "mapped_mb": found.hblkhd / 1e6,
        "arenas": _arenas(libc),
    }


def _arenas(libc: ctypes.CDLL) -> int:
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as file:
        stream = libc.fdopen(os.dup(file.fileno()), b"w")
        libc.malloc_info(0, ctypes.c_void_p(stream))
        libc.fclose(ctypes.c_void_p(stream))
        file.seek(0)
        return len(re.findall(rb"<heap nr=", file.read()))


def objects() -> dict[str, int]:
    """Return the most frequent types of Python objects, each with its number of objects."""
    counts: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        counts[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return dict(counts.most_common(_TYPES))


def observe(out: int) -> None:
    """For each line on standard input, write memory statistics as a JSON line to the file descriptor `out`."""
    before: tracemalloc.Snapshot | None = None
    for line in sys.stdin:
        gc.collect()
        found: dict[str, Any] = {"malloc": allocated(), "objects": objects(), "blocks": sys.getallocatedblocks()}
        if tracemalloc.is_tracing():
            now = tracemalloc.take_snapshot()
            if before is not None:
                grown = [one for one in now.compare_to(before, "traceback") if one.size_diff > 0][:_TRACED]
                found["traced"] = [[one.size_diff, one.count_diff, one.traceback.format()] for one in grown]
            if before is None or line.strip() == "reset":
                before = now
        os.write(out, (json.dumps(found) + "\n").encode())


def main() -> None:
    """Run `saccade run`, and report memory statistics from a thread."""
    out = int(os.environ.pop("SACCADE_SOAK_OUT"))
    if os.environ.pop("SACCADE_SOAK_TRACE", ""):
        tracemalloc.start(8)
    threading.Thread(target=observe, args=(out,), name="soak observer", daemon=True).start()
    from saccade.pipeline.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
