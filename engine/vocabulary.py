"""From what a person types to the names a closed-vocabulary model was trained on. Knows no model and no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from saccade.engine.errors import UnknownClassError

_SEPARATORS = re.compile(r"\s*(?:,|;|/|&|\bor\b|\band\b)\s*", re.IGNORECASE)


class Vocabulary:
    """The closed list of names of one model, with synonyms; a synonym may stand for several names ('vehicle')."""

    __slots__ = ("_known", "classes", "model")

    def __init__(self, model: str, classes: Iterable[str], synonyms: Mapping[str, Iterable[str]]) -> None:
        self.model = model
        self.classes = tuple(classes)
        self._known = {phrase.lower(): tuple(names) for phrase, names in synonyms.items()}
        self._known |= {name.lower(): (name,) for name in self.classes}

    def resolve(self, labels: Iterable[str]) -> list[str]:
        """Names of the model for phrases such as 'People', 'cars', 'truck or bus', in order, none twice.

        Raises:
            UnknownClassError: for the first phrase that means none of the names.
            ValueError: for what is no text.
        """
        found: dict[str, None] = {}
        for label in labels:
            if not isinstance(label, str):
                raise ValueError(f"a label is one text, such as 'person' or 'truck or bus'; got {label!r:.100}")
            phrases = [p for p in _SEPARATORS.split(label) if p.strip()]
            for phrase in [label] if self._lookup(label) or not phrases else phrases:
                names = self._lookup(phrase)
                if names is None:
                    close = difflib.get_close_matches(phrase.lower(), self._known, n=1, cutoff=0.75)
                    raise UnknownClassError(phrase, self.model, self.classes, close[0] if close else None)
                found |= dict.fromkeys(names)
        return list(found)

    def _lookup(self, phrase: str) -> tuple[str, ...] | None:
        words = re.sub(r"^(?:a|an|the|any|all|every)\s+", "", " ".join(phrase.lower().replace("_", " ").split()))
        for form in _singulars(words):
            if form in self._known:
                return self._known[form]
        return None


def _singulars(word: str) -> list[str]:
    """The word and what it may be the plural of."""
    forms = [word]
    if word.endswith("ies"):
        forms.append(word[:-3] + "y")
    if word.endswith("es"):
        forms.append(word[:-2])
    if word.endswith("s"):
        forms.append(word[:-1])
    return forms
