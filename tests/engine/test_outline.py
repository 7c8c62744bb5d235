"""Paths to polygons to masks and back, held to a slow implementation of its own: point by point, in float64."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.outline import coco_rle, draw, fill, parse_path, placed, trace, write_path
from saccade.engine.results import Outline

SQUARE = "M 0.000 0.000 L 1.000 0.000 L 1.000 1.000 L 0.000 1.000 Z"


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / max(1, (a | b).sum()))


def slowly_inside(polygons: list[list[tuple[float, float]]], x: float, y: float) -> bool:
    """Even-odd rule by a ray to the right of one point."""
    crossings = 0
    for corners in polygons:
        for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
            if (y0 > y) != (y1 > y) and x < x0 + (y - y0) * (x1 - x0) / (y1 - y0):
                crossings += 1
    return crossings % 2 == 1


def slowly_read(text: str) -> list[list[tuple[float, float]]]:
    """Polygons of canonical path data, curves in 64 pieces by de Casteljau's construction."""
    words, found, at, closed = text.split(), list[list[tuple[float, float]]](), (0.0, 0.0), False

    def pair() -> tuple[float, float]:
        return float(words.pop(0)), float(words.pop(0))

    def between(a: tuple[float, float], b: tuple[float, float], t: float) -> tuple[float, float]:
        return a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t

    while words:
        command = words.pop(0)
        if closed and command in "LC":  # another subpath from where the last one began
            found.append([found[-1][0]])
        closed = command == "Z"
        if command == "M":
            found.append([pair()])
        elif command == "L":
            found[-1].append(pair())
        elif command == "C":
            at, points = found[-1][-1], [pair(), pair(), pair()]
            for number in range(1, 65):
                line = [at, *points]
                while len(line) > 1:
                    line = [between(a, b, number / 64) for a, b in pairwise(line)]
                found[-1].append(line[0])
    return found


def random_path(dice: random.Random, curves: bool) -> str:
    """Subpaths as a model spells them: integers over 960."""

    def number() -> str:
        return f"{dice.randint(0, 960) / 960:.3f}"

    words = []
    for _ in range(dice.randint(1, 3)):
        words += ["M", number(), number()]
        for _ in range(dice.randint(2, 12)):
            curve = curves and dice.random() < 0.4
            words += ["C" if curve else "L", *(number() for _ in range(6 if curve else 2))]
        words.append("Z")
    return " ".join(words)


def test_masks_of_200_answers_are_those_of_the_slow_implementation() -> None:
    dice = random.Random(0)
    for _ in range(200):
        text, width, height = random_path(dice, curves=False), dice.randint(3, 40), dice.randint(3, 40)
        x1, y1 = dice.random() * 0.5, dice.random() * 0.5
        box = x1, y1, x1 + dice.random() * 0.5, y1 + dice.random() * 0.5
        mask = Outline("x", text, box, True).mask(width, height)
        polygons = [
            [(box[0] + x * (box[2] - box[0]), box[1] + y * (box[3] - box[1])) for x, y in corners]
            for corners in slowly_read(text)
        ]
        wanted = [
            [slowly_inside(polygons, (x + 0.5) / width, (y + 0.5) / height) for x in range(width)]
            for y in range(height)
        ]
        assert np.array_equal(mask, np.array(wanted)), text


def test_curves_are_flattened_to_the_tolerance() -> None:
    dice = random.Random(1)
    for _ in range(30):
        text = random_path(dice, curves=True)
        (polygons, good), exact = parse_path(text, 0.001), slowly_read(text)
        assert good
        for corners, finer in zip(polygons, [one for one in exact if len(one) > 2], strict=True):
            around = np.concatenate([corners, corners[:1]])
            for point in finer:  # its distance from the nearest side
                ways, from_start = np.diff(around, axis=0), np.array(point) - around[:-1]
                along = (from_start * ways).sum(1) / np.maximum((ways**2).sum(1), 1e-18)
                away = from_start - ways * along.clip(0, 1)[:, None]
                assert np.hypot(*away.T).min() < 0.0011


@pytest.mark.parametrize(
    "text",
    [
        "M.5,.3L1,.9.25,1z",
        "M 0.5 0.3 L 1 0.9 L 0.25 1 Z",
        "M.5.3L1 .9L.25 1Z",
        "m.5,.3l.5,.6l-.75.1z",
        "M 5e-1 3e-1 L 1,0.9 0.25,1",
    ],
)
def test_both_dialects_say_the_same(text: str) -> None:
    (corners,), good = parse_path(text)
    assert good
    np.testing.assert_allclose(corners, [(0.5, 0.3), (1, 0.9), (0.25, 1)], atol=1e-12)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", 0),
        ("0.5 0.5", 0),
        ("L 0.1 0.2", 0),
        (f"{SQUARE} 0.5 0.5", 1),
        (f"{SQUARE} Q 1 1 2 2", 1),
        (f"{SQUARE} M 0.5", 1),
        (f"{SQUARE} M", 1),
        (f"{SQUARE} M 0.2 0.2 L 0.4 0.2 L 0.4 0.4 L", 2),
        (f"{SQUARE} ?", 1),
    ],
)
def test_a_broken_path_keeps_what_was_good(text: str, kept: int) -> None:
    polygons, good = parse_path(text)
    assert (len(polygons), good) == (kept, text == "")


