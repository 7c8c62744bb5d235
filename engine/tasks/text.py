"""Tasks with a text answer: queries (questions) and captions."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from saccade.engine.errors import PromptError
from saccade.engine.results import ResultPart, Text
from saccade.engine.tasks.task import (
    Answers,
    OnText,
    OutputState,
    Sampling,
    Task,
    register_task,
    require_count,
    require_refs,
    require_sampling,
    require_text,
    shorten,
)
from saccade.engine.tasks.text_output import ChoiceOutput, ReasoningOutput, TextOutput

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ModelLimits, Prompts, Ref

_INCOMPLETE = "\ufffd"  # replacement character of incomplete UTF-8
CaptionLength = Literal["short", "normal", "long"]


@dataclass(slots=True, frozen=True, kw_only=True)
class TextTask(Task):
    """Base class of the tasks `Query` and `Caption`. It stores the parameters of text generation.

    Attributes:
        temperature: softmax temperature. 0 selects greedy decoding. 1 leaves the model's distribution unchanged.
        top_p: nucleus sampling: sample only from the smallest set of most likely tokens with this total probability,
            above 0. 1 allows all tokens.
        stop: string or strings that end the text. The text is cut before the first match.
        seed: random seed. Equal requests with equal seeds get equal answers. None chooses a random seed for each
            request.

    Raises:
        ValueError: if a value has a wrong type or is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    stop: str | tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        require_sampling(self.temperature, self.top_p, self.seed)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for one in self.stop:
            require_text("a stop string", one)

    def sampling(self) -> Sampling:
        """Return the sampling parameters. If `seed` is None, a random seed is chosen."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 63)
        return Sampling(self.temperature, self.top_p, seed)

    def text_output(self, prompts: Prompts, max_tokens: int, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine that decodes free text."""
        return _FreeText(prompts, max_tokens, max_steps, self.sampling(), tuple(self.stop), on_text)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Return the text, with the reasoning and the probabilities of the choices if the task requests them.

        The text is empty if the model generated no answer.
        """
        text, tokens, cut, reasoning, probabilities = "", 0, False, None, None
        for output, _ in answers:
            answer = output
            if isinstance(output, ReasoningOutput):
                reasoning, answer, tokens = output.reasoning, output.answer, output.n_tokens
            if isinstance(answer, ChoiceOutput):
                text, probabilities = answer.choice, answer.probabilities
                tokens += answer.n_tokens
            else:
                assert isinstance(answer, _FreeText)
                text, cut = answer.detokenizer.text, len(answer.tokens) == answer.steps
                tokens += len(answer.tokens)
        return [Text(self.title, text, tokens, cut, reasoning, probabilities)]

    @property
    def title(self) -> str:
        """Name of the task in the result, such as the question."""
        return self.asked


@register_task
@dataclass(slots=True, frozen=True)
class Query(TextTask):
    """Task that answers a question, in free text or with one of `choices`. The image is optional.

    Attributes:
        choices: possible answers. If set, the model selects one, and the result has a probability for each choice.
            `max_tokens` and `stop` are ignored. A leading space and the case of the first letter make no difference.
        reasoning: whether the model generates reasoning before the answer, with at most `max_tokens` additional tokens.
            If the context is short, a quarter of the remaining context is reserved for the answer.
        refs: parts of the image that the question refers to: points (x, y) and boxes (x1, y1, x2, y2), normalized to 0
            to 1.

    Raises:
        ValueError: if a value has a wrong type or is out of range.
    """

    skill = "query"

    question: str
    max_tokens: int = 768
    choices: tuple[str, ...] = ()
    reasoning: bool = False
    refs: tuple[Ref, ...] = ()

    def __post_init__(self) -> None:
        TextTask.__post_init__(self)
        require_text("question", self.question)
        require_count("max_tokens", self.max_tokens)
        if isinstance(self.choices, str):
            raise ValueError(f"choices must be a list of strings; got one string, '{self.choices}'")
        object.__setattr__(self, "choices", tuple(self.choices))
        for choice in self.choices:
            require_text("a choice", choice)
        if not isinstance(self.reasoning, bool):
            raise ValueError(f"reasoning must be True or False; got {self.reasoning!r}")
        object.__setattr__(self, "refs", require_refs(self.refs))

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """Create the task from a question.

        The text may end with a list of choices such as `[yes|no]`, with `[reasoning]`, or with both.

        Raises:
            ValueError: if the text has several lists of choices, or the task is invalid.
        """
        question, options = text.strip(), []
        while found := _BRACKETS.fullmatch(question):
            question, inside = found[1].strip(), found[2]
            options.append(inside)
        reasoning = "reasoning" in options
        lists = [inside for inside in options if inside != "reasoning"]
        if len(lists) > 1 or len(options) - len(lists) > 1:
            raise ValueError(f"'{text}' can end with only one list of choices, such as [yes|no], and one [reasoning]")
        choices = tuple(choice.strip() for choice in lists[0].split("|")) if lists else ()
        return cls(question, choices=choices, reasoning=reasoning)

    @property
    def asked(self) -> str:
        """The question with its suffixes, such as `[yes|no]` and `[reasoning]`, as text that `parse` accepts."""
        choices = f" [{'|'.join(self.choices)}]" if self.choices else ""
        return f"{self.question}{choices}{' [reasoning]' if self.reasoning else ''}"

    @property
    def title(self) -> str:
        """The question without its suffixes, such as `[yes|no]`."""
        return self.question

    @property
    def empty(self) -> bool:
        """Whether the task has no `choices` and `max_tokens` is 0. The task then needs no inference."""
        return self.max_tokens == 0 and not self.choices

    @property
    def needs_image(self) -> bool:
        """Whether the question needs an image. True if the question refers to points or boxes in the image."""
        return bool(self.refs)

    def prompt(self, prompts: Prompts) -> list[int]:
        """Return the token IDs of the prompt for the question."""
        return prompts.query(self.question, self.refs, self.reasoning)

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """Return the coordinates and sizes of reference points and boxes, keyed by token position in the prompt."""
        return prompts.ref_values(self.skill, self.refs) if self.refs else {}

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine that decodes the answer, and the reasoning before the answer if it is enabled."""
        if not self.reasoning:
            return self._answer(prompts, max_steps, on_text)
        tokens = prompts.reasoning
        if tokens is None:
            raise PromptError("this model does not support reasoning; set reasoning=False")
        left = max_steps - len(tokens.suffix)
        kept = max(map(len, self._options(prompts))) if self.choices else min(self.max_tokens, max(1, left // 4))
        reasoned = max(0, min(self.max_tokens, left - kept))
        answer = self._answer(prompts, left - reasoned, on_text)
        return ReasoningOutput(answer, tokens, reasoned, prompts.text, answer.sampling)

    def _answer(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        if not self.choices:
            return self.text_output(prompts, self.max_tokens, max_steps, on_text)
        try:
            return ChoiceOutput(self._options(prompts), max_steps, self.sampling(), on_text)
        except ValueError as error:
            raise PromptError(str(error)) from None

    def _options(self, prompts: Prompts) -> dict[tuple[int, ...], str]:
        """Return the choice for each token sequence that the model may answer.

        A choice may start with a space, and its first letter may be upper or lower case.
        """
        options: dict[tuple[int, ...], str] = {}
        for spell in _SPELLINGS:
            for choice in self.choices:
                ids = tuple(prompts.ids(spell(choice)))
                if not ids or prompts.eos_id in ids:
                    raise PromptError(
                        f"invalid choice '{shorten(choice)}': it is empty or contains the model's end-of-text token"
                    )
                options.setdefault(ids, choice)
        return options


@register_task
@dataclass(slots=True, frozen=True)
class Caption(TextTask):
    """Task that generates a caption of the image, with at most `max_tokens` tokens.

    Raises:
        ValueError: if a value has a wrong type or is out of range.
    """

    skill = "caption"

    length: CaptionLength = "normal"
    max_tokens: int = 768

    def __post_init__(self) -> None:
        TextTask.__post_init__(self)
        if self.length not in get_args(CaptionLength):
            raise ValueError(f"caption length must be one of {', '.join(get_args(CaptionLength))}; got {self.length!r}")
        require_count("max_tokens", self.max_tokens)

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """Create the task from a caption length, such as 'short'."""
        length: Any = text
        return cls(length)

    @property
    def asked(self) -> str:
        """Length of the caption: 'short', 'normal' or 'long'."""
        return self.length

    @property
    def title(self) -> str:
        """Name of the task in the result, such as 'caption: short'."""
        return f"caption: {self.length}"

    @property
    def empty(self) -> bool:
        """Whether `max_tokens` is 0. The task then needs no inference."""
        return self.max_tokens == 0

    def prompt(self, prompts: Prompts) -> list[int]:
        """Return the token IDs of the prompt for a caption."""
        return prompts.caption(self.length)

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine that decodes the caption."""
        return self.text_output(prompts, self.max_tokens, max_steps, on_text)


class Detokenizer:
    """Incremental detokenizer that ends the text before the first stop string.

    Args:
        decode: function that returns the text of token IDs.
        stop: strings that end the text.
        on_text: callback that receives each new piece of text.
    """

    __slots__ = ("_decode", "_from", "_held", "_on_text", "_pieces", "_read", "_shown", "_stop", "_tokens")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._decode, self._stop, self._on_text = decode, tuple(stop), on_text
        self._tokens: list[int] = []
        # Decode tokens together with those of the previous piece, because the text of a token may depend on its
        # context.
        self._from = self._read = 0
        self._shown = ""  # text of tokens[_from:_read]
        self._held = ""  # withheld text that may be the start of a stop string
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Decoded text so far, without trailing characters that may be the start of a stop string."""
        return "".join(self._pieces)

    def add(self, token: int) -> bool:
        """Add a token ID. Return True when the text contains a stop string."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._from :])
        if text.endswith(_INCOMPLETE):
            return False
        return self._take(text)

    def end(self) -> None:
        """End the text. Add the last characters, which were withheld because a stop string could have started there.

        The call has no effect if the text has already ended.
        """
        if self._read < len(self._tokens):
            self._take(self._decode(self._tokens[self._from :]))
        self._emit(len(self._held))

    def _take(self, text: str) -> bool:
        self._held += text[len(self._shown) :]
        self._from, self._read = self._read, len(self._tokens)
        self._shown = self._decode(self._tokens[self._from :])
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self._emit(min(found)[1])
            self._held = ""
            return True
        self._emit(len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0))
        return False

    def _emit(self, count: int) -> None:
        piece, self._held = self._held[:count], self._held[count:]
        if piece:
            self._pieces.append(piece)
            if self._on_text is not None:
                self._on_text(piece)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the start of the stop string `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class _FreeText(TextOutput):
    __slots__ = ("detokenizer",)

    def __init__(
        self,
        prompts: Prompts,
        max_tokens: int,
        max_steps: int,
        sampling: Sampling,
        stop: tuple[str, ...],
        on_text: OnText | None,
    ) -> None:
        self.detokenizer = Detokenizer(prompts.text, stop, on_text)
        super().__init__(prompts.eos_id, max_tokens, max_steps, sampling, self.detokenizer.add, self.detokenizer.end)


_BRACKETS = re.compile(r"(.*\S)\s*\[([^\[\]]*\|[^\[\]]*|reasoning)\]", re.DOTALL)
_SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda choice: choice,
    lambda choice: f" {choice}",
    lambda choice: choice[0].swapcase() + choice[1:],
    lambda choice: f" {choice[0].swapcase()}{choice[1:]}",
)
