"""Measures the calibration of scores: the precision of the detections in each score bin.

    python -m training.reliability DATASET --svg reliability-windows.svg

Three inputs are compared: an image, a downscaled Full HD frame that contains the image, and this frame with one zoom
window, as in `saccade run --saccades`. The SVG file contains a reliability diagram with one curve per input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.engine import Detect, Engine, Window
from saccade.engine.errors import EngineError
from saccade.engine.results import Box
from training.data import PackError, open_image, read_images, read_labels

CLASSES = ("person", "car", "face")
BINS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WAYS = ("by itself", "glance", "glance and window")
_FRAME = 1920, 1080
_SHRUNK = 0.45, 0.62  # of an image's size in the pack: longest side 190 to 260 pixels
_SAME = 0.5  # IoU
_COLORS = ("#888", "#c55a11", "#1f77b4")

Rect = tuple[float, float, float, float]


@dataclass(slots=True)
class Counted:
    """Counts per score bin: detections, correct detections, and the sum of the scores."""

    answers: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(BINS) - 1, np.int64))
    right: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(BINS) - 1, np.int64))
    scores: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(BINS) - 1))

    def note(self, score: float, *, right: bool) -> None:
        """Count a detection in the bin of its score. `right` states whether the detection is correct."""
        at = min(len(BINS) - 2, max(0, int(np.searchsorted(BINS, score, side="right")) - 1))
        self.answers[at] += 1
        self.right[at] += right
        self.scores[at] += score

    @property
    def error(self) -> float:
        """Expected calibration error, from 0 to 1.

        The error is the mean difference between score and precision per score bin, weighted by the number of
        detections.
        """
        known = self.answers > 0
        apart = np.abs(self.right[known] - self.scores[known])
        return float(apart.sum() / max(1, self.answers.sum()))


def judge(found: Iterable[Box], sure: Sequence[Rect], maybe: Sequence[Rect]) -> list[tuple[float, bool]]:
    """Return the score of each detection, and whether the detection is correct. The highest score is first.

    Args:
        found: detections of the model.
        sure: labelled boxes.
        maybe: boxes with an uncertain label. Detections of these boxes are skipped.
    """
    left, judged = list(sure), []
    for one in sorted(found, key=lambda box: -box.score):
        box = (one.x1, one.y1, one.x2, one.y2)
        best = max(left, key=lambda other: _shared(box, other)[1], default=None)
        if best is not None and _shared(box, best)[1] >= _SAME:
            left.remove(best)
            judged.append((one.score, True))
        elif not any(_shared(box, other)[0] >= _SAME for other in maybe):
            judged.append((one.score, False))
    return judged


def _shared(a: Rect, b: Rect) -> tuple[float, float]:
    """Return the intersection of boxes `a` and `b` as a fraction of `a`'s area, and the IoU of both boxes."""
    inner = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    first, second = (a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1])
    return inner / max(1e-12, first), inner / max(1e-12, first + second - inner)


def measure(engine: Engine, folder: Path, limit: int | None, classes: Sequence[str] = CLASSES) -> dict[str, Counted]:
    """Count the detections in the validation images by score bin, for each of the three inputs.

    Raises:
        PackError: if the folder is not a dataset folder.
    """
    records = read_labels(folder, "val")[:limit]
    images = read_images(folder, records)
    counted = {way: Counted() for way in WAYS}
    dice = np.random.default_rng(0)
    size = engine.input_size(*_FRAME)
    for record in records:
        picture = open_image(images, str(record["id"]))
        tasks = [Detect(name, 40, BINS[0]) for name in classes if name not in record["unknown"]]
        scale = float(dice.uniform(*_SHRUNK))
        scale = min(scale, 0.9 * size[0] / picture.width, 0.9 * size[1] / picture.height)
        small = picture.resize((max(2, round(picture.width * scale)), max(2, round(picture.height * scale))))
        x, y = int(dice.integers(0, _FRAME[0] - small.width)), int(dice.integers(0, _FRAME[1] - small.height))
        frame = np.clip(dice.normal(110, 6, (_FRAME[1], _FRAME[0], 1)).repeat(3, 2), 0, 255).astype(np.uint8)
        frame[y : y + small.height, x : x + small.width] = np.asarray(small)
        window = Window(*_around((x, y, small.width, small.height), size, dice), *size)
        in_frame = x / _FRAME[0], y / _FRAME[1], small.width / _FRAME[0], small.height / _FRAME[1]
        asked: list[tuple[str, Any, list[Window], Rect]] = [
            ("by itself", np.asarray(picture), [], (0.0, 0.0, 1.0, 1.0)),
            ("glance", frame, [], in_frame),
            ("glance and window", frame, [window], in_frame),
        ]
        futures = [(way, engine.submit(image, tasks, windows=where), at) for way, image, where, at in asked]
        for way, future, at in futures:
            boxes = future.result().detections.boxes
            for task in tasks:
                sure, maybe = (
                    [_placed(box, at) for box in record[kind].get(task.label, [])] for kind in ("boxes", "maybe")
                )
                for score, right in judge((box for box in boxes if box.label == task.label), sure, maybe):
                    counted[way].note(score, right=right)
    return counted


