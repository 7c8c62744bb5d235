"""A task that is none of the engine's own, in one file: how many there are of something. For the tests of the seam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from saccade.engine.models.protocol import ModelLimits, Prompts
from saccade.engine.results import ResultPart
from saccade.engine.tasks.objects import BoxesOutput, ObjectsOutput
from saccade.engine.tasks.task import Answers, OnText, OutputState, Task


@dataclass(slots=True, frozen=True)
class Counted:
    """How many there are."""

    key: ClassVar[str] = "count"

    label: str
    number: int

    def to_record(self, width: int, height: int) -> Mapping[str, object]:
        return {"label": self.label, "number": self.number, "per_megapixel": 1e6 * self.number / (width * height)}


@dataclass(slots=True, frozen=True)
class Count(Task):
    """Count every `label`, at most `most`."""

    skill = "count"

    label: str
    most: int = 4

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        return cls(text, min(4, max_objects))

    @property
    def asked(self) -> str:
        return self.label

    @property
    def empty(self) -> bool:
        return self.most == 0

    def prompt(self, prompts: Prompts) -> list[int]:
        return prompts.wrap("count", self.label)

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        return BoxesOutput(self.most, 0.0, max_steps)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        objects = [output.objects for output, _ in answers if isinstance(output, ObjectsOutput)]
        return [Counted(self.label, sum(map(len, objects)))]


def draw_counts(image: NDArray[np.uint8], parts: Sequence[Any], scale: float) -> None:
    """One white row for each that was counted."""
    image[: sum(part.number for part in parts)] = 255
