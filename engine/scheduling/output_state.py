"""What a prompt's answer looks like, step by step: small state machines that say what each step samples. No torch.

Two sides that need not agree in time: `next_phase` is asked when a step is launched, `commit` is told what was sampled,
up to a step later. What may come next is known without the answer, but for its end: an object is x, y and size, text is
tokens; so a step can be launched before the one before it is read. Only which tokens a grammar allows has to wait for
that, and so `allowed` is asked between the two, when the step is finalized.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from saccade.engine.scheduling.found import Found


class Phase(IntEnum):
    """What one step samples from the hidden state it ends with."""

    BEGIN = 0  # one more object or stop, and its x
    Y = 1
    SIZE = 2
    TOKEN = 3


@dataclass(slots=True, frozen=True)
class Sampling:
    """How tokens are drawn: `temperature` 0 takes the likeliest; `seed` is a signed number of 64 bits."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


class Skill(ABC):
    """The state machine of one answer, whose steps go through `phases` in turn.

    Attributes:
        steps: most steps the answer can take.
        sampling: how its tokens are drawn.
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

    def allowed(self) -> Sequence[int] | None:
        """Token ids that may follow all that is committed, at least one; None for any."""
        return None

    @abstractmethod
    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take what the oldest uncommitted step sampled; True when the answer is complete.

        Args:
            sampled: by phase: BEGIN (coord score − eos score, x, –), Y (y, –, –), SIZE (width, height, –),
                TOKEN (token id, –, –).
        """


class FindObjects(Skill):
    """Objects one after another until the model stops: what detect and point share.

    Args:
        max_objects: stop after so many.
        conf: begin an object only while its score is above this.
        max_steps: most steps that the context has room for.
    """

    __slots__ = ("_committed", "_height", "_limit", "_score", "_width", "_x", "_y", "found")

    def __init__(self, max_objects: int, conf: float, max_steps: int) -> None:
        super().__init__(min(max_objects, max_steps // len(self.phases)) * len(self.phases))
        self._limit = logit(conf)
        self._committed = 0
        self._score = 1.0
        self._x = self._y = self._width = self._height = 0.0
        self.found: list[Found] = []

    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take one step's values; True at a stop or after the last object."""
        phase = self.phases[self._committed % len(self.phases)]
        self._committed += 1
        if phase is Phase.BEGIN:
            wish, self._x, _ = sampled
            if not wish > self._limit:
                return True
            # An object is there only if those before it are: at a `conf` above any of their scores it is not reported.
            self._score = min(self._score, 1 / (1 + math.exp(-wish)) if wish > -700 else 0.0)
        elif phase is Phase.Y:
            self._y = sampled[0]
        else:
            self._width, self._height, _ = sampled
        if phase is self.phases[-1]:
            self.found.append(Found(self._score, self._x, self._y, self._width, self._height))
        return self._committed == self.steps


class FindBoxes(FindObjects):
    """Answers of detect: x, y and size in turn."""

    __slots__ = ()
    phases = (Phase.BEGIN, Phase.Y, Phase.SIZE)


class FindPoints(FindObjects):
    """Answers of point: x and y in turn."""

    __slots__ = ()
    phases = (Phase.BEGIN, Phase.Y)


class WriteText(Skill):
    """Answers of query and caption: tokens until the end token, `max_tokens`, or when the listener has heard enough.

    Args:
        eos: the end token.
        max_tokens: most tokens wanted.
        max_steps: most steps that the context has room for.
        sampling: how tokens are drawn.
        enough: told each token but the end; True ends the answer with it.
    """

    __slots__ = ("_enough", "_eos", "tokens")
    phases = (Phase.TOKEN,)

    def __init__(
        self,
        eos: int,
        max_tokens: int,
        max_steps: int,
        sampling: Sampling = GREEDY,
        enough: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(min(max_tokens, max_steps), sampling)
        self._eos, self._enough = eos, enough
        self.tokens: list[int] = []

    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take a token; True at the end of the text."""
        token = int(sampled[0])
        if token == self._eos:
            return True
        self.tokens.append(token)
        return (self._enough is not None and self._enough(token)) or len(self.tokens) == self.steps


class Choose(Skill):
    """Answers of query with choices: one of some token sequences and nothing else, held to them by `allowed`.

    Args:
        eos: the end token; it ends an option that another one goes on from.
        options: token ids of each, none empty and none holding `eos`.
        max_steps: most steps that the context has room for; if the longest option needs more, `steps` is 0.
        sampling: how tokens are drawn.
    """

    __slots__ = ("_eos", "_node", "tokens")
    phases = (Phase.TOKEN,)

    def __init__(self, eos: int, options: Sequence[Sequence[int]], max_steps: int, sampling: Sampling = GREEDY) -> None:
        longest = max(map(len, options))
        super().__init__(longest if longest <= max_steps else 0, sampling)
        self._eos = eos
        self._node: _Node = {}
        for option in options:
            node = self._node
            for token in (*option, eos):
                node = node.setdefault(token, {})
        self.tokens: list[int] = []

    def allowed(self) -> Sequence[int]:
        """What may follow the tokens so far, the end token among them where an option ends."""
        return list(self._node)

    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take a token; True when no other option can be meant any more."""
        token = int(sampled[0])
        if token == self._eos:
            return True
        self.tokens.append(token)
        self._node = self._node[token]
        return list(self._node) == [self._eos]


_Node = dict[int, "_Node"]


def logit(p: float) -> float:
    """log(p / (1 - p)), without bounds at 0 and 1."""
    return -math.inf if p <= 0 else math.inf if p >= 1 else math.log(p / (1 - p))
