"""File locks: a process cannot truncate or replace a file that another process is writing."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path


def hold(descriptor: int, *, beside_others: bool = False) -> None:
    """Lock an open regular file until it is closed or the process ends. Files of other types are not locked.

    Args:
        descriptor: file descriptor.
        beside_others: whether to take a shared lock instead of an exclusive lock.

    Raises:
        OSError: EBUSY if another process holds a conflicting lock.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if beside_others else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another run writes to this file") from None
    except OSError:
        return  # a file system without locks, such as some network shares


def check_free(path: Path) -> None:
    """Check that no other program has locked a file. A missing or unreadable file counts as free.

    Raises:
        OSError: EBUSY if the file is locked.
    """
    with suppress(FileNotFoundError, PermissionError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            hold(descriptor)
        finally:
            os.close(descriptor)
