"""Compares detections of the included model on a device with its detections on the CPU.

The check needs only the files of the included model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from saccade.engine.api import Engine
from saccade.engine.tasks import Detect, Point
from saccade.engine.tasks.task import Task

_SHIFT = 2.5 / 1024  # coordinates are bins of 1/1024; rounding may flip near-ties
_SHARE = 0.02  # share of answers that may differ in float32 (order of summation)
_SIZES = ((240, 320), (480, 270), (96, 96))

Place = tuple[float, ...]
"""Normalized coordinates of one answer."""


@dataclass(slots=True, frozen=True)
class Agreement:
    """Comparison of the answers of two devices.

    Attributes:
        compared, differing: number of all compared answers, and number of those that differ between the devices.
        largest: largest difference of a normalized coordinate (0 to 1).
    """

    compared: int
    differing: int
    largest: float

    @property
    def ok(self) -> bool:
        """Whether the devices agree: no more answers differ than are acceptable in float32."""
        return self.compared > 0 and self.differing <= _SHARE * self.compared


def compare_devices(device: str, dtype: str = "float32") -> Agreement:
    """Compare boxes and points that the included model detects on a device and on the CPU, for each class.

    Raises:
        EngineError: if the device or dtype does not exist, or if the device fails.
    """
    return compare(_answers(device, dtype), _reference())


def compare(mine: Sequence[Place], theirs: Sequence[Place]) -> Agreement:
    """Compare two lists of answers to the same tasks. A missing answer or a NaN counts as a difference of 1."""
    distances = [_distance(one, other) for one, other in zip(mine, theirs, strict=True)]
    return Agreement(len(distances), sum(distance > _SHIFT for distance in distances), max(distances, default=0.0))


def _distance(one: Place, other: Place) -> float:
    if len(one) != len(other) or not all(map(math.isfinite, one)):
        return 1.0
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


@cache  # 6 s on two cores, and the same for every device and dtype
def _reference() -> list[Place]:
    return _answers("cpu", "float32")


def _answers(device: str, dtype: str) -> list[Place]:
    found: list[Place] = []
    with Engine.load("nano", device, dtype) as engine:
        names = engine.model.classes or ()
        for image in _images():
            boxes = [engine.submit(image, [Detect(name, 1, 0.0) for name in group]) for group in _groups(names)]
            tasks: list[Task] = [Point(name, 1, 0.0) for name in names]
            points = engine.submit(image, tasks)  # in one batch, the others in batches of all sizes
            places = {box.label: box for future in boxes for box in future.result().detections.boxes}
            for name in names:
                box = places.get(name)
                found.append(() if box is None else (box.x1, box.y1, box.x2, box.y2))
            found += [(spot.x, spot.y) for spot in points.result().points.points]
    return found


def _groups(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split class names into consecutive groups of 1, 2, 3, … names, to test batches of different sizes."""
    begin, size = 0, 1
    while begin < len(names):
        yield names[begin : begin + size]
        begin, size = begin + size, size + 1


def _images() -> list[NDArray[np.uint8]]:
    """Return test images with bright boxes on a dark background. They are the same in every call."""
    images = []
    for number, (height, width) in enumerate(_SIZES):
        image = np.full((height, width, 3), 20, np.uint8)
        for place in range(1 + number):
            y, x = height * (1 + 2 * place) // 8, width * (1 + place) // 6
            image[y : y + height // 4, x : x + width // 3] = 250 - 60 * place
        images.append(image)
    return images
