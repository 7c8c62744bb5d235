"""From a task to the token ids a model is asked with, and from answer ids to text. Knows no weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from saccade.engine.errors import ModelFilesError, PromptError, UnknownModelError
from saccade.engine.models.model_files import fetch_file
from saccade.engine.models.moondream.config import MoondreamConfig, TokenizerConfig
from saccade.engine.models.protocol import PathTokens, ReasoningTokens, Ref

FIRST_CODE_POINT = 100
PUBLISHED = "moondream/starmie-v1"
"""Where the tokenizer of the published models is; that in the repositories of their weights is a stale one."""
_TEMPLATE_WORDS = {
    "query": ("query", "question"),
    "detect": ("detect",),
    "point": ("point",),
    "caption": ("describe", "caption"),
}
"""What the templates' ids stand for, now and with `TokenizerConfig.in_words`."""
_LAST_MARK = 20  # token ids up to this are marks, not text
_COMMANDS, _LARGEST = ("M", "L", "C", "Z"), 960  # of a path, and the largest of its numbers
_SMALL = 4096  # no published model has so few tokens; the small random ones of reference sets do


class TokenizerError(ModelFilesError):
    """A model whose tokenizer is missing or broken."""


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""


class FileTokenizer:
    """A tokenizer.json file."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(list(ids)))


def tokenizer_of(folder: Path, config: MoondreamConfig) -> TextTokenizer:
    """The tokenizer of a model folder.

    Its tokenizer.json where that fits; else the one that published models use, `PUBLISHED`, from the hub; or code
    points for a model too small to have words.

    Raises:
        TokenizerError: if there is none that fits, saying what to do.
    """
    path, small = folder / "tokenizer.json", config.text.vocab_size <= _SMALL
    own = _read(path) if path.is_file() else None
    if own is not None and (small or _misfit(own, config.tokenizer) is None):
        return own
    if small:
        return CodePointTokenizer()
    reason = "is missing" if own is None else f"does not fit config.json: {_misfit(own, config.tokenizer)}"
    advice = f"put the tokenizer.json of {PUBLISHED} into {folder}"
    if config.tokenizer.in_words:
        raise TokenizerError(f"{path} {reason}; put the tokenizer.json of GPT-2 there")
    try:
        fetched = _read(fetch_file(PUBLISHED, "tokenizer.json"))
    except UnknownModelError as error:
        raise TokenizerError(f"{path} {reason}; {advice} ({error})") from error
    if misfit := _misfit(fetched, config.tokenizer):
        raise TokenizerError(f"{path} {reason}; nor does that of {PUBLISHED}: {misfit}")
    return fetched


def _read(path: Path) -> FileTokenizer:
    try:
        return FileTokenizer(path)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: {error}") from error


def _misfit(tokenizer: TextTokenizer, config: TokenizerConfig) -> str | None:
    """What speaks against a tokenizer: the ids of the templates stand for other words; None if nothing does.

    The words are those of the question's template, or where there is none of any other.
    """
    found = []
    for skill, words in _TEMPLATE_WORDS.items():
        template = config.templates.get(skill)
        if not template:
            continue
        ids = template.get("prefix") or next(iter(template.values()))
        text = tokenizer.decode(ids)
        if any(word in text.lower() for word in words):
            return None
        found.append(f"the ids {ids} are {text[:40]!r}, not '{words[0]}'")
        if skill == "query":
            break
    return found[0] if found else None


class CodePointTokenizer:
    """The tokenizer of reference sets that carry no tokenizer: 100 + code point in, `<id>` out."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [FIRST_CODE_POINT + ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return "".join(f"<{i}>" for i in ids)


