"""A stage and a gate as a user would add them: one file, and one line in a table for each name."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import ClassVar

from saccade.engine.results import Result
from saccade.sources import Frame


class NumberingStage:
    """Numbers the boxes of its stream from 1 on, as a tracker would that finds nothing again."""

    closed: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.count = 0

    def process(self, frame: Frame, result: Result) -> Result:
        boxes = []
        for box in result.detections.boxes:
            self.count += 1
            boxes.append(replace(box, track_id=self.count))
        return replace(result, detections=replace(result.detections, boxes=tuple(boxes)))

    def close(self) -> None:
        self.closed.append(self.count)


class EveryThirdGate:
    """Admits frames 0, 3, 6, …"""

    def admit(self, frame: Frame) -> bool:
        return frame.index % 3 == 0


class FailingStage:
    """Fails in its calls of these numbers, counted from 0."""

    fails: ClassVar[frozenset[int]] = frozenset()

    def __init__(self) -> None:
        self.calls = count()

    def process(self, frame: Frame, result: Result) -> Result:
        if (call := next(self.calls)) in self.fails:
            raise ValueError(f"cannot process a frame, call {call}")
        return result
