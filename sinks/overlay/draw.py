"""Draws an analysis result onto an image. All sinks that show images use this module."""

from __future__ import annotations

from collections.abc import Iterable

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.engine.results import Box, Outline, Result, Spot
from saccade.sinks.overlay.drawings import draw_extras
from saccade.sinks.overlay.scene import draw_scene, label_scene
from saccade.sinks.overlay.style import (
    CASING_PX,
    INK,
    LINE_PX,
    MARGIN_PX,
    PAPER,
    SHIFT,
    Rect,
    Rgb,
    color_of,
    font_px,
    scale_of,
)
from saccade.sinks.overlay.text import Bitmap, best_place, joined, label, note, panel, paste, paste_best

_RADIUS_PX = 5.0
_DOT_PX = 4.5
_FILL = 0.35  # of an outline's colour inside of it
_TOP = 0.3  # of an object's height
_SMALL = 4.5  # an object lower than this many labels is small
_SMALL_LINE = 24  # a line is not thicker than this part of a small object's height
_SMALL_FONT = 0.45, 0.75  # of the usual size of text, smallest and largest
_COVERED = 0.02  # of a label may lie on what it must not hide


def draw(image: NDArray[np.uint8], result: Result, latency_ms: float | None = None) -> NDArray[np.uint8]:
    """Return a copy of an image with an analysis result drawn on it.

    Args:
        image: (height, width, 3) uint8 RGB; not changed.
        result: the boxes, points, masks and texts to draw, and zones or other `extras`.
        latency_ms: latency in milliseconds, drawn in the top left corner; None draws no latency.

    Returns:
        A new (height, width, 3) uint8 RGB image.
    """
    canvas = image.copy(order="C")
    height, width = canvas.shape[:2]
    scale = scale_of(width, height)
    # Small boxes after large ones, and all text after all lines: no label is crossed by a line.
    boxes = sorted(result.detections.boxes, key=lambda b: (b.x1 - b.x2) * (b.y2 - b.y1))
    draw_scene(canvas, result, scale)
    small = [_is_small(box, height, scale) for box in boxes]
    for box, thin in zip(boxes, small, strict=True):
        share = 0.5 if box.predicted else 1.0
        if thin:
            share = min(share, max(1.0, (box.y2 - box.y1) * height / _SMALL_LINE) / (LINE_PX * scale))
        _draw_box(canvas, box.pixels(width, height), color_of(box.label), scale * share)
    draw_outlines(canvas, result.segments)
    spots = result.points.points
    for spot in spots:
        _draw_dot(canvas, spot.pixels(width, height), color_of(spot.label), scale)
    draw_extras(canvas, result, scale)

    taken: list[Rect] = []
    margin = round(MARGIN_PX * scale)
    if latency_ms is not None:
        wording = f"{latency_ms:.0f} ms" if latency_ms >= 9.5 else f"{latency_ms:.1f} ms"
        taken.append(paste(canvas, note(wording, font_px(scale)), margin, margin))
    if result.texts:
        answers = panel(result.texts, font_px(scale), width - 2 * margin)
        taken.append(paste(canvas, answers, margin, height - margin - answers.height))
    spared = [_to_spare(box, width, height, whole=whole) for box, whole in zip(boxes, small, strict=True)]
    for box, short in zip(boxes, small, strict=True):
        _label_box(canvas, box, scale, taken, spared, small=short)
    for spot in spots:
        _label_spot(canvas, spot, scale, taken)
    for outline in result.segments:
        bitmap = label(outline.label, color_of(outline.label), font_px(scale))
        x, y = outline.box[0] * width, outline.box[1] * height - bitmap.height
        taken.append(paste(canvas, bitmap, round(x), max(0, round(y))))
    label_scene(canvas, result, scale, taken)
    return canvas


def _draw_box(canvas: NDArray[np.uint8], corners: tuple[float, float, float, float], color: Rgb, scale: float) -> None:
    height, width = canvas.shape[:2]
    line = max(1, round(LINE_PX * scale))
    casing = max(1, round(CASING_PX * scale))
    inset = line / 2  # the whole line of a box at the border stays inside the image
    x1, y1 = max(corners[0], inset), max(corners[1], inset)
    x2, y2 = min(corners[2], width - 1 - inset), min(corners[3], height - 1 - inset)
    if x2 <= x1 or y2 <= y1:
        return
    outline = _rounded(x1, y1, x2, y2, min(_RADIUS_PX * scale, (x2 - x1) / 4, (y2 - y1) / 4))
    cv2.polylines(canvas, [outline], True, INK, line + 2 * casing, cv2.LINE_AA, SHIFT)
    cv2.polylines(canvas, [outline], True, color, line, cv2.LINE_AA, SHIFT)


def _rounded(x1: float, y1: float, x2: float, y2: float, radius: float) -> NDArray[np.int32]:
    """Return a rectangle with round corners as a polygon: (points, 1, 2) int32, in pixels times 2 ** `SHIFT`."""
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
    outline: NDArray[np.int32] = np.round(np.concatenate(corners) * 2**SHIFT).astype(np.int32)
    return outline.reshape(-1, 1, 2)


def draw_outlines(canvas: NDArray[np.uint8], outlines: Iterable[Outline]) -> None:
    """Draw the segmentation masks of objects into an image, (height, width, 3) uint8 RGB. Draw no labels."""
    scale = scale_of(canvas.shape[1], canvas.shape[0])
    for outline in outlines:
        _draw_outline(canvas, outline, color_of(outline.label), scale)