def _around(shown: tuple[int, int, int, int], size: tuple[int, int], dice: np.random.Generator) -> tuple[int, int]:
    """Return a random position (x, y) in pixels of a zoom window that contains the rectangle `shown`."""
    begins = []
    for at, long, window, most in zip(shown[:2], shown[2:], size, _FRAME, strict=True):
        rim = min(0.05 * window, (window - long) / 2)
        low, high = max(0.0, at + long + rim - window), min(at - rim, most - window)
        begins.append(int(max(0.0, dice.uniform(min(low, high), max(low, high)))))
    return begins[0], begins[1]


def _placed(box: Sequence[float], at: Rect) -> Rect:
    """Convert a box from normalized coordinates of an image to those of the frame that contains the image at `at`."""
    x1, y1, x2, y2 = box[:4]
    return at[0] + x1 * at[2], at[1] + y1 * at[3], at[0] + x2 * at[2], at[1] + y2 * at[3]


def table_of(counted: dict[str, Counted]) -> str:
    """Return a text table of the precision and the number of detections in each score bin."""
    names = [f"–{high:g}" for high in BINS[1:]]
    lines = [f"{'score':<18}" + "".join(f"{name:>12}" for name in names) + f"{'error':>8}"]
    for way, one in counted.items():
        cells = [f"{r / n:.2f} ({n})" if n else "–" for r, n in zip(one.right, one.answers, strict=True)]
        lines.append(f"{way:<18}" + "".join(f"{cell:>12}" for cell in cells) + f"{one.error:>8.3f}")
    return "\n".join(lines)


def drawing_of(counted: dict[str, Counted]) -> str:
    """Return the reliability diagram (precision as a function of the score) as SVG."""

    def at(x: float, y: float) -> tuple[float, float]:
        return 50 + 300 * x, 320 - 300 * y

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="500" height="365" viewBox="0 0 500 365" '
        'font-family="sans-serif" font-size="12">',
        "<title>part of the answers of a score that are right</title>",
        '<rect width="500" height="365" fill="#fff"/>',
    ]
    for step in range(6):
        x, y = at(step / 5, step / 5)
        parts.append(
            f'<path d="M{x:.1f} 20V320M50 {y:.1f}H350" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="336" text-anchor="middle">{step / 5:.1f}</text>'
            f'<text x="44" y="{y + 4:.1f}" text-anchor="end">{step / 5:.1f}</text>'
        )
    parts.append('<path d="M50 320L350 20" stroke="#000" stroke-dasharray="4 4"/>')
    for number, (way, one) in enumerate(counted.items()):
        known = [i for i, n in enumerate(one.answers) if n >= 10]
        dots = [at(one.scores[i] / one.answers[i], one.right[i] / one.answers[i]) for i in known]
        color = _COLORS[number % len(_COLORS)]
        if dots:
            line = "L".join(f"{x:.1f} {y:.1f}" for x, y in dots)
            parts.append(f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in dots]
        parts.append(f'<text x="360" y="{40 + 18 * number}" fill="{color}">{way}</text>')
    parts.append('<text x="200" y="356" text-anchor="middle">score</text></svg>')
    return "\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of the calibration measurement, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m training.reliability", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="dataset folder")
    parser.add_argument("--limit", type=int, help="use only the first N images")
    parser.add_argument("--model", default="nano", help="name, folder or hub id (default: nano)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--svg", type=Path, help="SVG file for the reliability diagram")
    given = parser.parse_args(argv)
    try:
        with Engine.load(given.model, given.device) as engine:
            counted = measure(engine, given.data, given.limit)
    except (EngineError, PackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table_of(counted))
    if given.svg:
        given.svg.write_text(drawing_of(counted), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
