"""Objects on known paths, and what a detector with known faults sees of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.analytics.tracker import Tracker

Path = Callable[[float], tuple[float, float] | None]
"""The centre of an object at a time in seconds; None while it is not to be seen."""


def straight(
    start: tuple[float, float], end: tuple[float, float], seconds: float, hidden: tuple[float, float] = (9e9, 9e9)
) -> Path:
    """From one place to another, there for `seconds`, hidden from and until two times."""

    def at(t: float) -> tuple[float, float] | None:
        if not 0 <= t <= seconds or hidden[0] <= t < hidden[1]:
            return None
        k = t / seconds
        return start[0] + k * (end[0] - start[0]), start[1] + k * (end[1] - start[1])

    return at


@dataclass(frozen=True)
class Seen:
    """One frame: corners (n, 4), scores (n,), and which path each is of."""

    seconds: float
    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    paths: list[int]


def watch(
    paths: Sequence[Path],
    fps: float = 30,
    seconds: float = 4,
    size: tuple[float, float] = (0.1, 0.3),
    *,
    drop: float = 0.0,
    noise: float = 0.0,
    miss: float = 0.0,
    score: float = 0.9,
    seed: int = 0,
) -> list[Seen]:
    """Frames of a camera: `drop` of them are lost, a box moves by `noise` of its size and is missed at rate `miss`."""
    dice = np.random.default_rng(seed)
    frames = []
    for number in range(round(seconds * fps) + 1):
        t = number / fps
        lost = number > 1 and dice.random() < drop
        rows, owners = [], []
        for owner, path in enumerate(paths):
            at = path(t)
            if at is None or (number > 1 and dice.random() < miss):
                continue
            x, y = np.array(at) + dice.normal(0, noise, 2) * size if noise else at
            rows.append((x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2))
            owners.append(owner)
        if not lost:
            frames.append(Seen(t, np.array(rows).reshape(-1, 4), np.full(len(rows), score), owners))
    return frames


def follow(tracker: Tracker, frames: Sequence[Seen]) -> list[dict[int, int]]:
    """For each frame, the number that the box of each path has."""
    numbers = []
    for seen in frames:
        kinds = np.zeros(len(seen.boxes), np.int64)
        ids, _ = tracker.update(seen.boxes, seen.scores, kinds, seen.seconds)
        numbers.append(dict(zip(seen.paths, ids.tolist(), strict=True)))
    return numbers


def numbers_of(path: int, numbers: Sequence[dict[int, int]]) -> set[int]:
    """The numbers that one path has had."""
    return {frame[path] for frame in numbers if frame.get(path)}
