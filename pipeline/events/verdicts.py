"""Suppresses detections that are similar to a false alarm.

Users can mark an event as a false alarm. A later detection is suppressed if its box and its appearance are similar to
the false alarm, and its score is not clearly higher. If the model provides no appearance descriptors, only the boxes
are compared. Suppressed detections are listed under `held_back` in the JSON record of the frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from saccade.engine.results import Box, Result
from saccade.pipeline.analytics.geometry import Rect
from saccade.pipeline.events.places import overlap

if TYPE_CHECKING:
    from saccade.sources import Frame

MOST_VERDICTS = 50
"""Maximum number of verdicts of a stream."""

SAME_PLACE = 0.5
"""IoU above which two boxes lie in the same place."""

ALIKE = 0.97
"""Similarity of appearance descriptors above which two objects look alike. In the rendered test scene, the same bush
has a similarity of 0.998 on noisy frames, and a person of the same outline has 0.94."""

CLEARLY = 0.5
"""A detection is not suppressed if its uncertainty (1 − score) is below this fraction of the false alarm's uncertainty.
"""

Look = Callable[[NDArray[np.uint8], Rect], NDArray[np.float32]]


@dataclass(slots=True, frozen=True)
class Verdict:
    """An event that a user marked as a false alarm.

    Attributes:
        event: ID of the event.
        stream, label: stream and label of the event.
        score: highest score of the event, from 0 to 1.
        box: box of the object at the start of the event, in normalized coordinates (0 to 1).
        look: appearance descriptor of the object, as float16 values. None if the model computes none.
    """

    event: str
    stream: str
    label: str
    score: float
    box: Rect
    look: bytes | None = None

    def lies_like(self, box: Box) -> bool:
        """Return whether a detection has the same label as the false alarm, and a similar position and size."""
        return box.label == self.label and overlap(self.box, (box.x1, box.y1, box.x2, box.y2)) > SAME_PLACE

    def looks_like(self, look: NDArray[np.float32] | None) -> bool:
        """Return whether an appearance descriptor matches that of the false alarm, or one of them is missing."""
        if self.look is None or look is None:
            return True
        own = np.frombuffer(self.look, np.float16).astype(np.float32)
        return own.shape != look.shape or float(own @ look) > ALIKE

    @property
    def needed(self) -> float:
        """The highest score (0 to 1) of a detection that this false alarm suppresses."""
        return 1 - CLEARLY * (1 - self.score)


@dataclass(slots=True, frozen=True)
class HeldBack:
    """A detection that was suppressed.

    Attributes:
        event: ID of the false alarm that the detection is similar to.
        box: the detection.
    """

    key: ClassVar[str] = "held_back"
    event: str
    box: Box

    def to_record(self, width: int, height: int) -> dict[str, object]:
        """Return the suppressed detection as a JSON object. `event` is the event ID of the false alarm."""
        box = self.box
        return {
            "event": self.event,
            "label": box.label,
            "score": round(box.score, 3),
            "box": [round(value, 1) for value in box.pixels(width, height)],
            "box_norm": [round(value, 5) for value in (box.x1, box.y1, box.x2, box.y2)],
        }


class VerdictStage:
    """Suppresses detections that are similar to a false alarm. This stage must run before the analytics stage.

    Args:
        look: returns the appearance descriptor of an object. If None, only position and size are compared.
        verdicts: false alarms, by stream. Other threads can replace a stream's list; the new list applies from the next
            frame.
    """

    def __init__(self, look: Look | None, verdicts: Mapping[str, Sequence[Verdict]]) -> None:
        self.look = look
        self._verdicts = verdicts
        self._held: Counter[str] = Counter()

    @property
    def held_back(self) -> dict[str, int]:
        """The number of detections that each false alarm has suppressed. The keys are event IDs."""
        return dict(self._held)

    def process(self, frame: Frame, result: Result) -> Result:
        """Return the result without the detections that are similar to a false alarm.

        The suppressed detections are listed in the extras of the returned result.
        """
        verdicts = self._verdicts.get(frame.stream, ())
        if not verdicts:
            return result
        boxes: list[Box] = []
        held: list[HeldBack] = []
        for box in result.detections.boxes:
            if (verdict := self._verdict_on(verdicts, frame, box)) is None:
                boxes.append(box)
            else:
                held.append(HeldBack(verdict.event, box))
        if not held:
            return result
        self._held.update(one.event for one in held)
        extras = {**result.extras, HeldBack.key: tuple(held)}
        return replace(result, detections=replace(result.detections, boxes=tuple(boxes)), extras=extras)

    def _verdict_on(self, verdicts: Sequence[Verdict], frame: Frame, box: Box) -> Verdict | None:
        """Return the event marked as a false alarm to which a detection is similar, or None."""
        near = [one for one in verdicts if box.score <= one.needed and one.lies_like(box)]
        if not near:
            return None
        look = None
        if self.look is not None and any(one.look is not None for one in near):
            look = self.look(frame.image, (box.x1, box.y1, box.x2, box.y2))
        return next((one for one in near if one.looks_like(look)), None)
