"""Whether the machine, or the container, has the memory for another process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int | None:
    """Memory that a new process can have, without what the kernel would have to swap out; None if it is not known.

    Args:
        meminfo: what Linux says of the machine.
        cgroup: of this process (version 2), whose limit counts too, as that of a container.
    """
    free: list[int] = []
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free.append(int(lines["MemAvailable"].split()[0]) << 10)
    except (OSError, KeyError, ValueError):
        pass
    try:
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free.append(int(limit) - int(used) + int(statistics["inactive_file"]))  # files' pages are given up first
    except (OSError, KeyError, ValueError):
        pass
    return max(0, min(free)) if free else None


def rss_bytes(pid: int) -> int:
    """The resident memory of a process; where only that is known the most so far of this one, 0 of another."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # not Linux, or it has ended
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if pid == os.getpid() else 0


def room_for(needed_bytes: int, available: int | None) -> str | None:
    """Why there is no room for a process of that size; None if there is, or nothing is known."""
    if available is None or needed_bytes <= available:
        return None
    return f"{available >> 20} MB of memory are free, and one more worker takes about {needed_bytes >> 20} MB"
