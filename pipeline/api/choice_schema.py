"""Supports chat completions that return one of several choices in the format of a JSON schema.

The schema must be a string with an `enum`: either the whole document, or the only property of an object.

OpenAI's `logprobs` then contains three tokens: the JSON text before the choice, the choice, and the JSON text after the
choice. The other choices are the alternatives of the second token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.engine.results import Text

_MAX_CHOICES = 64
_IMPOSSIBLE = -9999.0  # OpenAI's value for the logarithm of 0


@dataclass(slots=True, frozen=True)
class ChoiceSchema:
    """A parsed JSON schema for an answer that is one of several choices.

    Attributes:
        choices: the allowed answers.
        key: property that contains the answer; None if the answer is the whole document.
    """

    choices: tuple[str, ...]
    key: str | None

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> ChoiceSchema | None:
        """Parse a JSON schema with an `enum` of choices. Return None if the schema has no `enum`.

        Raises:
            ValueError: if the `enum` is not a list of 1 to 64 non-empty strings.
        """
        definitions = schema.get("$defs") or schema.get("definitions") or {}
        properties = schema.get("properties")
        key, part = None, schema
        if isinstance(properties, Mapping) and len(properties) == 1:
            key, part = next(iter(properties.items()))
        if isinstance(part, Mapping) and isinstance(part.get("$ref"), str) and isinstance(definitions, Mapping):
            part = definitions.get(part["$ref"].rpartition("/")[2], {})
        if not isinstance(part, Mapping) or "enum" not in part:
            return None
        values = part["enum"]
        if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
            raise ValueError("the enum of the JSON schema should be a list of non-empty strings")
        if not 1 <= len(values) <= _MAX_CHOICES:
            raise ValueError(f"the JSON schema's enum should have 1 to {_MAX_CHOICES} values, got {len(values)}")
        return cls(tuple(values), key)

    def answer(self, choice: str) -> str:
        """Return a JSON document that contains the choice and matches the schema."""
        return "".join(self._parts(choice))

    def logprobs(self, text: Text, most: int) -> dict[str, Any]:
        """Return the probabilities of the choices in the format of OpenAI's `logprobs`.

        Args:
            text: the model's answer, with the probability of each choice.
            most: maximum number of choices to return, the most probable first.
        """
        before, _, behind = self._parts(text.text)
        probabilities = dict(text.probabilities or {text.text: 1.0})
        ranked = sorted(probabilities.items(), key=lambda one: -one[1])[:most]
        chosen = _token(_escaped(text.text), probabilities[text.text])
        alternatives = [_token(_escaped(choice), probability) for choice, probability in ranked]
        content = [
            {**_token(before, 1.0), "top_logprobs": []},
            {**chosen, "top_logprobs": alternatives},
            {**_token(behind, 1.0), "top_logprobs": []},
        ]
        return {"content": content, "refusal": None}

    def _parts(self, choice: str) -> tuple[str, str, str]:
        if self.key is None:
            return '"', _escaped(choice), '"'
        return f'{{{json.dumps(self.key)}: "', _escaped(choice), '"}'


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _token(text: str, probability: float) -> dict[str, Any]:
    logprob = math.log(probability) if probability > 0 else _IMPOSSIBLE
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}
