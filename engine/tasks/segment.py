"""Segmentation task: a box, and a path inside it that is generated token by token.

An answer is two coordinates and a size, then text tokens of SVG path data: command letters, minus signs, and integers
in 1/960 of the box.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from saccade.engine.errors import PromptError
from saccade.engine.models.protocol import Phase
from saccade.engine.outline import parse_path
from saccade.engine.results import Outline, ResultPart
from saccade.engine.tasks.task import (
    ANY_TOKEN,
    Answers,
    OnText,
    OutputState,
    Sampled,
    Sampling,
    Task,
    TokenRule,
    register_task,
    require_count,
    require_refs,
    require_sampling,
    require_text,
)

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ModelLimits, PathTokens, Prompts, Ref

SCALE = 960
"""Units of path integers per box side."""
_FORCED = (Phase.Y, Phase.Y, Phase.SIZE)
_NUMBERS = {"M": 2, "L": 2, "C": 6, "Z": 0}
_LAST_MARK = 20  # token ids up to this are marks, not text


@register_task
@dataclass(slots=True, frozen=True)
class Segment(Task):
    """Outline one `object`.

    Streaming sends the box as JSON (`x_min`, `y_min`, `x_max`, `y_max`) first, then pieces of the path.

    Attributes:
        object: name or phrase to outline.
        refs: location: points (x, y) and boxes (x1, y1, x2, y2), as fractions of the image.
        max_tokens: maximum number of path tokens.
        grammar: sample only tokens that continue a valid path; otherwise the answer ends at the first invalid token.
        temperature, top_p, seed: see `TextTask`.
        polygon: also list the path's polygons in records.

    Raises:
        ValueError: if a value has a wrong type or is out of range.
    """

    skill = "segment"

    object: str
    refs: tuple[Ref, ...] = ()
    max_tokens: int = 768
    grammar: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    polygon: bool = False

    def __post_init__(self) -> None:
        require_text("object", self.object)
        object.__setattr__(self, "refs", require_refs(self.refs))
        require_count("max_tokens", self.max_tokens)
        require_sampling(self.temperature, self.top_p, self.seed)

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """Create the task from a name."""
        return cls(text)

    @property
    def asked(self) -> str:
        """Name of the object."""
        return self.object

    @property
    def empty(self) -> bool:
        """Whether `max_tokens` is 0."""
        return self.max_tokens == 0

    def prompt(self, prompts: Prompts) -> list[int]:
        """Return the prompt for the outline."""
        return prompts.segment(self.object, self.refs)

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """Return the coordinates of the references by prompt position."""
        return prompts.ref_values(self.skill, self.refs) if self.refs else {}

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine for a box and a path."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 63)
        sampling = Sampling(self.temperature, self.top_p, seed)
        tokens = prompts.path_tokens
        if not tokens.numbers or "M" not in tokens.commands.values():
            raise PromptError("this model's tokenizer has no tokens for outlines")
        return SegmentOutput(tokens, self.max_tokens, max_steps, self.grammar, sampling, on_text)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Return the outline."""
        found = []
        for output, _ in answers:
            assert isinstance(output, SegmentOutput)
            path = output.writer.text
            complete = output.complete and parse_path(path)[1]
            found.append(Outline(self.object, path, output.box, complete, tokens=output.n_tokens, polygon=self.polygon))
        return found


