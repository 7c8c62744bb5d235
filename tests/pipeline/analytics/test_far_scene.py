"""Small persons in a 4K scene, with the real model: three that move and two that stand still, with two windows."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from saccade.engine import Detect, Engine, Window
from saccade.pipeline.analytics.saccades.stage import SaccadeSettings, SaccadeStage
from saccade.sources import Frame
from tests.support import REPO
from tests.support.far_scene import FarScene, Rect, read_clip

FRAMES, MOVING_FROM, STILL_FROM = 70, 40, 60  # at 10 a second


def iou(a: Rect, b: Rect) -> float:
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, w) * max(0.0, h)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def test_two_windows_find_who_is_far_away_in_4k() -> None:
    with Engine.load("nano") as engine:
        scene = FarScene(*read_clip(REPO / "pipeline/assets/demo.mp4", engine))
        stage = SaccadeStage(SaccadeSettings(2), engine.input_size, live=False)
        found, there, wrong = Counter[bool](), Counter[bool](), 0
        for number, (image, truth) in enumerate(scene.frames(FRAMES)):
            frame = Frame(image, "far", number, number, Fraction(1, 10), number / 10, "file", 0, 0)
            looks = stage.choose(frame)
            assert len(looks) <= 2
            windows = [Window(look.x, look.y, look.width, look.height) for look in looks]
            result = stage.process(frame, engine.submit(image, [Detect("person")], windows=windows).result())
            boxes = [box.pixels(*image.shape[1::-1]) for box in result.detections.boxes]
            wrong += sum(not any(iou(box, person.box) >= 0.4 for person in truth) for box in boxes)
            for person in truth:
                if number >= (STILL_FROM if person.still else MOVING_FROM):
                    there[person.still] += 1
                    found[person.still] += any(iou(box, person.box) >= 0.4 for box in boxes)
    assert found[False] >= 0.85 * there[False] > 0
    assert found[True] >= 0.80 * there[True] > 0
    assert wrong <= 0.05 * (found[False] + found[True])
