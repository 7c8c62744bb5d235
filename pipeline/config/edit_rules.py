"""Writes rules as YAML, either into the text of a configuration or as a list."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import yaml
from pydantic import TypeAdapter

from saccade.pipeline.config.yaml_text import (
    At,
    item_lines,
    node_at,
    node_in,
    root_of,
    value_of,
    with_item,
    with_key,
    without_item,
    without_key,
)
from saccade.pipeline.events.settings import Rules, RuleSettings

_RULES: TypeAdapter[list[RuleSettings]] = TypeAdapter(Rules)
_TIMES = ("cooldown", "again", "keep")
_UNITS = {"d": 86400, "h": 3600, "m": 60}


def text_of_rules(rules: Sequence[RuleSettings], indent: str = "") -> str:
    """Return rules as a YAML list."""
    return "".join(item_lines(values_of_rule(rule), indent) for rule in rules)


def with_rules(text: str, at: At, rules: Sequence[RuleSettings]) -> str:
    """Return the YAML text of a configuration with new rules for one stream.

    Args:
        text: YAML text of the configuration.
        at: path of the mapping that contains the rules, such as ("streams", 0).
        rules: all rules of the stream. An unchanged rule keeps its text and comments.

    Raises:
        yaml.YAMLError, KeyError, IndexError, TypeError, ValueError: if the text has no mapping at this path.
    """
    listed = (*at, "rules")
    place = node_at(root_of(text), at)
    if not isinstance(place, yaml.MappingNode):
        raise TypeError(f"the YAML text has no mapping at path {list(at)}")
    node = next((value for key, value in place.value if key.value == "rules"), None)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and rules:
        changed = _edited(text, listed, _RULES.validate_python(value_of(node)), rules)
    else:
        changed = with_key(text, at, "rules", [values_of_rule(rule) for rule in rules])
    if _RULES.validate_python(value_of(node_in(changed, listed))) != list(rules):
        raise ValueError("the rules in the changed YAML text differ from the requested rules")
    return changed


def _edited(text: str, at: At, old: Sequence[RuleSettings], new: Sequence[RuleSettings]) -> str:
    before, after = ([rule.name for rule in rules] for rules in (old, new))
    for kind, first, last, begin, end in reversed(SequenceMatcher(None, before, after, autojunk=False).get_opcodes()):
        if kind == "equal":
            for number, one, other in zip(range(first, last), old[first:last], new[begin:end], strict=True):
                text = _with_rule(text, at, number, one, other)
            continue
        for rule in reversed(new[begin:end]):  # inserted first: the list never becomes empty
            text = with_item(text, at, values_of_rule(rule), last)
        for number in reversed(range(first, last)):
            text = without_item(text, at, number)
    return text


def _with_rule(text: str, at: At, number: int, old: RuleSettings, new: RuleSettings) -> str:
    place, values = (*at, number), values_of_rule(new)
    if old != new and not isinstance(node_in(text, place), yaml.MappingNode):  # one line such as cats=cat
        return without_item(with_item(text, at, values, number + 1), at, number)
    changed = [key for key in RuleSettings.model_fields if getattr(old, key) != getattr(new, key)]
    for key in (one for one in changed if one in values):
        text = with_key(text, place, key, values[key])
    for key in (one for one in changed if one not in values):
        text = without_key(text, place, key)
    return text


# ---- how a rule is written


def values_of_rule(rule: RuleSettings) -> dict[str, Any]:
    """Return the settings of a rule that differ from the defaults."""
    values = rule.model_dump(mode="json", exclude_defaults=True)
    if "threshold" in values:
        values["threshold"] = rule.threshold.model_dump()
    for name in _TIMES:
        if values.get(name) is not None:
            values[name] = _seconds(values[name])
    attributes = values.get("attributes", {})
    for name, attribute in attributes.items():
        attributes[name] = attribute if attribute.get("choices") else attribute["question"]
    return values


def _seconds(value: float) -> str:
    unit, size = next(((u, s) for u, s in _UNITS.items() if value >= s and value % s == 0), ("s", 1))
    return f"{value / size:.10g}{unit}"
