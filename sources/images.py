"""Frames from still images: one photograph, or a folder of them in natural order.

Knows nothing of models, results or sinks.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from saccade.sources.base import Source, SourceInfo
from saccade.sources.errors import SourceError
from saccade.sources.file import check_readable
from saccade.sources.frame import Frame, RgbImage

IMAGE_SUFFIXES = frozenset({".avif", ".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})

_TIME_BASE = Fraction(1)  # one image a second: a folder becomes a slide show that one can follow


class ImageSource(Source):
    """A image, or all images directly inside a folder, as a source of one frame a second.

    Names are sorted as people count: `shot9.jpg` before `shot10.jpg`. `pts` and `index` are the place in that order.
    The EXIF orientation is honoured. Images of a folder that cannot be read are skipped and counted. Codec and size
    in `info` are those of the first.

    Args:
        path: image file or folder.
        stream: name of the stream; the name of the file, without suffix, or of the folder if None.
        vid_stride: hand on every `vid_stride`-th image.
        start: skip images before this time in seconds, which here is a place in the order.
        end: stop before this time in seconds.

    Raises:
        SourceError: if there is no image that can be read.
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
        if folder.is_dir():
            every = _images_in(folder)
        else:
            check_readable(folder)
            every = [folder]
        wanted = [i for i in range(0, len(every), vid_stride) if (start or 0) <= i and (end is None or i < end)]
        if not wanted:
            raise SourceError(f"{folder}: none of its {len(every)} images is between start and end")
        self._images = [(i, every[i]) for i in wanted]

        for _, first in self._images:
            try:
                image, codec = _read(first)
                break
            except SourceError:
                if len(self._images) == 1:
                    raise
        else:
            raise SourceError(f"{folder}: none of its {len(self._images)} images can be read")
        self._info = SourceInfo(
            codec=codec,
            width=image.shape[1],
            height=image.shape[0],
            average_rate=1 / _TIME_BASE,
            frames=len(self._images),
            time_base=_TIME_BASE,
            duration_s=float(len(every) * _TIME_BASE),
            live=False,
            audio=False,
            url=str(folder),
        )

    def __iter__(self) -> Iterator[Frame]:
        """Yield the images in natural order."""
        self._corrupt = 0
        dropped = 0
        for index, path in self._images:
            if self._closed.is_set():
                return
            begun = time.perf_counter()
            try:
                image, _ = _read(path)
            except SourceError:
                self._corrupt += 1
                dropped += 1
                continue
            yield Frame(
                image=image,
                stream=self._name,
                index=index,
                pts=index,
                time_base=_TIME_BASE,
                captured_at=float(index * _TIME_BASE),
                capture_clock="file",
                decoded_at=time.monotonic(),
                decode_ms=(time.perf_counter() - begun) * 1e3,
                dropped_before=dropped,
            )
            dropped = 0


def _images_in(folder: Path) -> list[Path]:
    try:
        found = [p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES and _is_image_file(p)]
    except OSError as error:
        raise SourceError(f"{folder} cannot be read: {error.strerror}") from None
    if not found:
        raise SourceError(f"{folder} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return sorted(found, key=_natural_key)


def _is_image_file(path: Path) -> bool:
    return not path.name.startswith(".") and path.is_file()  # opening a pipe could block for ever


def _natural_key(path: Path) -> list[tuple[int, str]]:
    """Digits as numbers, everything else as text."""
    return [(int(part), "") if part.isdecimal() else (-1, part.casefold()) for part in re.split(r"(\d+)", path.name)]


def _read(path: Path) -> tuple[RgbImage, str]:
    """Return the upright image, (height, width, 3) uint8 RGB, and its file format in lower case."""
    check_readable(path)
    try:
        with Image.open(path) as opened:
            codec = (opened.format or "?").lower()
            upright = ImageOps.exif_transpose(opened)
            if upright.mode.startswith("I"):  # 16 bits of grey; convert() alone would clip all above 255 to white
                grey = np.asarray(upright, dtype=np.uint32) >> 8
                upright = Image.fromarray(grey.astype(np.uint8))
            return np.array(upright.convert("RGB")), codec
    # Pillow's readers of damaged files raise nearly anything: OSError, SyntaxError, ValueError, struct.error, …
    except Exception as error:
        raise SourceError(f"{path} cannot be read as an image: it is damaged or no image at all") from error
