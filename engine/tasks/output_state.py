"""State machine of one answer: the kind of sample at each step, and the end of the answer.

Launching and reading of steps overlap: `next_phase` is called when a step is launched, and `commit` when its samples
are read, up to one step later. The sequence of phases does not depend on samples, except for the end, so a step can
launch before the previous one is read. Allowed tokens may depend on samples, so `rule` is called when the step is
finalized. `text_output` has the state machines of text.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from saccade.engine.models.protocol import TEXT_PHASES, Phase


@dataclass(slots=True, frozen=True)
class DecodedObject:
    """An object as decoded by the model.

    Attributes:
        score: p(coord) / (p(coord) + p(eos)), 0 to 1.
        x, y: centre, as fractions of the prefilled image; not clipped.
        width, height: size as fractions of the prefilled image; 0 for points.
    """

    score: float
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0


@dataclass(slots=True, frozen=True)
class Sampling:
    """Sampling parameters: `temperature` 0 is greedy; `seed` is a signed 64-bit integer."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()

FedValue = tuple[Phase, float, float]
"""Input of a step: (Phase.Y, coordinate, 0), (Phase.SIZE, width, height) or (Phase.TOKEN, token ID, 0)."""

FROM_IMAGE: FedValue = (Phase.TOKEN, -1.0, 0.0)
"""Placeholder of a draft value that the executor reads from the image."""

Sampled = tuple[float, ...]
"""Samples of a row: three numbers by phase, then the log probabilities of `TokenRule.scored`."""


class TokenRule(NamedTuple):
    """Constraints on the token of a step.

    Attributes:
        allowed: allowed token IDs, at least one, or None for all.
        forbidden: forbidden token IDs.
        grounded: a sampled coordinate token comes with a coordinate, whose embedding is fed next.
        scored: at most `MAX_SCORED` token IDs whose log probabilities over all tokens are returned.
        lasting: whether many steps share `allowed`, so that its mask is cached on the device.
    """

    allowed: Sequence[int] | None = None
    forbidden: Sequence[int] = ()
    grounded: bool = False
    scored: Sequence[int] = ()
    lasting: bool = False


ANY_TOKEN = TokenRule()
MAX_SCORED = 128
"""Maximum number of log probabilities per row and step."""


class OutputState(ABC):
    """State machine of one answer, whose steps cycle through `phases`.

    Attributes:
        steps: maximum number of steps; 0 if the context is too short.
        sampling: sampling parameters.
        back: number of positions that the step of the last `next_phase` goes back; later entries are overwritten.
    """

    __slots__ = ("_launched", "back", "sampling", "steps")

    phases: ClassVar[tuple[Phase, ...]]

    def __init__(self, steps: int, sampling: Sampling = GREEDY) -> None:
        self.steps, self.sampling, self.back = steps, sampling, 0
        self._launched = 0

    @property
    def positions(self) -> int:
        """Maximum number of positions fed after the prompt; the last sample is never fed."""
        return max(0, self.steps - 1)

    def next_phase(self) -> Phase | None:
        """Return the phase of the next step to launch, or None if no more steps are needed."""
        if self._launched == self.steps:
            return None
        phase = self.phases[self._launched % len(self.phases)]
        self._launched += 1
        return phase

    def vocabulary(self) -> Iterable[int]:
        """Return all token IDs that `rule` may return, for validation."""
        return ()

    def rule(self) -> TokenRule:
        """Return the constraints on the next token; called once per text step in order."""
        return ANY_TOKEN

    @abstractmethod
    def commit(self, sampled: Sampled) -> bool:
        """Take the samples of the oldest uncommitted step; return True when the answer is complete.

        Args:
            sampled: values by phase: X_OR_EOS (coord logit − eos logit, x, –), Y (y, –, –), SIZE (width, height, –),
                text (token ID, coordinate if grounded, –, requested log probabilities…).
        """

    @property
    def draftable(self) -> bool:
        """Whether the values of this answer may be drafts of the next answer, see `core.speculative`."""
        return False

    @property
    def certain(self) -> Sequence[FedValue]:
        """Inputs of the next steps that do not depend on samples, so that these steps can run with the prompt."""
        return ()

    def branches(self, most: int) -> Sequence[tuple[tuple[int, ...], OutputState]]:
        """Return parts of the work for parallel sequences, each with its tokens after the prompt and its state machine.

        The parts share this object's state, which is complete when all parts are. Call once, before the first step.

        Args:
            most: maximum number of parts; if more are needed, the result is empty.
        """
        return ()

    @property
    def visible(self) -> bool:
        """Whether detections in the image can draft the answer; see `FROM_IMAGE`."""
        return False

    def retract(self, steps: int) -> None:
        """Take back the newest `steps` launched steps, which will be launched again."""
        self._launched -= steps

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """Return the input of the next step after a sample or draft value, or None if the answer ends."""
        if phase is Phase.SIZE:
            return Phase.SIZE, sampled[0], sampled[1]
        return (Phase.TOKEN if phase in TEXT_PHASES else Phase.Y), sampled[0], 0.0

    def values(self) -> list[FedValue]:
        """Return all values fed for the answer so far, in order, if it is `draftable`."""
        return []

    def finish(self) -> None:  # noqa: B027 - most answers hold nothing back
        """Finish the answer; called once before its task collects it."""


