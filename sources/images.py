"""Image files as sources: a photo, an animation, the pages of a document, or a folder of image files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

from saccade.sources.base import Source, SourceInfo
from saccade.sources.errors import SourceError
from saccade.sources.file import check_readable
from saccade.sources.frame import Frame, RgbImage
from saccade.sources.image_file import HEAD_BYTES, ImageFile, image_format, is_motion_jpeg, may_hold_several

IMAGE_SUFFIXES = frozenset({".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""Suffixes of files in a folder that count as damaged images if they cannot be read."""

_Decoded = tuple[RgbImage, int | None, float]
"""An image, its display time in milliseconds if known, and its decoding time in milliseconds."""

_TIME_BASE = Fraction(1)  # one image a second: a folder becomes a slide show
_ANIMATION_BASE = Fraction(1, 1000)
_SHORTEST_MS, _DEFAULT_MS = 20, 100  # a frame with a shorter time is shown for 100 ms, as browsers do


class ImageSource(Source):
    """An image file, or all image files of a folder, as a source of one image per second.

    A file with several images yields all of them: the frames of an animation, or the pages of a TIFF. For a single
    animation, the frame durations of the file replace the rate of one image per second.

    A folder is sorted naturally: `shot9.jpg` before `shot10.jpg`. `Frame.index` is an image's position in this order.
    Unreadable images of a folder are skipped and counted. Subfolders are not read. Images are rotated by their EXIF
    orientation.

    Args:
        path: path of the image file or folder.
        stream: name of the stream; the file name without suffix, or the folder's name, if None.
        vid_stride: yield every `vid_stride`-th image.
        start: skip images before this time, in seconds.
        end: stop before this time, in seconds.

    Raises:
        SourceError: if there is no readable image.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: str | None = None,
        vid_stride: int = 1,
        start: float | None = None,
        end: float | None = None,
    ) -> None:
        folder = Path(path)
        name = folder.resolve().name if folder.is_dir() else folder.stem
        super().__init__(stream if stream is not None else name, vid_stride)
        self._start = Fraction(start or 0).limit_denominator(1_000_000)
        self._end = None if end is None else Fraction(end).limit_denominator(1_000_000)
        if folder.is_dir():
            self._files = [(file, _count(file)) for file in _images_in(folder)]
        else:
            check_readable(folder)
            with _opened(folder) as opened:
                self._files = [(folder, opened.count)]
        total = sum(count for _, count in self._files)

        first, codec = self._first(folder)
        image, shown_ms, _ = first
        self._ready = first if total == 1 else None  # decoding a large photo twice takes seconds
        animated = len(self._files) == 1 and total > 1 and shown_ms is not None
        base = self._base = _ANIMATION_BASE if animated else _TIME_BASE
        frames: int | None = sum(1 for place in range(0, total, vid_stride) if animated or self._wanted(place))
        if frames == 0:
            raise SourceError(f"{folder}: no image is between start and end; the {total} images last one second each")
        self._info = SourceInfo(
            codec=codec,
            width=image.shape[1],
            height=image.shape[0],
            average_rate=Fraction(1000, _shown(shown_ms)) if animated else 1 / _TIME_BASE,
            frames=frames if not animated or (start is None and end is None) else None,
            time_base=base,
            duration_s=None if animated else float(total * _TIME_BASE),
            live=False,
            audio=False,
            url=str(folder),
        )

    def __iter__(self) -> Iterator[Frame]:
        self._corrupt = 0
        index = pts = dropped = 0
        for path, count in self._files:
            after = index + count
            if self._base == _TIME_BASE and not any(
                self._wanted(n) and n % self._stride == 0 for n in range(index, after)
            ):
                index = pts = after
                continue
            try:
                for image, shown_ms, decode_ms in self._images(path):
                    if self._closed.is_set() or (self._end is not None and pts * self._base >= self._end):
                        return
                    if self._wanted(pts * self._base) and index % self._stride == 0:
                        yield Frame(
                            image=image,
                            stream=self._name,
                            index=index,
                            pts=pts,
                            time_base=self._base,
                            captured_at=float(pts * self._base),
                            capture_clock="file",
                            decoded_at=time.monotonic(),
                            decode_ms=decode_ms,
                            dropped_before=dropped,
                        )
                        dropped = 0
                    index += 1
                    pts += 1 if self._base == _TIME_BASE else _shown(shown_ms)
            except SourceError:
                missing = sum(1 for n in range(index, after) if n % self._stride == 0)
                self._corrupt += missing
                dropped += missing
                index = pts = after

    def _images(self, path: Path) -> Iterator[_Decoded]:
        ready, self._ready = self._ready, None
        yield from _decoded(path) if ready is None else (ready,)

    def _wanted(self, seconds: Fraction | int) -> bool:
        return self._start <= seconds and (self._end is None or seconds < self._end)

    def _first(self, folder: Path) -> tuple[_Decoded, str]:
        """Return the first readable image of the folder, and the image format of this file."""
        place = tried = 0
        for path, count in self._files:
            if len(self._files) == 1 or any(self._wanted(n) for n in range(place, place + count, self._stride)):
                tried += 1
                try:
                    with _opened(path) as opened:
                        codec = opened.format
                    return next(_decoded(path)), codec
                except SourceError:
                    if len(self._files) == 1:
                        raise
            place += count
        if not tried:
            raise SourceError(f"{folder}: no image is between start and end; the {place} images last one second each")
        raise SourceError(f"{folder}: none of the {tried} images can be read")


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile]:
    """Open an image file, as a context manager. Error messages name the file."""
    check_readable(path)
    try:
        with path.open("rb") as file:
            yield ImageFile(file)
    except SourceError as error:
        raise type(error)(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None


def _decoded(path: Path) -> Iterator[_Decoded]:
    with _opened(path) as opened:
        begun = time.perf_counter()
        for image, shown_ms in opened.images():
            yield image, shown_ms, (time.perf_counter() - begun) * 1e3
            begun = time.perf_counter()


def is_image(path: Path) -> bool:
    """Return whether a file can be read and contains an image."""
    try:
        if not path.is_file():  # opening a pipe could block forever
            return False
        with path.open("rb") as file:
            found = image_format(file.read(HEAD_BYTES))
            return found is not None and not (found == "JPEG" and is_motion_jpeg(file))
    except OSError:
        return False


def _images_in(folder: Path) -> list[Path]:
    try:
        names = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise SourceError(f"{folder} cannot be read: {error.strerror}") from None
    found = [path for path in names if is_image(path) or (path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())]
    if not found:
        raise SourceError(f"{folder} contains no images")
    return sorted(found, key=_natural_key)


def _count(path: Path) -> int:
    """Return the number of images in a file. An unreadable file counts as one image."""
    try:
        with path.open("rb") as file:
            if not may_hold_several(file.read(HEAD_BYTES)):
                return 1
        with _opened(path) as opened:
            return opened.count
    except (OSError, SourceError):
        return 1


def _shown(shown_ms: int | None) -> int:
    return shown_ms if shown_ms is not None and shown_ms >= _SHORTEST_MS else _DEFAULT_MS


def _natural_key(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part.casefold()) for part in re.split(r"(\d+)", path.name)]
