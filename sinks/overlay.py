"""Draws results onto an image; every sink that shows images uses this.

Knows results only: no frames, sources or models.

Everything is drawn on a dark casing, so it reads on any background, and scales with the image, so a result looks the
same on a phone and on a wall. Text is rendered once per wording and cached, since a label rarely changes from frame to
frame: 5 boxes cost 0.8 ms on 640×360 and 2.0 ms on 1920×1080 (2.1 and 4.8 while every label is new), on one core.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from saccade.engine.results import Box, Result, Spot, Text

Rgb = tuple[int, int, int]
Rect = tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels

# Bright enough that dark text reads on each of them, and far enough apart to be distinguished.
PALETTE: tuple[Rgb, ...] = (
    (255, 107, 107),
    (255, 159, 69),
    (255, 210, 63),
    (195, 233, 75),
    (110, 220, 95),
    (46, 230, 166),
    (43, 217, 217),
    (77, 184, 255),
    (122, 155, 255),
    (165, 139, 255),
    (215, 123, 255),
    (255, 123, 213),
    (255, 92, 147),
    (224, 168, 120),
    (150, 200, 170),
    (201, 209, 224),
)
_SALT = b"243260"  # chosen so that the eleven commonest classes, from person to horse, differ in colour
_INK: Rgb = (16, 19, 26)
_PAPER: Rgb = (245, 247, 250)
_DIM: Rgb = (196, 203, 214)

_FONT_PX = 13.0  # at 360 lines; the sizes below too
_LINE_PX = 1.75
_CASING_PX = 0.7
_RADIUS_PX = 5.0
_DOT_PX = 4.5
_MARGIN_PX = 8.0
_GROWTH = 0.85  # sizes grow a little slower than the image: large images are viewed from closer
_OPACITY = 0.72  # opacity of the background of notes and answers
_TEXT_LINES = 5
_SHIFT = 4  # fractional bits of the coordinates given to OpenCV


def draw(image: NDArray[np.uint8], result: Result, latency_ms: float | None = None) -> NDArray[np.uint8]:
    """Return a copy of the image with boxes, points, texts and, if given, the latency drawn on it.

    Args:
        image: (height, width, 3) uint8 RGB; not changed.
        result: what to draw.
        latency_ms: shown in the top left corner, in milliseconds.

    Returns:
        A new (height, width, 3) uint8 RGB image.
    """
    canvas = image.copy(order="C")
    height, width = canvas.shape[:2]
    scale = max(0.6, (min(height, width) / 360) ** _GROWTH)
    # Small boxes after large ones, and all text after all lines: no label is crossed by a line.
    boxes = sorted(result.detections.boxes, key=lambda b: (b.x1 - b.x2) * (b.y2 - b.y1))
    for box in boxes:
        _draw_box(canvas, box.pixels(width, height), color_of(box.label), scale)
    spots = result.points.points
    for spot in spots:
        _draw_dot(canvas, spot.pixels(width, height), color_of(spot.label), scale)

    taken: list[Rect] = []
    margin = round(_MARGIN_PX * scale)
    if latency_ms is not None:
        wording = f"{latency_ms:.0f} ms" if latency_ms >= 9.5 else f"{latency_ms:.1f} ms"
        taken.append(_paste(canvas, _note(wording, _font_px(scale)), margin, margin))
    if result.texts:
        panel = _panel(result.texts, _font_px(scale), width - 2 * margin)
        taken.append(_paste(canvas, panel, margin, height - margin - panel.height))
    for box in boxes:
        _label_box(canvas, box, scale, taken)
    for spot in spots:
        _label_spot(canvas, spot, scale, taken)
    return canvas


@lru_cache(maxsize=1024)
def color_of(label: str) -> Rgb:
    """The colour of a class: the same in every image, run and program."""
    digest = hashlib.blake2b(label.casefold().encode(), digest_size=2, salt=_SALT).digest()
    return PALETTE[int.from_bytes(digest) % len(PALETTE)]


def _font_px(scale: float) -> int:
    return max(9, round(_FONT_PX * scale))


def _draw_box(canvas: NDArray[np.uint8], corners: tuple[float, float, float, float], color: Rgb, scale: float) -> None:
    height, width = canvas.shape[:2]
    line = max(1, round(_LINE_PX * scale))
    casing = max(1, round(_CASING_PX * scale))
    inset = line / 2  # the whole line of a box at the border stays inside the image
    x1, y1 = max(corners[0], inset), max(corners[1], inset)
    x2, y2 = min(corners[2], width - 1 - inset), min(corners[3], height - 1 - inset)
    if x2 <= x1 or y2 <= y1:
        return
    outline = _rounded(x1, y1, x2, y2, min(_RADIUS_PX * scale, (x2 - x1) / 4, (y2 - y1) / 4))
    cv2.polylines(canvas, [outline], True, _INK, line + 2 * casing, cv2.LINE_AA, _SHIFT)
    cv2.polylines(canvas, [outline], True, color, line, cv2.LINE_AA, _SHIFT)


def _rounded(x1: float, y1: float, x2: float, y2: float, radius: float) -> NDArray[np.int32]:
    """Outline of a box with round corners: (points, 1, 2) int32, with `_SHIFT` fractional bits."""
    angles = np.linspace(0, np.pi / 2, 6)
    quarter = radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    centres = (
        (x2 - radius, y2 - radius),
        (x1 + radius, y2 - radius),
        (x1 + radius, y1 + radius),
        (x2 - radius, y1 + radius),
    )
    corners = []
    for centre in centres:
        corners.append(quarter + centre)
        quarter = quarter @ turn.T
    outline: NDArray[np.int32] = np.round(np.concatenate(corners) * 2**_SHIFT).astype(np.int32)
    return outline.reshape(-1, 1, 2)


def _draw_dot(canvas: NDArray[np.uint8], at: tuple[float, float], color: Rgb, scale: float) -> None:
    centre = (round(at[0] * 2**_SHIFT), round(at[1] * 2**_SHIFT))
    for radius, fill in ((_DOT_PX + 2.5, _INK), (_DOT_PX + 1.5, _PAPER), (_DOT_PX, color)):
        cv2.circle(canvas, centre, round(radius * scale * 2**_SHIFT), fill, cv2.FILLED, cv2.LINE_AA, _SHIFT)


def _label_box(canvas: NDArray[np.uint8], box: Box, scale: float, taken: list[Rect]) -> None:
    height, width = canvas.shape[:2]
    label = _label(f"{box.label} {box.score:.0%}", color_of(box.label), _font_px(scale))
    x1, y1, x2, y2 = (round(v) for v in box.pixels(width, height))
    gap = round((_LINE_PX / 2 + _CASING_PX) * scale)
    left, right = x1 - gap, x2 + gap - label.width
    inside = gap + round(2 * scale)
    places = (
        (left, y1 - label.height - round(scale)),
        (right, y1 - label.height - round(scale)),
        (x1 + inside, y1 + inside),
        (x2 - inside - label.width, y1 + inside),
        (left, y2 + round(scale)),
        (x1 + inside, y2 - inside - label.height),
    )
    taken.append(_paste_best(canvas, label, places, taken))


def _label_spot(canvas: NDArray[np.uint8], spot: Spot, scale: float, taken: list[Rect]) -> None:
    height, width = canvas.shape[:2]
    label = _label(f"{spot.label} {spot.score:.0%}", color_of(spot.label), _font_px(scale))
    x, y = (round(v) for v in spot.pixels(width, height))
    away = round((_DOT_PX + 5) * scale)
    middle_x, middle_y = x - label.width // 2, y - label.height // 2
    places = (
        (x + away, middle_y),
        (x - away - label.width, middle_y),
        (middle_x, y - away - label.height),
        (middle_x, y + away),
    )
    taken.append(_paste_best(canvas, label, places, taken))


@dataclass(slots=True, frozen=True)
class _Bitmap:
    """A rendered label.

    Attributes:
        ink: (height, width, 3) uint16, colour × opacity × 255.
        clear: (height, width, 1) uint16, how much of the image shows through, 0 to 255.
    """

    ink: NDArray[np.uint16]
    clear: NDArray[np.uint16]

    @property
    def width(self) -> int:
        return int(self.ink.shape[1])

    @property
    def height(self) -> int:
        return int(self.ink.shape[0])


def _paste_best(
    canvas: NDArray[np.uint8], bitmap: _Bitmap, places: tuple[tuple[int, int], ...], taken: list[Rect]
) -> Rect:
    """Paste at the first of `places` that is inside the image and free; else where least is covered."""
    height, width = canvas.shape[:2]

    def covered(place: tuple[int, int]) -> int:
        x1, y1 = place
        x2, y2 = x1 + bitmap.width, y1 + bitmap.height
        outside: int = max(0, -x1) + max(0, -y1) + max(0, x2 - width) + max(0, y2 - height)
        overlap = sum(max(0, min(x2, t[2]) - max(x1, t[0])) * max(0, min(y2, t[3]) - max(y1, t[1])) for t in taken)
        return overlap + outside * bitmap.height

    return _paste(canvas, bitmap, *min(places, key=covered))


def _paste(canvas: NDArray[np.uint8], bitmap: _Bitmap, x: int, y: int) -> Rect:
    """Blend the bitmap in, moved inside the image; return where it lies."""
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


@lru_cache(maxsize=1024)
def _label(wording: str, color: Rgb, font_px: int) -> _Bitmap:
    """A class label: dark text on the colour of the class."""
    return _render(((wording, _INK),), color, 1.0, font_px)


@lru_cache(maxsize=256)
def _note(wording: str, font_px: int) -> _Bitmap:
    """A note: light text on a dark, half transparent background."""
    return _render(((wording, _PAPER),), _INK, _OPACITY, font_px)


@lru_cache(maxsize=16)
def _panel(texts: tuple[Text, ...], font_px: int, width: int) -> _Bitmap:
    """Answers, each below its question, wrapped to `width` pixels and cut after `_TEXT_LINES` lines."""
    room = width - 2 * round(font_px * 0.6)
    lines: list[tuple[str, Rgb]] = []
    for text in texts:
        lines += [(line, _DIM) for line in _wrap(text.prompt, font_px, room)]
        lines += [(line, _PAPER) for line in _wrap(text.text, font_px, room)]
    if len(lines) > _TEXT_LINES:
        wording, color = lines[_TEXT_LINES - 1]
        lines[_TEXT_LINES - 1 :] = [(wording + " …", color)]
    return _render(tuple(lines), _INK, _OPACITY, font_px)


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


def _render(lines: tuple[tuple[str, Rgb], ...], background: Rgb, opacity: float, font_px: int) -> _Bitmap:
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
    return _Bitmap(np.rint(ink * 255).astype(np.uint16), np.rint(clear * 255).astype(np.uint16))


def _rounded_plate(width: int, height: int, radius: float) -> NDArray[np.float32]:
    """How much of each pixel a plate with round corners covers: (height, width, 1) float32, 0 to 1.

    From the distance of the pixel to the edge; Pillow's own round corners have stairs.
    """
    x = np.abs(np.arange(width, dtype=np.float32) + 0.5 - width / 2) - (width / 2 - radius)
    y = np.abs(np.arange(height, dtype=np.float32) + 0.5 - height / 2) - (height / 2 - radius)
    outside = np.hypot(np.maximum(x, 0)[None, :], np.maximum(y, 0)[:, None]) - radius
    covered: NDArray[np.float32] = np.clip(0.5 - outside, 0, 1).astype(np.float32)
    return covered[..., None]
