"""What can be asked of a picture. Knows nothing of models: a task is a plain value that any of them may be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CaptionLength = Literal["short", "normal", "long"]


@dataclass(slots=True, frozen=True)
class Detect:
    """Find every `label` as a box.

    Attributes:
        label: what to find, one name or phrase.
        max_objects: stop after this many.
        conf: an object is begun while its score, p(coord) / (p(coord) + p(eos)), is above this. 0.5 is the model's own
            greedy choice; lower values trade precision for recall.
    """

    label: str
    max_objects: int = 50
    conf: float = 0.5


@dataclass(slots=True, frozen=True)
class Point:
    """Find every `label` as its centre point; attributes as for `Detect`."""

    label: str
    max_objects: int = 50
    conf: float = 0.5


@dataclass(slots=True, frozen=True, kw_only=True)
class Wording:
    """How free text is written: what `Query` and `Caption` share. Given by name only.

    Attributes:
        temperature: 0 takes the likeliest token each time; 1 draws as the model says; higher values are bolder.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this; above 0, to 1 for all.
        stop: strings that end the text; it is cut before the first of them. One may be given as it is.
        seed: the same seed draws the same answer to the same request; None is another one each time.

    Raises:
        ValueError: if one of them is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    stop: str | tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is 0 or more; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is above 0 and at most 1; got {self.top_p}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not all(self.stop):
            raise ValueError("a stop string may not be empty")


@dataclass(slots=True, frozen=True)
class Query(Wording):
    """Answer `question` in free text of at most `max_tokens` tokens, or with one of `choices`.

    Attributes:
        choices: if any, the answer is one of these strings; `max_tokens` and `stop` mean nothing then.
    """

    question: str
    max_tokens: int = 768
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Wording.__post_init__(self)
        if isinstance(self.choices, str):
            raise ValueError(f"choices are several strings; got one, '{self.choices}'")
        object.__setattr__(self, "choices", tuple(self.choices))
        if not all(self.choices):
            raise ValueError("a choice may not be empty")


@dataclass(slots=True, frozen=True)
class Caption(Wording):
    """Describe the picture in free text of at most `max_tokens` tokens."""

    length: CaptionLength = "normal"
    max_tokens: int = 768


Task = Detect | Point | Query | Caption