class MoondreamPrompts:
    """Prompts of one model: the config's templates around encoded words; a `closed` one knows names only."""

    __slots__ = ("_closed", "_config", "_path_tokens", "_templates", "_tokenizer", "_vocab_size", "eos_id")

    def __init__(
        self, config: TokenizerConfig, tokenizer: TextTokenizer, closed: bool = False, vocab_size: int = 51200
    ) -> None:
        self._closed, self._vocab_size = closed, vocab_size
        self._path_tokens: PathTokens | None = None
        self._config, self._templates = config, config.templates
        self.eos_id = config.eos_id
        self._tokenizer = tokenizer

    def can(self, skill: str) -> bool:
        """Whether the model has a template for 'detect', 'point', 'segment', 'query' or 'caption'.

        For 'gaze' there is none: it is asked in words, of every model that points at what words say.
        """
        if skill in ("detect", "point", "gaze") and self._config.in_words:
            return False  # these begin an object with any token but the end; ours do with the coordinate token
        if skill == "gaze":
            return bool(self._templates.get("point")) and not self._closed
        return bool(self._templates.get(skill))

    def objects(self, skill: str, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Ids that ask for all objects of a name; `skill` is 'detect' or 'point'. References stand before the name.

        Raises:
            PromptError: for references to a model that knows names alone.
        """
        if refs and self._closed:
            raise PromptError("this model takes no references: ask for a name alone")
        template = self._templates[skill]
        return [*template["prefix"], *self._marks(refs), *self.ids(f" {label}"), *template["suffix"]]

    def query(self, question: str, refs: Sequence[Ref] = (), reasoning: bool = False) -> list[int]:
        """Ids that ask a question: no space before it, and behind it the suffix as often as the reference has it.

        With `reasoning` the thinking token stands in place of the last suffix. Models that are prompted in words have
        a space before the question, and the suffix once.
        """
        template, config = self._templates["query"], self._config
        if config.in_words:
            return [*template["prefix"], *self.ids(f" {question}"), *template["suffix"]]
        last = template.get("reasoning_prefix", [config.thinking_id]) if reasoning else template["suffix"]
        before = (config.query_suffixes - 1) * template["suffix"]
        return [*template["prefix"], *self._marks(refs), *self.ids(question), *before, *last]

    def segment(self, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Ids that ask for the outline of an object: references, and the name without a space before it."""
        template = self._templates["segment"]
        return [*template["prefix"], *self._marks(refs), *self.ids(label), *template["suffix"]]

    @property
    def path_tokens(self) -> PathTokens:
        """Every token of the vocabulary that is a command, a minus sign or an integer, whatever space it has."""
        if self._path_tokens is None:
            commands, minus, numbers = dict[int, str](), list[int](), dict[int, int]()
            for token in range(_LAST_MARK + 1, self._vocab_size):
                text = self._tokenizer.decode([token]).strip()
                if text in _COMMANDS:
                    commands[token] = text
                elif text == "-":
                    minus.append(token)
                elif text.isascii() and text.isdigit() and len(text) < 4 and int(text) <= _LARGEST:
                    numbers[token] = int(text)
            eos = self.eos_id
            self._path_tokens = PathTokens(eos, commands, frozenset(minus), numbers, lambda one: self.text([one]))
        return self._path_tokens

    def _marks(self, refs: Sequence[Ref]) -> list[int]:
        """Tokens in whose place the values of references stand: two of a point, three of a box."""
        config = self._config
        return [token for ref in refs for token in (config.coord_id, config.coord_id, config.size_id)[: len(ref)]]

    def ref_values(self, skill: str, refs: Sequence[Ref]) -> dict[int, tuple[float, ...]]:
        """Centres of what a prompt refers to, and sizes of boxes, behind the skill's prefix."""
        numbers: list[tuple[float, ...]] = []
        for ref in refs:
            if len(ref) == 2:
                numbers += [(ref[0],), (ref[1],)]
            else:
                x1, y1, x2, y2 = ref
                numbers += [((x1 + x2) / 2,), ((y1 + y2) / 2,), (x2 - x1, y2 - y1)]
        return dict(enumerate(numbers, start=len(self._templates[skill]["prefix"])))

    @property
    def reasoning(self) -> ReasoningTokens | None:
        """The config's tokens; None for checkpoints of before, whose answers do not begin behind the answer token."""
        config, template = self._config, self._templates.get("query") or {}
        suffix = tuple(template.get("post_reasoning_prefix", template.get("suffix", ())))
        if suffix[:1] != (config.answer_id,):
            return None
        return ReasoningTokens(
            config.answer_id,
            suffix,
            (config.eos_id, config.size_id) if config.suppresses else (),
            config.coord_id,
            frozenset({config.start_ground_points_id, config.end_ground_id}),
            config.eos_id,
        )

    def gaze(self, eye: tuple[float, float]) -> tuple[list[int], dict[int, tuple[float, ...]]]:
        """Ids and coordinates as the reference's `detect_gaze` puts them: in words, not by a template."""
        before, after = self.ids("\n\nPoint:"), self.ids(" gaze\n\n")
        ids = [*before, self._config.coord_id, self._config.coord_id, *after]
        return ids, {len(before): (eye[0],), len(before) + 1: (eye[1],)}

    def caption(self, length: str) -> list[int]:
        """Ids that ask for a description of some length.

        Raises:
            PromptError: if the model has not learned that one.
        """
        lengths = self._templates["caption"]
        if length not in lengths:
            raise PromptError(f"this model writes no {length} captions: ask for {' or '.join(lengths)}")
        return list(lengths[length])

    def ids(self, words: str) -> list[int]:
        """Ids of words as they are."""
        return self._tokenizer.encode(words)

    def text(self, ids: Sequence[int]) -> str:
        """Text of an answer."""
        return self._tokenizer.decode(ids)

    def wrap(self, skill: str, words: str) -> list[int]:
        """Ids of a skill's template around words as they are."""
        template = self._templates[skill]
        return [*template["prefix"], *self.ids(words), *template["suffix"]]
