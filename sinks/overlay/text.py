"""Renders labels, notes and answers as bitmaps, and blends the bitmaps into images. Bitmaps are cached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from saccade.engine.results import Text
from saccade.sinks.overlay.style import DIM, INK, PAPER, Rect, Rgb

_OPACITY = 0.72  # of the background of notes and answers
_TEXT_LINES = 5


@dataclass(slots=True, frozen=True)
class Bitmap:
    """A rendered text, ready to blend into an image.

    Attributes:
        ink: (height, width, 3) uint16, colour × opacity × 255.
        clear: (height, width, 1) uint16, transparency from 0 to 255.
    """

    ink: NDArray[np.uint16]
    clear: NDArray[np.uint16]

    @property
    def width(self) -> int:
        """Width of the rendered text in pixels."""
        return int(self.ink.shape[1])

    @property
    def height(self) -> int:
        """Height of the rendered text in pixels."""
        return int(self.ink.shape[0])


def paste_best(
    canvas: NDArray[np.uint8], bitmap: Bitmap, places: Sequence[tuple[int, int]], taken: Sequence[Rect]
) -> Rect:
    """Blend a text into the image, at the position that covers the least of `taken`. Return the text's rectangle.

    Args:
        canvas: image to change, (height, width, 3) uint8 RGB.
        bitmap: the rendered text.
        places: positions to try, as top left corners in pixels.
        taken: rectangles in pixels that the text should not cover.
    """
    place, _ = best_place(canvas, bitmap, places, taken)
    return paste(canvas, bitmap, *place)


def best_place(
    canvas: NDArray[np.uint8],
    bitmap: Bitmap,
    places: Sequence[tuple[int, int]],
    taken: Sequence[Rect],
    spared: Sequence[Rect] = (),
) -> tuple[tuple[int, int], float]:
    """Return the best position of a text, and its overlap with other drawings as a fraction of the text's area.

    The overlap with `taken`, or with the area outside the image, counts fully. The overlap with `spared` counts half.
    """
    height, width = canvas.shape[:2]
    corners = np.asarray(places, dtype=np.int64)
    size = np.array([bitmap.width, bitmap.height])
    begin, end = corners[:, None], corners[:, None] + size  # (places, 1, 2)
    outside = np.maximum(0, -begin) + np.maximum(0, end - np.array([width, height]))
    covered = outside.sum(axis=(1, 2)) * float(bitmap.height)
    for areas, weight in ((taken, 1.0), (spared, 0.5)):
        if areas:
            rects = np.asarray(areas, dtype=np.int64)
            shared = np.minimum(end, rects[:, 2:]) - np.maximum(begin, rects[:, :2])  # (places, areas, 2)
            covered += weight * shared.clip(0).prod(axis=2).sum(axis=1)
    best = int(covered.argmin())
    return places[best], float(covered[best]) / (bitmap.width * bitmap.height)


def paste(canvas: NDArray[np.uint8], bitmap: Bitmap, x: int, y: int) -> Rect:
    """Blend a rendered text into an image at (x, y), or shifted if part of it would lie outside the image.

    Return the rectangle of the text in pixels.
    """
    height, width = canvas.shape[:2]
    x = max(0, min(x, width - bitmap.width))
    y = max(0, min(y, height - bitmap.height))
    under = canvas[y : y + bitmap.height, x : x + bitmap.width]
    h, w = under.shape[:2]  # smaller than the bitmap only where the image itself is
    under[:] = (bitmap.ink[:h, :w] + under * bitmap.clear[:h, :w]) // 255
    return x, y, x + w, y + h


@lru_cache(maxsize=16)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)  # Aileron, inside Pillow: the same on every machine


@lru_cache(maxsize=256)  # 3.5 MB on 360 lines, 21 on 1080; a new one takes 0.3 and 0.7 ms
def label(wording: str, color: Rgb, font_px: int) -> Bitmap:
    """Render a class label: dark text on a background in the colour of the class."""
    return _render(((wording, INK),), color, 1.0, font_px)


@lru_cache(maxsize=64)
def note(wording: str, font_px: int) -> Bitmap:
    """Render light text on a dark, translucent background, for example for the latency."""
    return _render(((wording, PAPER),), INK, _OPACITY, font_px)


@lru_cache(maxsize=16)
def panel(texts: tuple[Text, ...], font_px: int, width: int) -> Bitmap:
    """Render the answers of the model, each after its question. Lines are wrapped at a width in pixels."""
    room = width - 2 * round(font_px * 0.6)
    lines: list[tuple[str, Rgb]] = []
    for text in texts:
        lines += [(line, DIM) for line in _wrap(text.prompt, font_px, room)]
        lines += [(line, PAPER) for line in _wrap(text.text, font_px, room)]
    if len(lines) > _TEXT_LINES:
        wording, color = lines[_TEXT_LINES - 1]
        lines[_TEXT_LINES - 1 :] = [(wording + " …", color)]
    return _render(tuple(lines), INK, _OPACITY, font_px)


def joined(first: Bitmap, second: Bitmap) -> Bitmap:
    """Join two rendered labels of the same height side by side."""
    return Bitmap(np.hstack([first.ink, second.ink]), np.hstack([first.clear, second.clear]))


def _wrap(wording: str, font_px: int, room: int) -> list[str]:
    font = _font(font_px)
    lines: list[str] = []
    for word in wording.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _render(lines: tuple[tuple[str, Rgb], ...], background: Rgb, opacity: float, font_px: int) -> Bitmap:
    font = _font(font_px)
    pad_x, pad_y = round(font_px * 0.45), max(1, round(font_px * 0.16))
    step = round(font_px * 1.25)
    width = 2 * pad_x + math.ceil(max((font.getlength(wording) for wording, _ in lines), default=0))
    height = 2 * pad_y + step * len(lines)

    plate = opacity * _rounded_plate(width, height, font_px * 0.28)
    ink, clear = plate * np.array(background, dtype=np.float32), 1 - plate
    for number, (wording, color) in enumerate(lines):
        mask = Image.new("L", (width, height))
        middle = pad_y + step * number + step / 2
        ImageDraw.Draw(mask).text((pad_x, middle), wording, fill=255, font=font, anchor="lm")
        text = np.asarray(mask, dtype=np.float32)[..., None] / 255
        ink = ink * (1 - text) + np.array(color, dtype=np.float32) * text
        clear = clear * (1 - text)
    return Bitmap(np.rint(ink * 255).astype(np.uint16), np.rint(clear * 255).astype(np.uint16))


def _rounded_plate(width: int, height: int, radius: float) -> NDArray[np.float32]:
    """Return an antialiased alpha mask of a rectangle with round corners: (height, width, 1) float32 from 0 to 1."""
    x = np.abs(np.arange(width, dtype=np.float32) + 0.5 - width / 2) - (width / 2 - radius)
    y = np.abs(np.arange(height, dtype=np.float32) + 0.5 - height / 2) - (height / 2 - radius)
    outside = np.hypot(np.maximum(x, 0)[None, :], np.maximum(y, 0)[:, None]) - radius
    covered: NDArray[np.float32] = np.clip(0.5 - outside, 0, 1).astype(np.float32)
    return covered[..., None]
