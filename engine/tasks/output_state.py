"""The state machine of one answer: what each step samples, and when the answer is complete. No torch.

Launching and reading a step need not agree in time: `next_phase` is called when a step is launched, `commit` when its
values are read, up to a step later. What may come next is known without the answer, except for its end: an object is x,
y and size, text is tokens; so a step can be launched before the one ahead of it is read. What a token may be can depend
on what was sampled, so `rule` is called between the two, when the step is finalized. `text_output` has those of text.
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
    """An object as the model decoded it, before it becomes a result.

    Attributes:
        score: p(coord) against p(eos), 0 to 1.
        x, y: centre, as fractions of the image that was prefilled; not clipped.
        width, height: likewise; 0 for points.
    """

    score: float
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0


@dataclass(slots=True, frozen=True)
class Sampling:
    """How tokens are sampled: `temperature` 0 takes the most likely one; `seed` is a signed number of 64 bits."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()

FedValue = tuple[Phase, float, float]
"""What a sampled value is fed as: (Phase.Y, coordinate, 0), (Phase.SIZE, width, height) or (Phase.TOKEN, id, 0)."""

FROM_IMAGE: FedValue = (Phase.TOKEN, -1.0, 0.0)
"""Stands for a value of a draft that the executor reads from the image, before it has done so."""

Sampled = tuple[float, ...]
"""What a step yields for a row: three numbers by its phase, then the log probabilities of `TokenRule.scored`."""


class TokenRule(NamedTuple):
    """What the token of a step may be, and what else is wanted of it.

    Attributes:
        allowed: ids that may be sampled, at least one; None for any.
        forbidden: ids that may not.
        grounded: the coordinate token is sampled with a coordinate, which is fed in place of its embedding.
        scored: ids whose log probabilities are wanted, at most `MAX_SCORED`; of all tokens, whatever is allowed.
        lasting: `allowed` is one of a few sequences that many steps share: their masks are kept on the device.
    """

    allowed: Sequence[int] | None = None
    forbidden: Sequence[int] = ()
    grounded: bool = False
    scored: Sequence[int] = ()
    lasting: bool = False


ANY_TOKEN = TokenRule()
MAX_SCORED = 128
"""Most log probabilities of a row in one step: what buffers are made for."""


class OutputState(ABC):
    """The state machine of one answer, whose steps go through `phases` in turn.

    Attributes:
        steps: most steps that the answer can take; 0 where the context has no room for it.
        sampling: how its tokens are sampled.
        back: by how many positions the step that `next_phase` has just given goes back: what was fed at its position
            and behind it is forgotten.
    """

    __slots__ = ("_launched", "back", "sampling", "steps")

    phases: ClassVar[tuple[Phase, ...]]

    def __init__(self, steps: int, sampling: Sampling = GREEDY) -> None:
        self.steps, self.sampling, self.back = steps, sampling, 0
        self._launched = 0

    @property
    def positions(self) -> int:
        """Most positions behind the prompt that are fed. What is sampled last never is."""
        return max(0, self.steps - 1)

    def next_phase(self) -> Phase | None:
        """What the next launched step samples; None when no further step is wanted."""
        if self._launched == self.steps:
            return None
        phase = self.phases[self._launched % len(self.phases)]
        self._launched += 1
        return phase

    def vocabulary(self) -> Iterable[int]:
        """Every token id that `rule` may ever give, for a check before the first step."""
        return ()

    def rule(self) -> TokenRule:
        """What the token behind all that is committed may be; asked once for each step of a text phase, in order."""
        return ANY_TOKEN

    @abstractmethod
    def commit(self, sampled: Sampled) -> bool:
        """Take what the oldest uncommitted step sampled; True when the answer is complete.

        Args:
            sampled: by phase: X_OR_EOS (coord logit − eos logit, x, –), Y (y, –, –), SIZE (width, height, –),
                a text phase (token id, coordinate where it is grounded, –, log probabilities that were wanted…).
        """

    @property
    def draftable(self) -> bool:
        """Whether the next answer to its prompt may be drafted with the values of this one, see `core.speculative`."""
        return False

    @property
    def certain(self) -> Sequence[FedValue]:
        """What its next steps feed, whatever is sampled: those steps can be run at once, behind the prompt."""
        return ()

    def branches(self, most: int) -> Sequence[tuple[tuple[int, ...], OutputState]]:
        """Let others do a part of the work beside it: each has tokens behind the prompt, and what is done there.

        They share what this holds, which is complete once all of them are. To be called once, before the first step.

        Args:
            most: that there may be; if more are needed, there are none.
        """
        return ()

    @property
    def visible(self) -> bool:
        """Whether the values of the answer can be read from the image, without being asked for; see `FROM_IMAGE`."""
        return False

    def retract(self, steps: int) -> None:
        """Take back the newest launched steps: they are not committed, and will be launched again."""
        self._launched -= steps

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """What the next step is fed after a sample, or after one that was guessed; None where the answer would end."""
        if phase is Phase.SIZE:
            return Phase.SIZE, sampled[0], sampled[1]
        return (Phase.TOKEN if phase in TEXT_PHASES else Phase.Y), sampled[0], 0.0

    def values(self) -> list[FedValue]:
        """Everything that was fed for the answer so far, in order, where it is `draftable`."""
        return []

    def finish(self) -> None:  # noqa: B027 - most answers hold nothing back
        """Called once when the answer is complete, before its task collects it."""


