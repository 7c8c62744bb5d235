"""Selects the video stream of a media container, for files, live addresses and clips."""

from __future__ import annotations

import re

from av.container import InputContainer
from av.stream import Discard, Disposition
from av.video.stream import VideoStream

from saccade.sources.errors import SourceError

_COVERS = Disposition.attached_pic | Disposition.timed_thumbnails
_IMPAIRED = Disposition.hearing_impaired | Disposition.visual_impaired
_IMAGE_CODECS = frozenset({"bmp", "gif", "jpeg2000", "jpegls", "mjpeg", "png", "tiff", "webp"})
_TAG_TIME = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")  # how Matroska writes the duration of one track


class NoVideoError(SourceError):
    """Raised if a container has no video that can be decoded."""


def choose_video(container: InputContainer) -> VideoStream:
    """Select the video stream that a player would show, and discard all other streams.

    Streams are compared by these criteria, in this order:

    1. several frames
    2. not for visually or hearing impaired people
    3. flagged as default
    4. number of pixels
    5. bit rate

    Cover art, timed thumbnails and tiles do not count as video.

    Raises:
        NoVideoError: if there is no video stream, or no decoder for it.
    """
    shown = [stream for stream in container.streams.video if not stream.disposition & _COVERS]
    if container.format.name == "tty":  # FFmpeg would render any text
        raise NoVideoError("the content is text, not video")
    if not shown:
        held = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise NoVideoError(f"no video stream found; the content is {held}")
    whole = [stream for stream in shown if not stream.disposition & Disposition.dependent]
    tiles = len(shown) - len(whole)
    if tiles > 1 and (not whole or container.duration is None):  # what else a photo holds is its thumbnail
        raise NoVideoError(
            f"images of several tiles are not supported ({tiles} tiles found); convert the image to JPEG first"
        )
    usable = [stream for stream in whole or shown if stream.codec_context is not None]
    if not usable:
        raise NoVideoError("no installed decoder supports the video; convert it to H.264 first")
    chosen = max(usable, key=_rank)  # max returns the first of equals
    for stream in container.streams:
        stream.discard = Discard.default if stream is chosen else Discard.all
    return chosen


def _rank(stream: VideoStream) -> tuple[int, bool, bool, int, int]:
    flags = stream.disposition
    return (
        _movement(stream),
        not flags & _IMPAIRED,
        bool(flags & Disposition.default),
        stream.codec_context.width * stream.codec_context.height,
        stream.codec_context.bit_rate or 0,
    )


def _movement(stream: VideoStream) -> int:
    """Rank a stream: 0 for one frame (often cover art), 1 for an image codec and unknown length, 2 otherwise."""
    count = float(stream.frames)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    tag = _TAG_TIME.match(stream.metadata.get("DURATION", ""))
    if not count and tag and rate:
        count = (int(tag[1]) * 3600 + int(tag[2]) * 60 + float(tag[3])) * rate
    if 0 < count < 1.5 or stream.disposition & Disposition.still_image:
        return 0
    return 1 if not count and stream.codec_context.name in _IMAGE_CODECS else 2
