"""One writer a file: a file that is being written is locked, so that another run cannot empty or replace it.

Knows nothing of what is in a file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path


def hold(descriptor: int, *, beside_others: bool = False) -> None:
    """Lock an open file until it is closed; the death of the process closes it, too.

    Args:
        descriptor: of the file. What is no regular file, such as a device, can be held by any number.
        beside_others: others may hold it as well, if they do so beside others: they only append.

    Raises:
        OSError: if another writer holds it; EBUSY, with a reason for the user.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if beside_others else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another run is writing it") from None
    except OSError:
        return  # a file system without locks, such as some network shares


def check_free(path: Path) -> None:
    """Fail if a file is held; one that is not there, or cannot be read, is not.

    Raises:
        OSError: as `hold`.
    """
    with suppress(FileNotFoundError, PermissionError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            hold(descriptor)
        finally:
            os.close(descriptor)
