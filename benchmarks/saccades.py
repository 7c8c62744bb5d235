"""`python -m benchmarks saccades`: measures how many distant persons are detected with zoom windows.

A zoom window is a crop of the frame at full resolution. The input is a clip or the synthetic scene of `far_scene`. The
ground truth of a clip is a JSON file with normalized boxes by frame number:
{"frames": {"0": [[x1, y1, x2, y2, …], …], …}}.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from benchmarks.far_scene import PLACES, FarScene, Image, Rect, random_places, read_clip
from saccade.engine import Detect, Engine, Window
from saccade.pipeline.analytics.saccades.stage import SaccadeSettings, SaccadeStage
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import Measurement
from saccade.sources import Frame

FPS = 10
MOVING_FROM_S, STILL_FROM_S = 4, 6  # from when on a scene's persons count
_LEAST_IOU = 0.4

Truth = Sequence[tuple[Rect, bool, bool]]
"""Persons in a frame: box in pixels, whether the person always stands still, and whether the box is scored."""


@dataclass(slots=True, frozen=True)
class FarRow:
    """Detection results with a given maximum number of zoom windows per frame.

    Attributes:
        windows: maximum number of zoom windows per frame.
        moving, still: recall of moving persons, and of still persons, at an IoU of 0.4; None without such persons. A
            box that an earlier frame's zoom window has found counts.
        moving_found, still_found: the same recalls, without the boxes of earlier frames.
        precision: precision of all boxes, or None if there are no boxes.
        ms: median time per frame in milliseconds, including motion detection and inference.
        choose_ms: median time in milliseconds to find motion and choose zoom windows.
        looks: number of zoom windows, by reason for choosing them.
    """

    windows: int
    moving: float | None
    moving_found: float | None
    still: float | None
    still_found: float | None
    precision: float | None
    ms: float
    choose_ms: float
    looks: dict[str, int]


@dataclass(slots=True, frozen=True)
class FarBench(Measurement):
    """Detection results with zoom windows (crops at full resolution), one row per maximum number of windows."""

    rows: tuple[FarRow, ...]

    def as_text(self) -> str:
        """Return the detection results with zoom windows as a text table."""
        lines = [
            f"{'windows':>7} {'moving':>7} {'(found)':>7} {'still':>7} {'(found)':>7} {'precision':>9} {'ms':>7} "
            f"{'choose':>7}  looks"
        ]
        for row in self.rows:
            shares = [row.moving, row.moving_found, row.still, row.still_found]
            cells = " ".join(f"{'–' if one is None else f'{one:.2f}':>7}" for one in shares)
            precision = "–" if row.precision is None else f"{row.precision:.3f}"
            looks = ", ".join(f"{name} {count}" for name, count in sorted(row.looks.items()))
            lines.append(f"{row.windows:>7} {cells} {precision:>9} {row.ms:>7.1f} {row.choose_ms:>7.2f}  {looks}")
        lines.append("(found): without boxes that are held between two looks, marked as predicted")
        return "\n".join(lines)


def find_far(
    engine: Engine,
    counts: Sequence[int],
    *,
    clip: Path | None = None,
    truth: Path | None = None,
    seeds: Sequence[int | None] = (None,),
    frames: int = 100,
) -> FarBench:
    """Detect persons with several maximum numbers of zoom windows (crops at full resolution).

    Args:
        engine: engine with the model that detects the persons.
        counts: maximum numbers of zoom windows per frame; each number is measured separately.
        clip: a video file, or None for the synthetic scene.
        truth: JSON file with the true boxes of the persons in the clip.
        seeds: random seeds for the positions of the persons in the scene, one scene each. None is a scene with fixed
            positions.
        frames: maximum number of frames.
    """
    if clip is not None and truth is not None:
        known = {int(number): boxes for number, boxes in json.loads(truth.read_text())["frames"].items()}
        return FarBench(tuple(_row(engine, count, _of_clip(clip, known, frames)) for count in counts))
    shown = read_clip(DEMO_CLIP, engine)
    height, width = shown[0][0].shape[:2]
    rows: list[FarRow] = []
    for seed in seeds:
        places = PLACES if seed is None else random_places(seed, clip=(width, height))
        scene = FarScene(*shown, places=places)
        rows += [_row(engine, count, _of_scene(scene, frames)) for count in counts]
    return FarBench(tuple(rows))


def iou(a: Rect, b: Rect) -> float:
    """Return the intersection over union (IoU) of two boxes."""
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, w) * max(0.0, h)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def _of_clip(clip: Path, known: dict[int, list[list[float]]], frames: int) -> Iterator[tuple[Image, Truth | None]]:
    import av

    with av.open(str(clip)) as opened:
        for number, picture in enumerate(opened.decode(video=0)):
            if number >= frames:
                return
            w, h = picture.width, picture.height
            image = np.asarray(picture.to_ndarray(format="rgb24"), np.uint8)
            truth: Truth | None = None
            if number in known:
                truth = [((x1 * w, y1 * h, x2 * w, y2 * h), False, True) for x1, y1, x2, y2, *_ in known[number]]
            yield image, truth


def _of_scene(scene: FarScene, frames: int) -> Iterator[tuple[Image, Truth | None]]:
    for number, (image, persons) in enumerate(scene.frames(frames)):
        yield (
            image,
            [(one.box, one.still, number >= FPS * (STILL_FROM_S if one.still else MOVING_FROM_S)) for one in persons],
        )


def _row(engine: Engine, count: int, shown: Iterator[tuple[Image, Truth | None]]) -> FarRow:
    stage = SaccadeStage(SaccadeSettings(count), engine.input_size, live=False)
    there, found, seen = Counter[bool](), Counter[bool](), Counter[bool]()
    right = boxes_in_all = 0
    times, chosen = [], []
    for number, (image, truth) in enumerate(shown):
        frame = Frame(image, "far", number, number, Fraction(1, FPS), number / FPS, "file", 0, 0)
        begun = time.perf_counter()
        looks = stage.choose(frame)
        chosen.append(time.perf_counter() - begun)
        windows = [Window(look.x, look.y, look.width, look.height) for look in looks]
        result = stage.process(frame, engine.submit(image, [Detect("person")], windows=windows).result())
        times.append(time.perf_counter() - begun)
        if truth is None:
            continue
        boxes = [(one.pixels(*image.shape[1::-1]), one.predicted) for one in result.detections.boxes]
        for person, still, counts in truth:
            if not counts:
                continue
            fits = [held for box, held in boxes if iou(box, person) >= _LEAST_IOU]
            there[still] += 1
            found[still] += bool(fits)
            seen[still] += not all(fits)
        right += sum(any(iou(box, person) >= _LEAST_IOU for person, *_ in truth) for box, _ in boxes)
        boxes_in_all += len(boxes)

    def share(counted: Counter[bool], still: bool) -> float | None:
        return counted[still] / there[still] if there[still] else None

    return FarRow(
        count,
        moving=share(found, False),
        moving_found=share(seen, False),
        still=share(found, True),
        still_found=share(seen, True),
        precision=right / boxes_in_all if boxes_in_all else None,
        ms=1e3 * _median(times),
        choose_ms=1e3 * _median(chosen),
        looks=stage.counts,
    )


def _median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]