@dataclass(slots=True, eq=False)
class DraftMemory:
    """The last answer to a prompt of a stream, and statistics of its drafts.

    Attributes:
        values: values of the last answer.
        pause: number of answers without drafts.
        failures: number of consecutive answers whose drafts saved too little.
    """

    values: tuple[FedValue, ...] = ()
    pause: int = 0
    failures: int = 0

    def draft(self) -> tuple[FedValue, ...]:
        """Return the draft for the next answer."""
        if self.pause:
            self.pause -= 1
            return ()
        return self.values

    def learn(self, values: Sequence[FedValue], paid: bool | None, longest_pause: int) -> None:
        """Store a complete answer, and whether its draft paid off (None without a draft)."""
        self.values = tuple(values)
        if paid is not None:
            self.failures = 0 if paid else self.failures + 1
            self.pause = min(longest_pause, 2**self.failures) if self.failures > 1 else 0


class ObjectsOutput(OutputState):
    """Base class of detect and point answers: objects until the model stops.

    Args:
        max_objects: maximum number of objects.
        conf: minimum score of an object.
        max_steps: maximum number of steps that fit the context.
    """

    __slots__ = ("_committed", "_height", "_logit_limit", "_score", "_width", "_x", "_y", "objects")

    def __init__(self, max_objects: int, conf: float, max_steps: int) -> None:
        super().__init__(min(max_objects, max_steps // len(self.phases)) * len(self.phases))
        self._logit_limit = logit(conf)
        self._committed = 0
        self._score = 1.0
        self._x = self._y = self._width = self._height = 0.0
        self.objects: list[DecodedObject] = []

    def begins(self, margin: float) -> bool:
        """Return whether another object starts: coordinate logit − end logit is above the logit of `conf`."""
        return margin > self._logit_limit

    def commit(self, sampled: Sampled) -> bool:
        """Take one step's samples; return True after the last object."""
        phase = self.phases[self._committed % len(self.phases)]
        self._committed += 1
        if phase is Phase.X_OR_EOS:
            margin, self._x, *_ = sampled
            if not self.begins(margin):
                return True
            # An object exists only if all earlier ones do, so its score is limited by theirs.
            self._score = min(self._score, 1 / (1 + math.exp(-margin)) if margin > -700 else 0.0)
        elif phase is Phase.Y:
            self._y = sampled[0]
        else:
            self._width, self._height, *_ = sampled
        if phase is self.phases[-1]:
            self.objects.append(DecodedObject(self._score, self._x, self._y, self._width, self._height))
        return self._committed == self.steps

    @property
    def draftable(self) -> bool:
        """Always True: objects are sampled greedily."""
        return True

    @property
    def visible(self) -> bool:
        """Always True: detections can draft objects."""
        return True

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """Return a coordinate or size, or None if the model stops."""
        if phase is Phase.X_OR_EOS:
            return (Phase.Y, sampled[1], 0.0) if self.begins(sampled[0]) else None
        return super().fed(phase, sampled)

    def values(self) -> list[FedValue]:
        """Return the values of all complete objects."""
        values: list[FedValue] = []
        for one in self.objects:
            values += [(Phase.Y, one.x, 0.0), (Phase.Y, one.y, 0.0)]
            if Phase.SIZE in self.phases:
                values.append((Phase.SIZE, one.width, one.height))
        return values


class BoxesOutput(ObjectsOutput):
    """Answer of detect: x, y and size for each object."""

    __slots__ = ()
    phases = (Phase.X_OR_EOS, Phase.Y, Phase.SIZE)


class PointsOutput(ObjectsOutput):
    """Answer of point: x and y for each object."""

    __slots__ = ()
    phases = (Phase.X_OR_EOS, Phase.Y)


def logit(p: float) -> float:
    """Return log(p / (1 - p)), which is infinite at 0 and 1."""
    return -math.inf if p <= 0 else math.inf if p >= 1 else math.log(p / (1 - p))
