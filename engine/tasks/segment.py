"""Segmentation task: the model generates a bounding box, then the contour of the object as an SVG path.

First, the model generates the centre (x, y) and the size of the box. Then it generates the SVG path as text tokens:
command letters, minus signs, and integers. One integer unit is 1/960 of the box size.
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
"""Number of integer path units along a side of the box."""
_FORCED = (Phase.Y, Phase.Y, Phase.SIZE)
_NUMBERS = {"M": 2, "L": 2, "C": 6, "Z": 0}
_LAST_MARK = 20  # token IDs up to this one are special tokens, not text


@register_task
@dataclass(slots=True, frozen=True)
class Segment(Task):
    """Task that segments one object. The result is the contour of the object as an SVG path.

    A streamed answer starts with the bounding box as JSON (`x_min`, `y_min`, `x_max`, `y_max`), followed by the path.

    Attributes:
        object: name or phrase that describes the object.
        refs: location of the object: points (x, y) and boxes (x1, y1, x2, y2), normalized to 0 to 1.
        max_tokens: maximum number of path tokens.
        grammar: whether to sample only valid path tokens. If False, the first invalid token ends the answer.
        temperature, top_p, seed: sampling parameters; see `TextTask`.
        polygon: whether result records also contain the contour as polygons.

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
        """Create the task from the name of an object to segment."""
        return cls(text)

    @property
    def asked(self) -> str:
        """Name of the object to segment, as text that `parse` accepts."""
        return self.object

    @property
    def empty(self) -> bool:
        """Whether `max_tokens` is 0. The task then needs no inference."""
        return self.max_tokens == 0

    def prompt(self, prompts: Prompts) -> list[int]:
        """Return the token IDs of the prompt to segment the object."""
        return prompts.segment(self.object, self.refs)

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """Return the coordinates and sizes of reference points and boxes, keyed by token position in the prompt."""
        return prompts.ref_values(self.skill, self.refs) if self.refs else {}

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine that decodes the bounding box and the SVG path."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 63)
        sampling = Sampling(self.temperature, self.top_p, seed)
        tokens = prompts.path_tokens
        if not tokens.numbers or "M" not in tokens.commands.values():
            raise PromptError("this model cannot segment: its tokenizer has no tokens for SVG paths")
        return SegmentOutput(tokens, self.max_tokens, max_steps, self.grammar, sampling, on_text)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Return the contour of the object."""
        found = []
        for output, _ in answers:
            assert isinstance(output, SegmentOutput)
            path = output.writer.text
            complete = output.complete and parse_path(path)[1]
            found.append(Outline(self.object, path, output.box, complete, tokens=output.n_tokens, polygon=self.polygon))
        return found


class PathWriter:
    """Converts the path tokens that the model generates to SVG path data.

    Numbers are written in pairs (x, y). A command letter is written together with its first pair.

    Attributes:
        broken: whether an invalid token was added. Tokens after the invalid token are ignored.
    """

    __slots__ = ("_command", "_due", "_minus", "_number", "_pieces", "_waiting", "broken")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._command = ""
        self._due = 0  # number of numbers that the command still needs
        self._waiting = False  # whether the command letter is not written yet
        self._minus = False
        self._number: str | None = None  # first number of a coordinate pair
        self.broken = False

    @property
    def text(self) -> str:
        """SVG path data written so far."""
        return "".join(self._pieces)

    @property
    def unfinished(self) -> bool:
        """Whether the path ends with a command letter, x coordinate or minus sign that needs another number."""
        return self._minus or self._waiting or self._number is not None

    def allowed(self, tokens: PathTokens) -> Sequence[int]:
        """Return the IDs of the tokens that can follow in a valid SVG path."""
        first, later, number, digits = tokens.sets
        if self._minus:
            return digits
        return number if self._due else later if self._command else first

    def add(self, symbol: str | int | None) -> str:
        """Add a path symbol. Return the new piece of SVG path data, or '' if it needs more symbols.

        Args:
            symbol: a command letter, '-', an integer, or None for any other token.
        """
        if self.broken:
            return ""
        if isinstance(symbol, int):
            if not _NUMBERS.get(self._command, 0):  # a command letter is expected here
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
        self._number, self._command, self._waiting = None, symbol, symbol != "Z"  # drop a number without a pair
        self._due = _NUMBERS.get(symbol, 0)
        return "" if self._waiting else self._write("Z")

    def _write(self, piece: str) -> str:
        self._pieces.append(f" {piece}" if self._pieces else piece)
        return self._pieces[-1]


class SegmentOutput(OutputState):
    """State machine that decodes a segmentation answer: the bounding box, then the tokens of the SVG path.

    Args:
        tokens: token IDs of SVG path symbols.
        max_tokens: maximum number of path tokens, excluding the end token.
        max_steps: maximum number of decoding steps that fit into the context.
        grammar: whether to sample only tokens that continue a valid path.
        sampling: sampling parameters.
        on_text: callback that receives the box as JSON, then each piece of the path.

    Attributes:
        box: (x1, y1, x2, y2) normalized to 0 to 1, clipped to the image.
        writer: converter of the path tokens to SVG path data.
        complete: whether the answer ended with the end token after a valid path.
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
        """Return the phase (kind of value to sample) of the next decoding step: box centre and size, then path tokens.

        The x coordinate also has the phase Y (a coordinate without EOS), because a segmentation answer cannot end
        before its box. Return None if no more steps are needed.
        """
        number = self._launched
        phase = super().next_phase()
        return phase if phase is None or number < len(_FORCED) else Phase.LATER_TOKEN

    def vocabulary(self) -> Iterable[int]:
        """Return the token IDs of all SVG path symbols and of the end token. If `grammar` is False, return no IDs."""
        return {token for ids in self._tokens.sets for token in ids} if self._grammar else ()

    def rule(self) -> TokenRule:
        """Return the token constraint that keeps the SVG path valid. If `grammar` is False, all tokens are allowed."""
        return TokenRule(allowed=self.writer.allowed(self._tokens), lasting=True) if self._grammar else ANY_TOKEN

    def commit(self, sampled: Sampled) -> bool:
        """Add the sampled values of one decoding step. Return True at the end of the path or after an invalid token."""
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