def _draw_outline(canvas: NDArray[np.uint8], outline: Outline, color: Rgb, scale: float) -> None:
    """Draw an object's segmentation mask: its translucent area and its contour."""
    height, width = canvas.shape[:2]
    size = np.array([width, height], np.float64)
    pieces = [
        np.round((corners.clip(-1, 2) * size) * 2**SHIFT).astype(np.int32).reshape(-1, 1, 2)
        for corners in outline.polygons()
    ]
    if not pieces:
        return
    points = np.concatenate(pieces).reshape(-1, 2) >> SHIFT
    (x1, y1), (x2, y2) = points.min(0).clip(0), points.max(0) + 2
    part = canvas[y1:y2, x1:x2]
    if part.size:
        filled = part.copy()
        offset = np.array([x1, y1], np.int32) << SHIFT
        cv2.fillPoly(filled, [piece - offset for piece in pieces], color, cv2.LINE_AA, SHIFT)
        cv2.addWeighted(filled, _FILL, part, 1 - _FILL, 0, part)
        canvas[y1:y2, x1:x2] = part
    line = max(1, round(LINE_PX * scale))
    cv2.polylines(canvas, pieces, True, INK, line + 2 * max(1, round(CASING_PX * scale)), cv2.LINE_AA, SHIFT)
    cv2.polylines(canvas, pieces, True, color, line, cv2.LINE_AA, SHIFT)


def _draw_dot(canvas: NDArray[np.uint8], at: tuple[float, float], color: Rgb, scale: float) -> None:
    centre = (round(at[0] * 2**SHIFT), round(at[1] * 2**SHIFT))
    for radius, fill in ((_DOT_PX + 2.5, INK), (_DOT_PX + 1.5, PAPER), (_DOT_PX, color)):
        cv2.circle(canvas, centre, round(radius * scale * 2**SHIFT), fill, cv2.FILLED, cv2.LINE_AA, SHIFT)


def _is_small(box: Box, height: int, scale: float) -> bool:
    """Return whether an object is so small that a label of normal size would cover it or its neighbours."""
    return (box.y2 - box.y1) * height < _SMALL * label("", INK, font_px(scale)).height


def _to_spare(box: Box, width: int, height: int, *, whole: bool) -> Rect:
    """Return the area of an object that labels should not cover, in pixels: the whole box, or only its top."""
    x1, y1, x2, y2 = (round(v) for v in box.pixels(width, height))
    return x1, y1, x2, y2 if whole else y1 + round(_TOP * (y2 - y1))


def _label_box(
    canvas: NDArray[np.uint8], box: Box, scale: float, taken: list[Rect], spared: list[Rect], *, small: bool
) -> None:
    """Draw the longest label of an object that does not overlap other labels. A small object can stay unlabeled."""
    height, width = canvas.shape[:2]
    x1, y1, x2, y2 = (round(v) for v in box.pixels(width, height))
    gap = round((LINE_PX / 2 + CASING_PX) * scale)
    inside = gap + round(2 * scale)
    if small:
        share = (y2 - y1) / (3 * label("", INK, font_px(scale)).height)
        chips = _short_labels(box, min(max(share, _SMALL_FONT[0]), _SMALL_FONT[1]) * scale)
    else:
        chips = [box_label(box, scale), *_short_labels(box, scale)]
    for number, chip in enumerate(chips):
        left, right = x1 - gap, x2 + gap - chip.width
        places = (
            (left, y1 - chip.height - round(scale)),
            (right, y1 - chip.height - round(scale)),
            (left, y2 + round(scale)),
            (x2 + gap, y1),
            (x1 - gap - chip.width, y1),
            (x1 + inside, y2 - inside - chip.height),
            (x1 + inside, y1 + inside),
            (x2 - inside - chip.width, y1 + inside),
        )
        place, covered = best_place(canvas, chip, places, taken, spared)
        if covered <= _COVERED or (number == len(chips) - 1 and not small):
            taken.append(paste(canvas, chip, *place))
            return


def box_label(box: Box, scale: float) -> Bitmap:
    """Return the full label of a box: track ID (if any), class and score."""
    wording = box.label if box.predicted else f"{box.label} {box.score:.0%}"
    chip = label(wording, color_of(box.label), font_px(scale))
    if box.track_id is None:
        return chip
    return joined(label(str(box.track_id), PAPER, font_px(scale)), chip)


def _short_labels(box: Box, scale: float) -> list[Bitmap]:
    """Return shorter labels of a box, longest first: without score, then only the track ID of a tracked object."""
    chip = label(box.label, color_of(box.label), font_px(scale))
    if box.track_id is None:
        return [chip]
    number = str(box.track_id)
    alone = label(number, color_of(box.label), font_px(scale))
    return [joined(label(number, PAPER, font_px(scale)), chip), alone]


def _label_spot(canvas: NDArray[np.uint8], spot: Spot, scale: float, taken: list[Rect]) -> None:
    height, width = canvas.shape[:2]
    chip = label(f"{spot.label} {spot.score:.0%}", color_of(spot.label), font_px(scale))
    x, y = (round(v) for v in spot.pixels(width, height))
    away = round((_DOT_PX + 5) * scale)
    middle_x, middle_y = x - chip.width // 2, y - chip.height // 2
    places = (
        (x + away, middle_y),
        (x - away - chip.width, middle_y),
        (middle_x, y - away - chip.height),
        (middle_x, y + away),
    )
    taken.append(paste_best(canvas, chip, places, taken))
