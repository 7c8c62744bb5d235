"""Prompt templates and tokenizers of Moondream models."""

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
"""Hub repository of the published models' tokenizer. The weight repositories contain an outdated tokenizer."""
_TEMPLATE_WORDS = {
    "query": ("query", "question"),
    "detect": ("detect",),
    "point": ("point",),
    "caption": ("describe", "caption"),
}
"""Words that the template IDs decode to, without and with `TokenizerConfig.in_words`."""
_LAST_MARK = 20  # token IDs up to this one are special tokens, not text
_COMMANDS, _LARGEST = ("M", "L", "C", "Z"), 960  # path commands, and the largest number in a path
_SMALL = 4096  # only small random test models have a smaller vocabulary


class TokenizerError(ModelFilesError):
    """Error: a model's tokenizer is missing, corrupt, or does not match its prompt templates."""


class TextTokenizer(Protocol):
    """Converts text to token IDs, and token IDs to text."""

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token IDs."""


class FileTokenizer:
    """Tokenizer that is loaded from a tokenizer.json file."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token IDs."""
        return str(self._tokenizer.decode(list(ids)))


def tokenizer_of(folder: Path, config: MoondreamConfig) -> TextTokenizer:
    """Return the tokenizer of a model folder.

    The function tries tokenizer.json in the folder, then downloads the published tokenizer (`PUBLISHED`) from the
    Hugging Face Hub. The tokenizer must match the prompt templates in config.json. Tiny test models without a
    tokenizer.json use Unicode code points as tokens.

    Raises:
        TokenizerError: if no tokenizer matches. The message says what to do.
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
        raise TokenizerError(f"{path} {reason}; put the tokenizer.json of GPT-2 into {folder}")
    try:
        fetched = _read(fetch_file(PUBLISHED, "tokenizer.json"))
    except UnknownModelError as error:
        raise TokenizerError(f"{path} {reason}; {advice} ({error})") from error
    if misfit := _misfit(fetched, config.tokenizer):
        raise TokenizerError(f"{path} {reason}; the tokenizer of {PUBLISHED} does not fit config.json either: {misfit}")
    return fetched


def _read(path: Path) -> FileTokenizer:
    try:
        return FileTokenizer(path)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: {error}") from error


def _misfit(tokenizer: TextTokenizer, config: TokenizerConfig) -> str | None:
    """Return why a tokenizer does not match the prompt templates, or None if it matches.

    The token IDs of the templates must decode to the expected words.
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
        found.append(f"the token IDs {ids} decode to {text[:40]!r} instead of '{words[0]}'")
        if skill == "query":
            break
    return found[0] if found else None


class CodePointTokenizer:
    """Tokenizer for test models without tokenizer.json.

    The token ID of a character is its code point + 100. Decoding returns the IDs as text, such as `<197>`.
    """

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text."""
        return [FIRST_CODE_POINT + ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token IDs."""
        return "".join(f"<{i}>" for i in ids)


class MoondreamPrompts:
    """Creates the prompts of one model, as token IDs: a template of the model, filled with text such as a label.

    A model with a closed vocabulary (`closed`) supports labels, but no reference points or boxes in prompts.
    """

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
        """Return whether the model supports a skill.

        'detect', 'point', 'segment', 'query' and 'caption' need a prompt template. 'gaze' needs the template of 'point'
        and an open vocabulary.
        """
        if skill in ("detect", "point", "gaze") and self._config.in_words:
            return False  # unsupported: these models have no coordinate token to start an object
        if skill == "gaze":
            return bool(self._templates.get("point")) and not self._closed
        return bool(self._templates.get(skill))

    def objects(self, skill: str, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Return the token IDs of the prompt that asks for all objects with a label.

        Args:
            skill: 'detect' or 'point'.
            label: name or phrase that describes the objects.
            refs: points and boxes that show where to search, as fractions of the image. They precede the label.

        Raises:
            PromptError: if `refs` is not empty and the model has a closed vocabulary.
        """
        if refs and self._closed:
            raise PromptError("this model does not support refs (reference points and boxes); use only a label")
        template = self._templates[skill]
        return [*template["prefix"], *self._marks(refs), *self.ids(f" {label}"), *template["suffix"]]

    def query(self, question: str, refs: Sequence[Ref] = (), reasoning: bool = False) -> list[int]:
        """Return the token IDs of a question's prompt: the template's prefix, references, question and suffix.

        With `reasoning`, the thinking token replaces the suffix, or the last one if the template repeats it.
        """
        template, config = self._templates["query"], self._config
        if config.in_words:
            return [*template["prefix"], *self.ids(f" {question}"), *template["suffix"]]
        last = template.get("reasoning_prefix", [config.thinking_id]) if reasoning else template["suffix"]
        before = (config.query_suffixes - 1) * template["suffix"]
        return [*template["prefix"], *self._marks(refs), *self.ids(question), *before, *last]

    def segment(self, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Return the token IDs of the segmentation prompt: placeholders for `refs`, then the label."""
        template = self._templates["segment"]
        return [*template["prefix"], *self._marks(refs), *self.ids(label), *template["suffix"]]

    @property
    def path_tokens(self) -> PathTokens:
        """Token IDs for SVG paths: all tokens that decode to a command letter, a minus sign or an integer.

        Whitespace around the decoded text is ignored.
        """
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
        """Return placeholder token IDs for reference points (two each) and reference boxes (three each).

        The embeddings of the placeholders are later replaced by embeddings of coordinates and sizes.
        """
        config = self._config
        return [token for ref in refs for token in (config.coord_id, config.coord_id, config.size_id)[: len(ref)]]

    def ref_values(self, skill: str, refs: Sequence[Ref]) -> dict[int, tuple[float, ...]]:
        """Return the coordinates and sizes of reference points and boxes, keyed by position in the prompt."""
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
        """Special tokens for reasoning, or None if the model has no token that starts the answer."""
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
        """Return the token IDs of the gaze prompt, and the coordinates of the eye, keyed by position in the prompt.

        The prompt is that of `detect_gaze` in the reference implementation.
        """
        before, after = self.ids("\n\nPoint:"), self.ids(" gaze\n\n")
        ids = [*before, self._config.coord_id, self._config.coord_id, *after]
        return ids, {len(before): (eye[0],), len(before) + 1: (eye[1],)}

    def caption(self, length: str) -> list[int]:
        """Return the token IDs of the prompt for a caption of this length, such as 'short'.

        Raises:
            PromptError: if the model does not support the length.
        """
        lengths = self._templates["caption"]
        if length not in lengths:
            raise PromptError(f"this model does not support {length} captions; use {' or '.join(lengths)}")
        return list(lengths[length])

    def ids(self, words: str) -> list[int]:
        """Return the token IDs of a text, without a prompt template."""
        return self._tokenizer.encode(words)

    def text(self, ids: Sequence[int]) -> str:
        """Return the decoded text of an answer's token IDs."""
        return self._tokenizer.decode(ids)

    def wrap(self, skill: str, words: str) -> list[int]:
        """Return the token IDs of a text inside the prompt template of a skill."""
        template = self._templates[skill]
        return [*template["prefix"], *self.ids(words), *template["suffix"]]
