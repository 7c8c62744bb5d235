"""A camera that shakes, rain, and a light switched on, rendered, with the real model: windows begin no false track.

The scene is a person of 150 pixels in Full HD, which the glance finds, in a room where nothing else moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from saccade.engine import Detect, Engine, Window
from saccade.pipeline.analytics.saccades.stage import SaccadeSettings, SaccadeStage
from saccade.pipeline.analytics.track import TrackStage
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.sources import Frame

Image = NDArray[np.uint8]
FRAMES, MOST = 24, 2


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("nano") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def scene() -> Image:
    """The first frame of the demo clip, 480 x 270, in a blurred and noisy Full HD picture."""
    there, first = cv2.VideoCapture(str(DEMO_CLIP)).read()
    assert there
    room = cv2.resize(cv2.GaussianBlur(first[::-1, ::-1], (0, 0), 8), (1920, 1080))
    noise = np.random.default_rng(0).normal(0, 3, (1080, 1920, 1))
    room = np.clip(room + noise, 0, 255).astype(np.uint8)
    room[600:870, 900:1380] = cv2.resize(first, (480, 270), interpolation=cv2.INTER_AREA)
    return np.ascontiguousarray(room[:, :, ::-1])


def shaking(scene: Image, number: int) -> Image:
    """Moved by up to 12 pixels each way."""
    dice = np.random.default_rng(number)
    return np.roll(scene, tuple(dice.integers(-12, 13, 2)), axis=(0, 1))


def rain(scene: Image, number: int) -> Image:
    """400 streaks of 40 pixels, elsewhere on each frame."""
    dice, wet = np.random.default_rng(number), scene.copy()
    for x, y in dice.integers(0, (1920, 1040), (400, 2)).tolist():
        cv2.line(wet, (x, y), (x + 4, y + 40), (190, 190, 200), 1)
    return wet


def light(scene: Image, number: int) -> Image:
    """Dark for a third of the time; then a lamp lights one side more than the other."""
    if number < FRAMES // 3:
        return (scene * 0.35).astype(np.uint8)
    lit = np.linspace(0.6, 1.3, 1920)[None, :, None]
    return np.clip(scene * lit, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("render", [shaking, rain, light], ids=lambda one: one.__name__)
def test_windows_stay_within_their_number_and_begin_no_false_tracks(
    engine: Engine, scene: Image, render: Callable[[Image, int], Image]
) -> None:
    tracks = [seen(engine, scene, render, count) for count in (0, MOST)]
    assert len(tracks[1]) <= len(tracks[0])


def seen(engine: Engine, scene: Image, render: Callable[[Image, int], Image], count: int) -> set[int]:
    """The tracks that begin."""
    saccades, track, numbers = SaccadeStage(SaccadeSettings(count), engine.input_size, live=False), TrackStage(), set()
    for number in range(FRAMES):
        image = render(scene, number)
        frame = Frame(image, "rough", number, number, Fraction(1, 10), number / 10, "file", 0, 0)
        looks = saccades.choose(frame)
        assert len(looks) <= count
        windows = [Window(look.x, look.y, look.width, look.height) for look in looks]
        result = engine.submit(image, [Detect("person")], windows=windows).result()
        tracked = track.process(frame, saccades.process(frame, result))
        numbers |= {box.track_id for box in tracked.detections.boxes if box.track_id is not None}
    return numbers
