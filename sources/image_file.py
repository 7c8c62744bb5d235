"""Decodes image files to upright RGB images. The format is detected from the content, not from the file name."""

from __future__ import annotations

import io
import mmap
import re
import warnings
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms

from saccade.sources.errors import SourceError
from saccade.sources.frame import RgbImage

MAX_PIXELS = 250_000_000
"""Maximum number of pixels of one image. The largest phone photos have 200 million pixels and take 2 GB to read."""

HEAD_BYTES = 4096
"""Number of bytes that `image_format` needs from the beginning of a file."""

# Pillow's own limit warns on the terminal from 89 million pixels on. Ours is checked before a pixel is decoded.
if Image.MAX_IMAGE_PIXELS is not None:
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, MAX_PIXELS)

# Pillow warns about damaged metadata on standard error, with its own path and line.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"8BPS", "PSD"),
    (b"qoif", "QOI"),
    (b"icns", "ICNS"),
)
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)  # sizes of the second header, since many text files begin with "BM"
_PNM = re.compile(rb"P([1-6]|[Ff])\s")
_SEVERAL = ("AVIF", "GIF", "PNG", "TIFF", "WEBP")
"""Formats whose images form a sequence. In other formats, further images are layers, thumbnails or gain maps."""
_TIFF_NO_PAGE = 0b101  # NewSubfileType: a smaller version of another page, or a mask
_ORIENTATION = 0x0112  # EXIF
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # the other codes are data and restarts within a scan


def image_format(head: bytes) -> str | None:
    """Return Pillow's name for the format of an image file, such as "PNG". Return None for unsupported formats.

    Args:
        head: the first `HEAD_BYTES` bytes of the file.
    """
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return "BMP"
    if _PNM.match(head):
        return "PPM"
    if head[:4] == b"\0\0\1\0" and head[4:6] != b"\0\0" and head[9:10] == b"\0":  # raw MPEG-4 video begins alike
        return "ICO"
    if head[4:8] == b"ftyp":  # HEIC is in the same container
        brands = head[8 : int.from_bytes(head[:4])]
        return "AVIF" if brands[:4] in (b"avif", b"avis") or b"avif" in brands[8:] else None
    return None


def may_hold_several(head: bytes) -> bool:
    """Return whether an image file may contain several images, such as an animation.

    Args:
        head: the first `HEAD_BYTES` bytes of the file.
    """
    found = image_format(head)
    if found == "PNG":  # animated ones say so before the image data
        return b"acTL" in head or b"IDAT" not in head
    if found == "WEBP":
        return head[12:16] == b"VP8X" and len(head) > 20 and bool(head[20] & 2)
    return found in _SEVERAL


class UnsupportedImageError(SourceError):
    """Raised if an image's header is damaged, or the installed Pillow does not support the format."""


class ImageFile:
    """An open image file. Its images are decoded one at a time.

    Args:
        file: the open file; it must stay open as long as this object is used.
        max_pixels: maximum number of pixels of one image.

    Attributes:
        format: name of the format in lower case, such as "jpeg".
        count: number of images: frames of an animation or pages of a TIFF.

    Raises:
        UnsupportedImageError: if Pillow cannot read the header; other programs may support the format.
        SourceError: if the file is not an image or too large. The message does not name the file.
    """

    def __init__(self, file: BinaryIO, max_pixels: int = MAX_PIXELS) -> None:
        file.seek(0)
        found = image_format(file.read(HEAD_BYTES))
        if found is None:
            raise SourceError("the content is damaged or not an image")
        self._max_pixels = max_pixels
        self.format = found.lower()
        try:
            self._image = _open(file, found)
            self._check_size()
            self._places = self._find_images()
        except SourceError:
            raise
        # Pillow's readers of damaged files raise nearly anything: OSError, SyntaxError, ValueError, struct.error, …
        except Exception as error:
            raise UnsupportedImageError(_damaged(found)) from error
        self.count = len(self._places)

    def images(self) -> Iterator[tuple[RgbImage, int | None]]:
        """Yield each image of the file with its display time.

        Yields:
            The image, (height, width, 3) uint8 RGB, upright, on a white background; and its display time in
                milliseconds, None if unknown.

        Raises:
            SourceError: if the next image is damaged or too large. The iteration cannot be continued.
        """
        for place in self._places:
            try:
                if place or self.count > 1:
                    self._image.seek(place)
                self._check_size()
                self._image.load()
                rgb = _to_rgb(_upright(self._image))
                shown_ms = self._image.info.get("duration") if self.format != "tiff" else None
                if self.count == 1:
                    self._image.close()  # 200 million pixels are 800 MB
            except SourceError:
                raise
            except Exception as error:
                raise SourceError(_damaged(self.format)) from error
            yield rgb, None if shown_ms is None else round(shown_ms)

    def _find_images(self) -> list[int]:
        image = self._image
        if self.format.upper() not in _SEVERAL:
            return [0]
        count = getattr(image, "n_frames", 1)
        if self.format == "tiff" and count > 1:
            pages = [0]
            for number in range(1, count):
                image.seek(number)
                if not image.tag_v2.get(254, 0) & _TIFF_NO_PAGE:  # type: ignore[attr-defined]
                    pages.append(number)
            image.seek(0)
            return pages
        # A PNG may contain a fallback image for programs without animation support. It is not part of the animation.
        first = 1 if count > 1 and getattr(image, "default_image", False) else 0
        return list(range(first, count))

    def _check_size(self) -> None:
        width, height = self._image.size
        if width * height > self._max_pixels:
            raise SourceError(
                f"the image has {width} x {height} = {_millions(width * height)} million pixels; the limit is "
                f"{_millions(self._max_pixels)} million: scale the image down"
            )


