"""What a stream is called whose configuration gives it no name, without opening its source."""

from __future__ import annotations

from pathlib import Path

from saccade.sources.urls import stream_name


def name_of(source: str) -> str:
    """A name like the one that the source gives itself; not yet one that can be used, nor one that is free."""
    if "://" in source or source.startswith("webrtc:"):
        return stream_name(source)
    if source.isdecimal() and not Path(source).exists():
        return f"camera{source}"
    path = Path(source)
    return path.resolve().name if path.is_dir() else path.stem
