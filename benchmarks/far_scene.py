"""A synthetic 4K scene with small persons at known positions. Three persons move and two stand still.

The scene shows the demo clip five times at reduced size, on a blurred, noisy background without persons. For the still
persons, a single frame of the clip is shown. The ground truth is the boxes that the model detects in the clip at full
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from saccade.engine import Engine

Image = NDArray[np.uint8]
Rect = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Place:
    """A rectangle in the synthetic scene that shows the clip at reduced size.

    Attributes:
        x, y: upper left corner in pixels.
        person: height of the tallest person in pixels.
        offset: index of the first frame of the clip to show.
        still: whether the rectangle always shows the same frame.
        pace: playback speed: number of clip frames per frame of the scene.
    """

    x: int
    y: int
    person: float
    offset: int
    still: bool = False
    pace: float = 1.0


PLACES = [
    Place(420, 300, 66, 20),
    Place(1900, 1250, 75, 70),
    Place(3300, 520, 61, 130),
    Place(1150, 1620, 70, 0, still=True),
    Place(2650, 980, 64, 150, still=True),
]


@dataclass(frozen=True, slots=True)
class Truth:
    """Ground truth for one person: its box in pixels, and whether the person stands still."""

    box: Rect
    still: bool


class FarScene:
    """Renders the frames of a synthetic scene with small persons: a clip is shown several times at reduced size.

    Args:
        clip: frames of the clip, (height, width, 3) uint8 RGB.
        persons: boxes of the persons in each frame of the clip, in normalized coordinates.
        width, height: size of the scene in pixels.
        places: rectangles of the scene in which the clip is shown.
    """

    def __init__(
        self,
        clip: list[Image],
        persons: list[list[Rect]],
        width: int = 3840,
        height: int = 2160,
        places: list[Place] = PLACES,
    ) -> None:
        self._clip, self._persons, self._places = clip, persons, places
        empty = next(image for image, boxes in zip(clip, persons, strict=True) if not boxes)
        # Mirrored and upside down: nothing in it is taken for a person.
        large = cv2.resize(cv2.GaussianBlur(empty[::-1, ::-1], (0, 0), 8), (width, height))
        noise = np.random.default_rng(0).normal(0, 4, (height, width, 1))
        self._background = np.clip(large + noise, 0, 255).astype(np.uint8)
        self._tallest = max(box[3] - box[1] for boxes in persons for box in boxes)
        self._scales = [place.person / (self._tallest * clip[0].shape[0]) for place in places]

    def _frame_of(self, place: Place, number: int) -> int:
        if not place.still:
            return (int(number * place.pace) + place.offset) % len(self._clip)
        # Whoever stands still is all there.
        return next(
            i % len(self._clip)
            for i in range(place.offset, place.offset + len(self._clip))
            if any(box[3] - box[1] >= 0.9 * self._tallest for box in self._persons[i % len(self._clip)])
        )

    def frame(self, number: int) -> tuple[Image, list[Truth]]:
        """Return a frame of the synthetic scene, (height, width, 3) uint8 RGB, and the boxes of its persons."""
        image, truth = self._background.copy(), []
        for place, scale in zip(self._places, self._scales, strict=True):
            shown = self._frame_of(place, number)
            height, width = (round(side * scale) for side in self._clip[0].shape[:2])
            small = cv2.resize(self._clip[shown], (width, height), interpolation=cv2.INTER_AREA)
            image[place.y : place.y + height, place.x : place.x + width] = small
            truth += [
                Truth(
                    (
                        place.x + x1 * width,
                        place.y + y1 * height,
                        place.x + x2 * width,
                        place.y + y2 * height,
                    ),
                    place.still,
                )
                for x1, y1, x2, y2 in self._persons[shown]
            ]
        return image, truth

    def frames(self, count: int) -> Iterator[tuple[Image, list[Truth]]]:
        """Yield the first `count` frames of the synthetic scene, each with the boxes of its persons."""
        return (self.frame(number) for number in range(count))


def random_places(seed: int, clip: tuple[int, int] = (640, 360)) -> list[Place]:
    """Return five random places for a clip in a 4K scene, without overlap. Two of them show a still frame.

    Persons are 60 to 75 pixels tall.

    Args:
        seed: seed of the random numbers.
        clip: width and height of the clip's frames in pixels.
    """
    width, height = 3840, 2160
    dice = np.random.default_rng(seed)
    places: list[Place] = []
    while len(places) < 5:
        person = float(dice.uniform(60, 75))
        w, h = (round(side * person / (0.55 * clip[1])) for side in clip)
        x, y = int(dice.integers(0, width - w)), int(dice.integers(0, height - h))
        if all(abs(x - one.x) > 1.3 * w or abs(y - one.y) > 1.3 * h for one in places):
            pace = float(dice.choice([0.5, 1.0, 1.5]))
            places.append(Place(x, y, person, int(dice.integers(0, 200)), still=len(places) >= 3, pace=pace))
    return places


def read_clip(path: Path, engine: Engine) -> tuple[list[Image], list[list[Rect]]]:
    """Return the frames of a clip at 10 frames/s, and the person boxes that the model detects in each frame."""
    from saccade.engine import Detect

    capture = cv2.VideoCapture(str(path))
    step = max(1, round(capture.get(cv2.CAP_PROP_FPS) / 10))
    images: list[Image] = []
    while True:
        there, image = capture.read()
        if not there:
            break
        images.append(np.ascontiguousarray(image[:, :, ::-1]))
    images = images[::step]
    results = [engine.submit(image, [Detect("person")]).result() for image in images]
    return images, [[(box.x1, box.y1, box.x2, box.y2) for box in result.detections.boxes] for result in results]
