"""Number of CPUs that this process may use, limited by its CPU affinity and its container's CPU quota.

`os.cpu_count` ignores the CPU quota of a container, such as that of `docker run --cpus 2`.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def usable_processors() -> int:
    """Return the number of CPUs that this process may use, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cgroup_quota(root: Path = _CGROUPS, own_group: Path = _OWN_GROUP) -> float | None:
    """Return the container's CPU quota as a number of CPUs, such as 1.5, or None if there is no quota.

    Args:
        root: mount point of the cgroup file system, version 1 or 2.
        own_group: file that lists the process's cgroups, see cgroups(7).
    """
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            folder, read = root / controllers, _quota_v1
            if not folder.is_dir():
                folder = root / "cpu"
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        # In a container without a cgroup namespace the path is the host's; its own group is mounted at `root`.
        quotas += [read(folder / group) for group in (relative, *relative.parents)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return quota / int((group / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
