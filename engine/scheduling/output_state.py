"""The state machine of one answer: what each step samples, and when the answer is complete. No torch.

Launching and reading a step need not agree in time: `next_phase` is called when a step is launched, `commit` when its
values are read, up to a step later. What may come next is known without the answer, except for its end: an object is x,
y and size, text is tokens; so a step can be launched before the one ahead of it is read. Only the tokens that a grammar
allows depend on what was sampled, so `allowed` is called between the two, when the step is finalized.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from saccade.engine.phase import Phase


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


class OutputState(ABC):
    """The state machine of one answer, whose steps go through `phases` in turn.

    Attributes:
        steps: most steps that the answer can take; 0 where the context has no room for it.
        sampling: how its tokens are sampled.
    """

    __slots__ = ("_launched", "sampling", "steps")

    phases: ClassVar[tuple[Phase, ...]]

    def __init__(self, steps: int, sampling: Sampling = GREEDY) -> None:
        self.steps, self.sampling = steps, sampling
        self._launched = 0

    def next_phase(self) -> Phase | None:
        """What the next launched step samples; None when no further step is wanted."""
        if self._launched == self.steps:
            return None
        phase = self.phases[self._launched % len(self.phases)]
        self._launched += 1
        return phase

    def vocabulary(self) -> Iterable[int]:
        """Every token id that `allowed` may ever give, for a check before the first step."""
        return ()

    def allowed(self) -> Sequence[int] | None:
        """Token ids that may follow all that is committed, at least one; None for any."""
        return None

    @abstractmethod
    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take what the oldest uncommitted step sampled; True when the answer is complete.

        Args:
            sampled: by phase: X_OR_EOS (coord logit − eos logit, x, –), Y (y, –, –), SIZE (width, height, –),
                TOKEN and LATER_TOKEN (token id, –, –).
        """

    def finish(self) -> None:  # noqa: B027 - most answers hold nothing back
        """Called once when the answer is complete, before its task collects it."""


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

    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take one step's values; True at a stop or after the last object."""
        phase = self.phases[self._committed % len(self.phases)]
        self._committed += 1
        if phase is Phase.X_OR_EOS:
            margin, self._x, _ = sampled
            if not margin > self._logit_limit:
                return True
            # An object is there only if those before it are: at a `conf` above any of their scores it is not reported.
            self._score = min(self._score, 1 / (1 + math.exp(-margin)) if margin > -700 else 0.0)
        elif phase is Phase.Y:
            self._y = sampled[0]
        else:
            self._width, self._height, _ = sampled
        if phase is self.phases[-1]:
            self.objects.append(DecodedObject(self._score, self._x, self._y, self._width, self._height))
        return self._committed == self.steps


class BoxesOutput(ObjectsOutput):
    """Answers of detect: x, y and size in turn."""

    __slots__ = ()
    phases = (Phase.X_OR_EOS, Phase.Y, Phase.SIZE)


class PointsOutput(ObjectsOutput):
    """Answers of point: x and y in turn."""

    __slots__ = ()
    phases = (Phase.X_OR_EOS, Phase.Y)


class TextOutput(OutputState):
    """Answers of query and caption: tokens until the end token, `max_tokens`, or a stop string.

    Args:
        eos: the end token.
        max_tokens: most tokens wanted.
        max_steps: most steps that the context has room for.
        sampling: how tokens are sampled.
        on_token: called with each token but the end; True ends the answer with it.
        on_finish: called when the answer is complete.
    """

    __slots__ = ("_eos", "_on_finish", "_on_token", "tokens")
    phases = (Phase.TOKEN,)

    def __init__(
        self,
        eos: int,
        max_tokens: int,
        max_steps: int,
        sampling: Sampling = GREEDY,
        on_token: Callable[[int], bool] | None = None,
        on_finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(min(max_tokens, max_steps), sampling)
        self._eos, self._on_token, self._on_finish = eos, on_token, on_finish
        self.tokens: list[int] = []

    def next_phase(self) -> Phase | None:
        """TOKEN for the first, LATER_TOKEN from then on."""
        first = not self._launched
        phase = super().next_phase()
        return phase if phase is None or first else Phase.LATER_TOKEN

    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take a token; True at the end of the text."""
        token = int(sampled[0])
        if token == self._eos:
            return True
        self.tokens.append(token)
        return (self._on_token is not None and self._on_token(token)) or len(self.tokens) == self.steps

    def finish(self) -> None:
        """Let `on_finish` release what was held back."""
        if self._on_finish is not None:
            self._on_finish()


class ChoiceOutput(OutputState):
    """Answers of query with choices: one of some token sequences and nothing else, constrained by `allowed`.

    Args:
        eos: the end token; it ends an option that another one continues.
        options: what each token sequence stands for; none is empty and none holds `eos`.
        max_steps: most steps that the context has room for; if the longest option needs more, `steps` is 0.
        sampling: how tokens are sampled.
        on_finish: called with the choice when the answer is complete.
    """

    __slots__ = ("_eos", "_node", "_on_finish", "_options", "tokens")
    phases = (Phase.TOKEN,)

    def __init__(
        self,
        eos: int,
        options: Mapping[tuple[int, ...], str],
        max_steps: int,
        sampling: Sampling = GREEDY,
        on_finish: Callable[[str], None] | None = None,
    ) -> None:
        longest = max(map(len, options))
        super().__init__(longest if longest <= max_steps else 0, sampling)
        self._eos, self._options, self._on_finish = eos, options, on_finish
        self._node: _Node = {}
        for option in options:
            node = self._node
            for token in (*option, eos):
                node = node.setdefault(token, {})
        self.tokens: list[int] = []

    @property
    def choice(self) -> str:
        """What the tokens stand for, once the answer is complete."""
        return self._options[tuple(self.tokens)]

    def vocabulary(self) -> Iterable[int]:
        """The tokens of all options; the end token is the model's own."""
        return {token for option in self._options for token in option}

    def allowed(self) -> Sequence[int]:
        """What may follow the tokens so far, including the end token where an option ends."""
        return list(self._node)

    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take a token; True when only one option is left and it is complete."""
        token = int(sampled[0])
        if token == self._eos:
            return True
        self.tokens.append(token)
        self._node = self._node[token]
        return list(self._node) == [self._eos]

    def finish(self) -> None:
        """Report the choice."""
        if self._on_finish is not None:
            self._on_finish(self.choice)


_Node = dict[int, "_Node"]


def logit(p: float) -> float:
    """log(p / (1 - p)), without bounds at 0 and 1."""
    return -math.inf if p <= 0 else math.inf if p >= 1 else math.log(p / (1 - p))
