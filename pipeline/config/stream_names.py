"""Stream names. A valid name is safe in file names, MQTT topics, URLs and metric labels."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path

from saccade.pipeline.errors import StreamError

_LIMIT = 64


def check_name(name: str) -> str:
    """Check that a stream name is valid. Return the name unchanged.

    Raises:
        ValueError: if the name is invalid.
    """
    if not re.fullmatch(r"\w[\w.-]*", name) or len(name) > _LIMIT:
        shown = " ".join(name[:80].split()).encode(errors="backslashreplace").decode()
        raise ValueError(f"invalid stream name '{shown}': use up to {_LIMIT} letters, digits, '.', '_' and '-'")
    return name


def check_free(name: str, taken: Container[str]) -> None:
    """Check that the name of a new stream is valid and not in use.

    Raises:
        StreamError: if the name is invalid or in use.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise StreamError(str(error)) from None
    if name in taken:
        raise StreamError(f"a stream named '{name}' already exists")


def free_name(wanted: str, taken: Container[str]) -> str:
    """Return a valid stream name that is not in use, such as `door`, or `door-2` if `door` is in use."""
    name = re.sub(r"[^\w.-]+", "-", wanted).strip(".-")[:_LIMIT] or "stream"
    number = 1
    free = name
    while free in taken:
        number += 1
        ending = f"-{number}"
        free = name[: _LIMIT - len(ending)] + ending
    return free


def name_of(source: str) -> str:
    """Derive a stream name from a source, without opening the source. The name can be invalid or already in use."""
    from saccade.sources.urls import stream_name  # its package imports FFmpeg

    if source.startswith("webrtc:"):
        return "webrtc"
    if "://" in source:
        return stream_name(source)
    if source.isdecimal() and not Path(source).exists():
        return f"camera{source}"
    path = Path(source)
    return path.resolve().name if path.is_dir() else path.stem
