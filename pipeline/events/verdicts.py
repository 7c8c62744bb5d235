"""Holds back finds that look and lie like a false alarm.

A user marks an event as a false alarm. The verdict keeps the place, the score and the appearance of its object. A later
find is held back if it lies in the same place, looks alike, and its score is not clearly higher. An operator can remove
the verdict. Without a model that describes the appearance, only the place and size are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
"""Similarity above which two objects look alike. In the rendered scene of the test, the same bush has 0.998 on noisy
frames, and the person from whose outline it is made has 0.94."""

CLEARLY = 0.5
"""A find passes if its doubt, 1 - score, is below this fraction of the doubt of the false alarm."""

Look = Callable[[NDArray[np.uint8], Rect], NDArray[np.float32]]


@dataclass(slots=True, frozen=True)
class Verdict:
    """The verdict that an event is a false alarm.

    Attributes:
        event: ID of the event.
        stream, label: those of the event.
        score: highest score of the event.
        box: box of the event's object, as fractions of the image.
        look: description of its appearance, as float16 values. None if the model has none.
    """

    event: str
    stream: str
    label: str
    score: float
    box: Rect
    look: bytes | None = None

    def lies_like(self, box: Box) -> bool:
        """Return whether a find has the same label and lies in the same place, with a similar size."""
        return box.label == self.label and overlap(self.box, (box.x1, box.y1, box.x2, box.y2)) > SAME_PLACE

    def looks_like(self, look: NDArray[np.float32] | None) -> bool:
        """Return whether an object looks like the false alarm. If one of them has no description, it does."""
        if self.look is None or look is None:
            return True
        own = np.frombuffer(self.look, np.float16).astype(np.float32)
        return own.shape != look.shape or float(own @ look) > ALIKE

    @property
    def needed(self) -> float:
        """The score above which a similar find passes."""
        return 1 - CLEARLY * (1 - self.score)


class VerdictStage:
    """Removes finds that look and lie like a false alarm. It must run before the analytics stage.

    Args:
        look: describes the appearance of an object; None compares only place and size.
        verdicts: the verdicts of the stream.
    """

    def __init__(self, look: Look | None = None, verdicts: Iterable[Verdict] = ()) -> None:
        self.look = look
        self._verdicts = tuple(verdicts)  # replaced as a whole, from any thread
        self._held: Counter[str] = Counter()

    def configure(self, verdicts: Sequence[Verdict]) -> None:
        """Replace the verdicts from the next frame on. Thread-safe."""
        self._verdicts = tuple(verdicts)

    @property
    def held_back(self) -> dict[str, int]:
        """The number of finds that were held back, by event. A find counts once per frame."""
        return dict(self._held)

    def process(self, frame: Frame, result: Result) -> Result:
        """Return the result without the finds that are held back."""
        verdicts = self._verdicts
        if not verdicts:
            return result
        boxes = tuple(box for box in result.detections.boxes if not self._holds_back(verdicts, frame, box))
        if len(boxes) == len(result.detections.boxes):
            return result
        return replace(result, detections=replace(result.detections, boxes=boxes))

    def _holds_back(self, verdicts: tuple[Verdict, ...], frame: Frame, box: Box) -> bool:
        near = [one for one in verdicts if box.score <= one.needed and one.lies_like(box)]
        if not near:
            return False
        look = None
        if self.look is not None and any(one.look is not None for one in near):
            look = self.look(frame.image, (box.x1, box.y1, box.x2, box.y2))
        found = next((one for one in near if one.looks_like(look)), None)
        if found is not None:
            self._held[found.event] += 1
        return found is not None


def verdict_stage(stages: Iterable[object]) -> VerdictStage | None:
    """Return the `VerdictStage` among the stages of a stream. Return None if there is none."""
    return next((stage for stage in stages if isinstance(stage, VerdictStage)), None)
