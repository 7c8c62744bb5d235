"""Writes one image to a file. The file's suffix selects the format."""

from __future__ import annotations

import io
import os
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.sinks.base import SinkError
from saccade.sinks.os_errors import write_failure

_MOST_PIXELS = {
    "AVIF": 32_768,
    "BMP": 2**31 - 1,
    "GIF": 65_535,
    "JPEG": 65_500,
    "PNG": 2**31 - 1,
    "PPM": 2**31 - 1,
    "TGA": 65_535,
    "TIFF": 2**31 - 1,
    "WEBP": 16_383,
}
"""Maximum width and height in pixels, by image format."""


def check_still(path: str | os.PathLike[str], width: int, height: int) -> None:
    """Check in advance whether an image can be written to a path. Leaves no file behind.

    Raises:
        SinkError: if an image of this size in pixels cannot be written to this path.
    """
    file = Path(path)
    kind = _format_of(file)
    most = _MOST_PIXELS[kind]
    if max(width, height) > most:
        raise SinkError(
            f"cannot write {file}: the image is {width} x {height} pixels, and {kind} allows {most} pixels per side; "
            "use .png"
        )
    if file.is_dir():
        raise SinkError(f"cannot write {file}: it is a folder")
    if not file.parent.is_dir():
        raise SinkError(f"cannot write {file}: the folder {file.parent} does not exist")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise SinkError(f"cannot write {file}: permission denied")


def save_still(path: str | os.PathLike[str], image: NDArray[np.uint8]) -> None:
    """Write an image to a file. An existing file is replaced atomically.

    Args:
        path: path of the file; its suffix selects the format.
        image: (height, width, 3) uint8 RGB.

    Raises:
        SinkError: if the image cannot be written to this path.
    """
    check_still(path, image.shape[1], image.shape[0])
    data = io.BytesIO()
    Image.fromarray(image).save(data, _format_of(Path(path)))
    real = Path(os.path.realpath(path))
    beside = real.with_name(f".{real.name}.part")
    try:
        if real.exists() and not real.is_file():  # such as a pipe
            real.write_bytes(data.getbuffer())
            return
        try:
            beside.write_bytes(data.getbuffer())
            beside.replace(real)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise SinkError(f"cannot write {path}: {write_failure(path, error)}") from None


def jpeg(image: NDArray[np.uint8], quality: int) -> bytes:
    """Encode an image as JPEG. An image with too many pixels per side for JPEG is scaled down.

    Args:
        image: (height, width, 3) uint8 RGB.
        quality: JPEG quality from 1 to 100.
    """
    height, width = image.shape[:2]
    if (scale := _MOST_PIXELS["JPEG"] / max(width, height)) < 1:
        size = max(1, int(width * scale)), max(1, int(height * scale))
        image = np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)
    done, data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert done
    return data.tobytes()


def _format_of(path: Path) -> str:
    found = Image.registered_extensions().get(path.suffix.lower())
    if found not in _MOST_PIXELS:
        raise SinkError(f"cannot write {path}: its suffix is not a known image format; use .png or .jpg")
    return found
