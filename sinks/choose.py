"""Finds the right sink for what a user typed. Knows no source, model or pipeline."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

from sinks.base import Sink, SinkError
from sinks.display import DisplaySink
from sinks.jsonl import JsonlSink
from sinks.mp4 import Mp4Sink

_MP4_SUFFIXES = (".mp4", ".m4v")
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


def open_sink(
    target: str | os.PathLike[str],
    *,
    rate: Fraction | None = None,
    audio_from: str | os.PathLike[str] | None = None,
) -> Sink:
    """Open the sink that `target` asks for.

    Args:
        target: a path ending in .mp4 (video with overlay) or .jsonl (records), "-" (records on standard output) or
            "display" (a window).
        rate: frames per second of the source; a hint for videos.
        audio_from: file whose sound a video takes over; it is never overwritten.

    Raises:
        SinkError: if there is no such sink or it cannot be opened, in one line for the user.
    """
    text = os.fspath(target)
    scheme, separator, _ = text.partition("://")
    if separator:  # only the scheme is repeated, since the rest may hold a password
        raise SinkError(f"{scheme}:// sinks are not supported yet; write to a .mp4 or .jsonl file")
    suffix = Path(text).suffix.lower()
    if text == "display":
        return DisplaySink()
    if text == "-" or suffix in _JSONL_SUFFIXES:
        return JsonlSink(text)
    if suffix in _MP4_SUFFIXES:
        return Mp4Sink(text, rate=rate, audio_from=audio_from)
    raise SinkError(f"cannot tell what to write to {text}: end it in .mp4 or .jsonl, or use '-' or 'display'")