@dataclass(slots=True, eq=False)
class DraftMemory:
    """The last answer to one prompt of a stream, and whether drafting pays there.

    Attributes:
        values: of the last answer.
        pause: answers for which nothing is drafted.
        failures: answers in a row whose drafts did not pay.
    """

    values: tuple[FedValue, ...] = ()
    pause: int = 0
    failures: int = 0

    def draft(self) -> tuple[FedValue, ...]:
        """What to begin the next answer with."""
        if self.pause:
            self.pause -= 1
            return ()
        return self.values

    def learn(self, values: Sequence[FedValue], paid: bool | None, longest_pause: int) -> None:
        """Take a complete answer, and whether its draft has paid; None where nothing was drafted."""
        self.values = tuple(values)
        if paid is not None:
            self.failures = 0 if paid else self.failures + 1
            self.pause = min(longest_pause, 2**self.failures) if self.failures > 1 else 0


class ObjectsOutput(OutputState):
    """Objects one after another until the model stops: what detect and point share.

    Args:
        max_objects: stop after this many.
        conf: begin an object only while its score is above this.
        max_steps: most steps that the context has room for.
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
        """Whether one more object begins: coordinate logit − end logit, as sampled at X_OR_EOS, is above `conf`'s."""
        return margin > self._logit_limit

    def commit(self, sampled: Sampled) -> bool:
        """Take one step's values; True at a stop or after the last object."""
        phase = self.phases[self._committed % len(self.phases)]
        self._committed += 1
        if phase is Phase.X_OR_EOS:
            margin, self._x, *_ = sampled
            if not self.begins(margin):
                return True
            # An object is there only if those before it are: at a `conf` above any of their scores it is not reported.
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
        """Always: objects are not drawn."""
        return True

    @property
    def visible(self) -> bool:
        """Always: objects are places."""
        return True

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """A coordinate or a size; None where the model would stop."""
        if phase is Phase.X_OR_EOS:
            return (Phase.Y, sampled[1], 0.0) if self.begins(sampled[0]) else None
        return super().fed(phase, sampled)

    def values(self) -> list[FedValue]:
        """Those of whole objects."""
        values: list[FedValue] = []
        for one in self.objects:
            values += [(Phase.Y, one.x, 0.0), (Phase.Y, one.y, 0.0)]
            if Phase.SIZE in self.phases:
                values.append((Phase.SIZE, one.width, one.height))
        return values


class BoxesOutput(ObjectsOutput):
    """Answers of detect: x, y and size in turn."""

    __slots__ = ()
    phases = (Phase.X_OR_EOS, Phase.Y, Phase.SIZE)


class PointsOutput(ObjectsOutput):
    """Answers of point: x and y in turn."""

    __slots__ = ()
    phases = (Phase.X_OR_EOS, Phase.Y)


def logit(p: float) -> float:
    """log(p / (1 - p)), without bounds at 0 and 1."""
    return -math.inf if p <= 0 else math.inf if p >= 1 else math.log(p / (1 - p))