def read_image(data: bytes, max_pixels: int = MAX_PIXELS) -> RgbImage:
    """Decode the first image of an image file to (height, width, 3) uint8 RGB, upright.

    Args:
        data: content of the file.
        max_pixels: maximum number of pixels.

    Raises:
        SourceError: if the data is not an image, is damaged or is too large.
    """
    image, _ = next(ImageFile(io.BytesIO(data), max_pixels).images())
    return image


def is_motion_jpeg(file: BinaryIO) -> bool:
    """Return whether a JPEG file is Motion JPEG: a video of two or more JPEG images of the same size."""
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            size, end = _walk_jpeg(data, 0)
            begin = end
            while data[begin : begin + 1] in (b"\0", b"\xff") and data[begin : begin + 2] != b"\xff\xd8":
                begin += 1
            if size is None or data[begin : begin + 3] != b"\xff\xd8\xff":
                return False
            return _walk_jpeg(data, begin)[0] == size  # the second JPEG of a phone's photo, a gain map, is smaller
    except (OSError, ValueError, IndexError):
        return False


def _walk_jpeg(data: mmap.mmap, at: int) -> tuple[bytes | None, int]:
    """Read one JPEG image in a file that may contain several JPEG images.

    Args:
        data: the file.
        at: byte offset of the image.

    Returns:
        The height and width of the image as stored in the file, and the byte offset of its end. The first value is
        None if the image is truncated or has a Multi-Picture Format index (MPF).
    """
    size: bytes | None = None
    at += 2
    while found := _JPEG_MARKER.search(data, at):
        marker, at = data[found.start() + 1], found.end()
        if marker == 0xD9:
            return size, at
        body = at + 2
        if marker == 0xE2 and data[body : body + 4] == b"MPF\0":
            return None, len(data)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            size = data[body + 1 : body + 5]
        at += int.from_bytes(data[at:body])
    return (size if size and at >= len(data) - 1 else None), len(data)


def _open(file: BinaryIO, name: str) -> Image.Image:
    """Open an image file with Pillow, but without the size limit and the warnings of `Image.open`."""
    if name not in Image.OPEN:
        Image.init()
    if name not in Image.OPEN:
        raise UnsupportedImageError(
            f"the installed Pillow cannot read the image format {name}; convert the image to JPEG or PNG"
        )
    file.seek(0)
    factory, _ = Image.OPEN[name]
    return factory(file, "")


def _upright(image: Image.Image) -> Image.Image:
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata is no reason to refuse the image
        return image
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> RgbImage:
    mode = image.mode
    if mode.startswith("I") or mode == "F":  # convert() would clip all above 255 to white
        image = Image.fromarray(_grey(np.asarray(image), sixteen_bits=mode.startswith("I;16")))
    elif image.has_transparency_data:
        image = _on_white(image.convert("RGBA"))
    elif mode == "LAB":
        to_rgb = ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")
        image = ImageCms.applyTransform(image, to_rgb) or image
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _grey(values: np.ndarray, *, sixteen_bits: bool) -> np.ndarray:
    """Convert greyscale values of other dtypes to uint8.

    16-bit integers are divided by 256. Floats from 0 to 1 are multiplied by 255. Other values are scaled so that the
    minimum becomes 0 and the maximum 255.
    """
    if sixteen_bits or (values.dtype.kind in "iu" and values.min() >= 0 and values.max() < 2**16):
        return (values >> 8).astype(np.uint8)
    known = values.astype(np.float64)
    finite = np.isfinite(known)
    low, high = (float(known[finite].min()), float(known[finite].max())) if finite.any() else (0.0, 1.0)
    if values.dtype.kind == "f" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled = (known - low) * (255 / (high - low or 1))
    return np.nan_to_num(scaled, nan=0, posinf=255, neginf=0).round().astype(np.uint8)


def _on_white(image: Image.Image) -> Image.Image:
    """Blend a transparent image onto a white background."""
    alpha = image.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return image
    page = Image.new("RGB", image.size, "white")
    page.paste(image, mask=alpha)
    return page


def _damaged(name: str) -> str:
    return f"the image is damaged, or an unsupported kind of {name.upper()}"


def _millions(pixels: int) -> str:
    return f"{pixels / 1e6:.4g}" if pixels < 10_000_000 else f"{pixels / 1e6:.0f}"
