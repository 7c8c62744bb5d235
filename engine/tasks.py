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


@dataclass(slots=True, frozen=True)
class Query:
    """Answer `question` in free text of at most `max_tokens` tokens."""

    question: str
    max_tokens: int = 768


@dataclass(slots=True, frozen=True)
class Caption:
    """Describe the picture in free text of at most `max_tokens` tokens."""

    length: CaptionLength = "normal"
    max_tokens: int = 768


Task = Detect | Point | Query | Caption
