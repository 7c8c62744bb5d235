"""Extracts JPEG images from a Motion JPEG stream over HTTP.

The headers between the images are ignored, because many cameras send wrong headers. The JPEG markers determine where
an image ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_TYPES = (
    "image/jpeg",
    "image/jpg",
    "video/x-motion-jpeg",
    "video/x-mjpeg",
    "video/mjpeg",
    "image/mjpeg",
    "image/x-mjpeg",
)
_ANY_TYPES = ("image/jpeg", "image/jpg", "", "text/plain", "application/octet-stream", "application/unknown")
_PART = re.compile(rb"\s*--[^\r\n]*\r?\n(?:[\w-]+:[^\r\n]*\r?\n)*?content-type:\s*image/jpe?g", re.IGNORECASE)
_HEAD_BYTES = 32 << 10  # FFmpeg's read size; FFmpeg cannot seek back further in a response without parts
_START = b"\xff\xd8\xff"
# Markers that may follow a scan; others are damaged data. D8 starts the next image, after one without an end marker.
_AFTER_SCAN = re.compile(rb"\xff[\xc4\xd8-\xde\xe0-\xef\xfe]")
_BOUNDARY = re.compile(rb"\r?\n--[^\r\n]*\r?\n")
_MAX_BYTES = 64 << 20  # of one image


class NoJpegError(Exception):
    """Raised if 64 MiB of a Motion JPEG stream contain no complete JPEG image."""


def is_mjpeg(content_type: str, peek: Callable[[int], bytes]) -> bool:
    """Return whether an HTTP response is a Motion JPEG stream.

    Args:
        content_type: media type of the response in lower case, without parameters; "" if it has none.
        peek: returns the first bytes of the response; the argument is their maximum number. Called only if the media
            type is ambiguous.
    """
    if content_type.startswith("multipart/") or content_type in _TYPES:
        return True
    return content_type in _ANY_TYPES and _PART.match(peek(_HEAD_BYTES)) is not None


class JpegSplitter:
    """Splits a Motion JPEG byte stream into images. Each image is yielded when its last byte arrives."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._begun_at: float | None = None  # when the image at the beginning of `_data` began to arrive
        self._at = 0  # offset up to which that image was parsed
        self._in_scan = False
        self._skipped = 0  # bytes since the last image

    def feed(self, data: bytes, now: float) -> Iterator[tuple[bytes, float]]:
        """Add received bytes. Yield each complete image and the time at which its first byte arrived.

        Args:
            data: the received bytes.
            now: current time in seconds.

        Raises:
            NoJpegError: if 64 MiB of data contain no complete JPEG.
        """
        self._data += data
        while self._find_start(now):
            end = self._find_end()
            if end is None:
                break
            if end:
                assert self._begun_at is not None
                image, begun_at = bytes(self._data[:end]), self._begun_at
                self._drop(end)
                self._skipped = 0
                yield image, begun_at
            else:  # the start marker was not a JPEG
                self._drop(2)
        if self._skipped + len(self._data) > _MAX_BYTES:
            raise NoJpegError

    def _find_start(self, now: float) -> bool:
        """Drop the bytes before the next JPEG image. Return False if there is no image yet."""
        if self._begun_at is not None:
            return True
        at = self._data.find(_START)
        self._drop(max(0, len(self._data) - len(_START) + 1) if at < 0 else at)
        if at < 0:
            return False
        self._begun_at, self._at, self._in_scan = now, 2, False
        return True

    def _find_end(self) -> int | None:
        """Return the end offset of the first JPEG image, None if it is incomplete, or 0 if it is not a JPEG image."""
        data = self._data
        while True:
            if self._in_scan:
                found = _AFTER_SCAN.search(data, self._at)
                if found is None:
                    self._at = max(self._at, len(data) - 1)
                    return None
                self._at = found.start()
                if data[self._at + 1] == 0xD8:
                    return self._end_before(self._at)
                self._in_scan = False
            if len(data) < self._at + 4 and data[self._at : self._at + 2] != b"\xff\xd9":
                return None
            marker = data[self._at + 1]
            if data[self._at] != 0xFF or marker in (0x00, 0xD8):
                return 0
            if marker == 0xD9:
                return self._at + 2
            if marker == 0xFF:
                self._at += 1  # fill bytes may stand before a marker
            elif marker == 0x01 or 0xD0 <= marker <= 0xD7:
                self._at += 2  # these have no length
            else:
                self._at += 2 + int.from_bytes(data[self._at + 2 : self._at + 4])
                self._in_scan = marker == 0xDA

    def _end_before(self, following: int) -> int:
        """Return where an image without end marker ends.

        Args:
            following: offset of the next image.
        """
        ends = [match.start() for match in _BOUNDARY.finditer(self._data, max(2, following - 4096), following)]
        return ends[-1] if ends else following

    def _drop(self, count: int) -> None:
        del self._data[:count]
        self._skipped += count
        self._begun_at = None
