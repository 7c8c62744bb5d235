"""Explains why a file cannot be written. For a missing permission, the message contains the command that grants it."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_failure(path: str | os.PathLike[str], error: Exception) -> str:
    """Return why a file cannot be written, in one line without the path, such as "No space left on device".

    If the folder belongs to another user, the line names the owner and a fix. Docker creates a missing mount folder as
    root, so a container that runs as another user cannot write there.

    Args:
        path: path of the file.
        error: an OSError, or FFmpeg's error, which also has `errno` and `strerror`.
    """
    reason = getattr(error, "strerror", None) or str(error)
    if reason == os.strerror(errno.ENOENT) and not (parent := Path(path).parent).is_dir():
        return f"the folder {parent} does not exist"
    if getattr(error, "errno", None) not in (errno.EACCES, errno.EPERM) or not hasattr(os, "getuid"):
        return reason
    folder = next((parent for parent in Path(path).absolute().parents if parent.is_dir()), None)
    if folder is None or os.access(folder, os.W_OK | os.X_OK):
        return reason
    user, group = os.getuid(), os.getgid()
    if folder.stat().st_uid == user:
        return f"{reason}: its folder is not writable; run `chmod u+wx {folder}`"
    owner = folder.stat().st_uid
    return (
        f"{reason}: {folder} belongs to uid {owner} and this process runs as uid {user}; run `sudo chown -R "
        f"{user}:{group}` on that folder, or run as its owner (docker run --user, SACCADE_UID with compose)"
    )