class PathWriter:
    """Converts path symbols to SVG path data: numbers form pairs, and a command is written with its first pair.

    Attributes:
        broken: whether an invalid symbol came; nothing is written afterwards.
    """

    __slots__ = ("_command", "_due", "_minus", "_number", "_pieces", "_waiting", "broken")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._command = ""
        self._due = 0  # numbers that the command still needs, by the grammar
        self._waiting = False  # whether the command is not written yet
        self._minus = False
        self._number: str | None = None  # the first of a pair
        self.broken = False

    @property
    def text(self) -> str:
        """Path data written so far."""
        return "".join(self._pieces)

    @property
    def unfinished(self) -> bool:
        """Whether a command lacks numbers or a number lacks its pair."""
        return self._minus or self._waiting or self._number is not None

    def allowed(self, tokens: PathTokens) -> Sequence[int]:
        """Return allowed token IDs: M with two numbers first, then L, C, M with numbers, or Z, or the end token."""
        first, later, number, digits = tokens.sets
        if self._minus:
            return digits
        return number if self._due else later if self._command else first

    def add(self, symbol: str | int | None) -> str:
        """Take a command letter, '-', an integer, or None for anything else; return the completed piece of text."""
        if self.broken:
            return ""
        if isinstance(symbol, int):
            if not _NUMBERS.get(self._command, 0):  # a command is due
                self.broken = True
                return ""
            self._due = max(0, self._due - 1)
            number, self._minus = f"{(-symbol if self._minus else symbol) / SCALE:.3f}", False
            if self._number is None:
                self._number = number
                return ""
            before, self._number = self._number, None
            command = f"{self._command} " if self._waiting else ""
            self._waiting = False
            return self._write(f"{command}{before} {number}")
        if symbol is None or self._minus:
            self.broken = True
            return ""
        if symbol == "-":
            self._minus = True
            return ""
        self._number, self._command, self._waiting = None, symbol, symbol != "Z"  # an odd number is dropped
        self._due = _NUMBERS.get(symbol, 0)
        return "" if self._waiting else self._write("Z")

    def _write(self, piece: str) -> str:
        self._pieces.append(f" {piece}" if self._pieces else piece)
        return self._pieces[-1]


class SegmentOutput(OutputState):
    """Answer of segment: coordinate, coordinate and size, then path tokens until the end token.

    Args:
        tokens: tokens of the outline language.
        max_tokens: maximum number of path tokens without the end token.
        max_steps: maximum number of steps that fit the context.
        grammar: whether only valid path tokens may be sampled.
        sampling: sampling parameters.
        on_text: called with the box as JSON, then with each piece of the path.

    Attributes:
        box: (x1, y1, x2, y2) as fractions of the image, clipped to it.
        writer: writer of the path.
        complete: whether the answer ended with the end token at a valid place.
        n_tokens: number of path tokens.
    """

    __slots__ = ("_committed", "_grammar", "_on_text", "_tokens", "_values", "box", "complete", "n_tokens", "writer")
    phases = (*_FORCED, Phase.LATER_TOKEN)

    def __init__(
        self,
        tokens: PathTokens,
        max_tokens: int,
        max_steps: int,
        grammar: bool,
        sampling: Sampling,
        on_text: OnText | None = None,
    ) -> None:
        super().__init__(min(len(_FORCED) + max_tokens + 1, max_steps) if max_steps > len(_FORCED) else 0, sampling)
        self._tokens, self._on_text = tokens, on_text
        self._grammar = grammar
        self._committed = self.n_tokens = 0
        self._values: list[float] = []
        self.box = (0.0, 0.0, 0.0, 0.0)
        self.writer, self.complete = PathWriter(), False

    def next_phase(self) -> Phase | None:
        """Return Y, Y and SIZE, then LATER_TOKEN."""
        number = self._launched
        phase = super().next_phase()
        return phase if phase is None or number < len(_FORCED) else Phase.LATER_TOKEN

    def vocabulary(self) -> Iterable[int]:
        """Return all path tokens."""
        return {token for ids in self._tokens.sets for token in ids} if self._grammar else ()

    def rule(self) -> TokenRule:
        """Return the tokens that continue the path."""
        return TokenRule(allowed=self.writer.allowed(self._tokens), lasting=True) if self._grammar else ANY_TOKEN

    def commit(self, sampled: Sampled) -> bool:
        """Take one step's samples; return True at the end of the path or at an invalid symbol."""
        number, self._committed = self._committed, self._committed + 1
        if number < len(_FORCED):
            self._values += sampled[: 2 if _FORCED[number] is Phase.SIZE else 1]
            if number == len(_FORCED) - 1:
                self._bound()
            return False
        token = int(sampled[0])
        if token == self._tokens.eos:
            self.complete = not self.writer.broken and not self.writer.unfinished
            return True
        self.n_tokens += 1
        if token > _LAST_MARK:
            piece = self.writer.add(self._tokens.symbol(token))
            if piece and self._on_text is not None:
                self._on_text(piece)
        return self.writer.broken or self._committed == self.steps

    def _bound(self) -> None:
        x, y, width, height = self._values
        corners = x - width / 2, y - height / 2, x + width / 2, y + height / 2
        x1, y1, x2, y2 = (min(1.0, max(0.0, value)) for value in corners)
        self.box = x1, y1, x2, y2
        if self._on_text is not None:
            self._on_text(json.dumps({"x_min": x1, "y_min": y1, "x_max": x2, "y_max": y2}))