def test_holes_and_subpaths_behind_z() -> None:
    inner = " M 0.25 0.25 L 0.75 0.25 L 0.75 0.75 L 0.25 0.75 Z"
    mask = fill(parse_path(SQUARE + inner)[0], 8, 8)
    assert mask.sum() == 64 - 16
    polygons, good = parse_path("M 0.5 0.5 L 1 0.5 L 1 1 Z L 0 0.5 L 0 0 Z")
    assert good
    assert [corners[0].tolist() for corners in polygons] == [[0.5, 0.5], [0.5, 0.5]]


@given(st.text(alphabet="MLCZmlcz0123456789.,- e+QA\n\x00é", max_size=80) | st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_a_fuzzed_path_never_raises(text: str) -> None:
    polygons, _ = parse_path(text)
    outline = Outline("x", text, (0.1, 0.2, 0.9, 0.7), False, polygon=True)
    with np.errstate(all="ignore"):
        record = outline.to_record(9, 7)
    assert record["label"] == "x"
    assert all(len(corners) > 2 for corners in polygons)


@given(st.integers(0, 2**32 - 1), st.integers(20, 90), st.integers(20, 90))
@settings(max_examples=60, deadline=None)
def test_a_mask_comes_back_through_its_path(seed: int, height: int, width: int) -> None:
    dice = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    mask = np.zeros((height, width), bool)
    for _ in range(3):
        mask |= np.hypot((x - dice.uniform(0, width)) / dice.uniform(5, 20), (y - dice.uniform(0, height)) / 9) < 1
    mask &= dice.random((height, width)) < 0.98  # holes
    assert np.array_equal(fill(trace(mask), width, height), mask)
    path, box = write_path(trace(mask))
    polygons, good = parse_path(path)
    assert good
    assert not mask.any() or iou(fill(placed(polygons, box), width, height), mask) >= 0.98


@given(st.integers(0, 2**32 - 1), st.integers(20, 120), st.integers(20, 120))
@settings(max_examples=60, deadline=None)
def test_a_drawn_mask_comes_back_through_its_path(seed: int, height: int, width: int) -> None:
    dice = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    mask = np.zeros((height, width), bool)
    for _ in range(3):
        mask |= np.hypot((x - dice.uniform(0, width)) / dice.uniform(5, 30), (y - dice.uniform(0, height)) / 12) < 1
    mask &= dice.random(mask.shape) < 0.99  # holes
    wide = np.pad(mask, 2)
    grown = np.lib.stride_tricks.sliding_window_view(wide, (3, 3)).any((2, 3))
    closed = np.lib.stride_tricks.sliding_window_view(grown, (3, 3)).all((2, 3))
    path, box = draw(mask)
    polygons, good = parse_path(path)
    assert good
    assert not mask.any() or iou(fill(placed(polygons, box), width, height), closed) >= 0.98
    if mask.any():  # to the corners of pixels, or of a simplified ring
        rows, columns = closed.any(1).nonzero()[0], closed.any(0).nonzero()[0]
        edges = columns[0] / width, rows[0] / height, (columns[-1] + 1) / width, (rows[-1] + 1) / height
        assert box == pytest.approx(edges, abs=1.5 / min(height, width))


def slow_counts(text: str) -> list[int]:
    """What COCO's compressed run lengths stand for, after the format's own description."""
    counts, at = list[int](), 0
    while at < len(text):
        value, shift, more = 0, 0, True
        while more:
            code = ord(text[at]) - 48
            value |= (code & 31) << shift
            more, at, shift = bool(code & 32), at + 1, shift + 5
            if not more and code & 16:
                value |= -1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
    return counts


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@settings(max_examples=80, deadline=None)
def test_run_lengths_are_cocos(seed: int, height: int, width: int, share: float) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < share
    rle = coco_rle(mask)
    counts = slow_counts(str(rle["counts"]))
    assert (rle["size"], sum(counts)) == ([height, width], height * width)
    flat = [number % 2 == 1 for number, run in enumerate(counts) for _ in range(run)]
    assert np.array_equal(np.array(flat).reshape(width, height).T, mask)


def test_a_record_has_what_was_asked_for() -> None:
    outline = Outline("cat", SQUARE, (0.25, 0.5, 0.75, 1.0), True)
    record = dict(outline.to_record(4, 4))
    assert record["bbox"] == {"x_min": 0.25, "y_min": 0.5, "x_max": 0.75, "y_max": 1.0}
    assert (record["path"], record["complete"], record["refined"]) == (SQUARE, True, False)
    assert record["rle"] == {"size": [4, 4], "counts": "62222"} or slow_counts(str(record["rle"]["counts"])) == [
        6,
        2,
        2,
        2,
        4,
    ]  # type: ignore[index]
    assert "polygon" not in record
    wanted = [[[0.25, 0.5], [0.75, 0.5], [0.75, 1.0], [0.25, 1.0]]]
    assert Outline("cat", SQUARE, (0.25, 0.5, 0.75, 1.0), True, polygon=True).to_record(4, 4)["polygon"] == wanted
    assert math.isclose(outline.mask(8, 8).mean(), 0.25)
