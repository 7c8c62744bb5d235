"""Finds the right source for what a user typed. Knows nothing of models, results or sinks."""

from __future__ import annotations

import os
from pathlib import Path

from sources.base import Source, SourceError
from sources.file import FileSource
from sources.pictures import PICTURE_SUFFIXES, PictureSource


def open_source(
    target: str | os.PathLike[str],
    *,
    stream: str | None = None,
    vid_stride: int = 1,
    start: float | None = None,
    end: float | None = None,
) -> Source:
    """Open a video file, a picture or a folder of pictures.

    Args:
        target: what the user typed.
        stream: name of the stream; made from `target` if None.
        vid_stride: hand on every `vid_stride`-th frame.
        start: skip frames before this time, in seconds from the beginning.
        end: stop before this time, in seconds from the beginning.

    Raises:
        SourceError: if `target` cannot be used, in one line for the user.
    """
    text = os.fspath(target)
    scheme, separator, _ = text.partition("://")
    if separator:  # only the scheme is repeated, since the rest may hold a password
        raise SourceError(f"{scheme}:// sources are not supported yet; give a video file, a picture or a folder")
    path = Path(text)
    if text.isdecimal() and not path.exists():
        raise SourceError(f"camera {text}: cameras are not supported yet; give a video file, a picture or a folder")
    still = path.is_dir() or path.suffix.lower() in PICTURE_SUFFIXES
    kind = PictureSource if still else FileSource
    return kind(path, stream=stream, vid_stride=vid_stride, start=start, end=end)
