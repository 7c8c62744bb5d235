"""Explains why a file cannot be written. For a missing permission, the message contains the command that grants it."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_failure(path: str | os.PathLike[str], error: Exception) -> str:
    """Return why a file cannot be written, as one line without the path, such as "No space left on device".

    If a permission is missing, the line also suggests a command that grants it.

    Args:
        path: path of the file.
        error: an OSError or an FFmpeg error.
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
    owner = folder.stat().st_uid  # often root, because Docker creates a missing mount folder as root
    return (
        f"{reason}: {folder} belongs to uid {owner} and this process runs as uid {user}; run `sudo chown -R "
        f"{user}:{group}` on that folder, or run as its owner (docker run --user, SACCADE_UID with compose)"
    )
