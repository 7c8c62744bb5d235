"""What a prompt's answer looks like, step by step: small state machines that say what each step samples. No torch.

Two sides that need not agree in time: `next_phase` is asked when a step is launched, `commit` is told what was sampled,
up to a step later. What may come next is known without the answer, but for its end: an object is x, y and size, text is
tokens; so a step can be launched before the one before it is read.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Protocol

from .found import Found


class Phase(IntEnum):
    """What one step samples from the hidden state it ends with."""

    BEGIN = 0  # one more object or stop, and its x
    Y = 1
    SIZE = 2
    TOKEN = 3


class Skill(Protocol):
    """The state machine of one answer."""

    def next_phase(self) -> Phase | None:
        """What the next launched step samples; None when no further step is wanted."""
        ...

    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take what the oldest uncommitted step sampled; True when the answer is complete.

        Args:
            sampled: by phase: BEGIN (coord score − eos score, x, –), Y (y, –, –), SIZE (width, height, –),
                TOKEN (token id, –, –).
        """
        ...


class FindObjects:
    """Answers of detect (`sized`) and point: x, y and size in turn until the model stops.

    Args:
        sized: detect, not point.
        max_objects: stop after so many.
        conf: begin an object only while its score is above this.
        max_steps: most steps that the context has room for.
    """

    __slots__ = ("_committed", "_launched", "_limit", "_phases", "_score", "_steps", "_x", "_y", "found")

    def __init__(self, sized: bool, max_objects: int, conf: float, max_steps: int) -> None:
        self._phases = (Phase.BEGIN, Phase.Y, Phase.SIZE) if sized else (Phase.BEGIN, Phase.Y)
        self._steps = min(max_objects, max_steps // len(self._phases)) * len(self._phases)
        self._limit = logit(conf)
        self._launched = self._committed = 0
        self._score = self._x = self._y = 0.0
        self.found: list[Found] = []

    @property
    def steps(self) -> int:
        """Most steps the answer can take."""
        return self._steps

    def next_phase(self) -> Phase | None:
        """The next of begin, y and size; None after the last object."""
        if self._launched == self._steps:
            return None
        phase = self._phases[self._launched % len(self._phases)]
        self._launched += 1
        return phase

    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take one step's values; True at a stop or after the last object."""
        phase = self._phases[self._committed % len(self._phases)]
        self._committed += 1
        if phase is Phase.BEGIN:
            wish, self._x, _ = sampled
            if not wish > self._limit:
                return True
            self._score = 1 / (1 + math.exp(-wish)) if wish > -700 else 0.0
        elif phase is Phase.Y:
            self._y = sampled[0]
            if len(self._phases) == 2:
                self.found.append(Found(self._score, self._x, self._y))
        else:
            self.found.append(Found(self._score, self._x, self._y, sampled[0], sampled[1]))
        return self._committed == self._steps


class WriteText:
    """Answers of query and caption: tokens until the end token or `max_tokens`."""

    __slots__ = ("_eos", "_launched", "_steps", "tokens")

    def __init__(self, eos: int, max_tokens: int, max_steps: int) -> None:
        self._eos = eos
        self._steps = min(max_tokens, max_steps)
        self._launched = 0
        self.tokens: list[int] = []

    @property
    def steps(self) -> int:
        """Most steps the answer can take."""
        return self._steps

    def next_phase(self) -> Phase | None:
        """One more token, up to the most."""
        if self._launched == self._steps:
            return None
        self._launched += 1
        return Phase.TOKEN

    def commit(self, sampled: tuple[float, float, float]) -> bool:
        """Take a token; True at the end token or the last one."""
        token = int(sampled[0])
        if token == self._eos:
            return True
        self.tokens.append(token)
        return len(self.tokens) == self._steps


def logit(p: float) -> float:
    """log(p / (1 - p)), without bounds at 0 and 1."""
    return -math.inf if p <= 0 else math.inf if p >= 1 else math.log(p / (1 - p))
