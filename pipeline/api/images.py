"""Decodes the images in HTTP requests to RGB. Size limits are checked before decoding."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps

from saccade.sources.errors import SourceError
from saccade.sources.frame import RgbImage
from saccade.sources.image_file import read_image as read_first

MAX_PIXELS = 50_000_000
MAX_IMAGES = 20
_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[^;,]*)*(?P<base64>;base64)?,")
_SHEET_PX = 1536  # longer side of a contact sheet


def decode_image(url: str) -> RgbImage:
    """Decode an image in a base64 data URL to (height, width, 3) uint8 RGB. The EXIF orientation is applied.

    Raises:
        ValueError: if the text is not a data URL, or the image is corrupt, too large or in an unknown format.
    """
    found = _DATA_URL.match(url)
    if found is None:
        raise ValueError("an image must be a data URL, data:image/jpeg;base64,…; other URLs are not fetched")
    if not found["base64"]:
        raise ValueError("the data URL of an image must be base64-encoded")
    try:
        data = base64.b64decode(url[found.end() :], validate=False)
    except (binascii.Error, ValueError):
        raise ValueError("the data URL of an image is not valid base64") from None
    return read_image(data)


def read_image(data: bytes) -> RgbImage:
    """Decode the bytes of an image file to (height, width, 3) uint8 RGB. The EXIF orientation is applied.

    Raises:
        ValueError: if the image is corrupt, too large or in an unknown format.
    """
    try:
        return read_first(data, MAX_PIXELS)
    except SourceError as error:
        raise ValueError(str(error)) from None


def contact_sheet(images: Sequence[RgbImage]) -> RgbImage:
    """Combine images into one image, as a grid with cells of equal size. A single image is returned unchanged."""
    if len(images) == 1:
        return images[0]
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    cell = _SHEET_PX // columns
    sheet = Image.new("RGB", (columns * cell, rows * cell))
    for number, pixels in enumerate(images):
        image = ImageOps.contain(Image.fromarray(pixels), (cell, cell))
        x, y = number % columns * cell, number // columns * cell
        sheet.paste(image, (x + (cell - image.width) // 2, y + (cell - image.height) // 2))
    return np.asarray(sheet)
