"""Writes rules into the text of a configuration, and as separate text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import TypeAdapter

from saccade.pipeline.config.yaml_text import (
    block_text,
    dash_line,
    end_of,
    item_lines,
    line_end,
    line_start,
    node_at,
    value_of,
    with_key,
)
from saccade.pipeline.events.settings import Rules, RuleSettings

_RULES: TypeAdapter[list[RuleSettings]] = TypeAdapter(Rules)
_TIMES = ("cooldown", "again", "keep")
_UNITS = {"d": 86400, "h": 3600, "m": 60}


def text_of_rules(rules: Sequence[RuleSettings], indent: str = "") -> str:
    """Return rules as a YAML list."""
    return "".join(item_lines(values_of_rule(rule), indent) for rule in rules)


def with_rules(text: str, at: tuple[str | int, ...], rules: Sequence[RuleSettings]) -> str:
    """Return the text of a configuration with new rules.

    Args:
        text: text of the configuration.
        at: path of the mapping that contains the rules, such as ("streams", 0).
        rules: the new rules in order. Unchanged rules keep their text and comments.

    Raises:
        yaml.YAMLError, KeyError, IndexError, TypeError, ValueError: if the text has no mapping at this path.
    """
    place = node_at(yaml.compose(text, Loader=yaml.SafeLoader), at)
    if not isinstance(place, yaml.MappingNode):
        raise TypeError("no mapping")
    value = next((value for key, value in place.value if key.value == "rules"), None)
    if isinstance(value, yaml.SequenceNode) and not value.flow_style and rules:
        start, end = line_start(text, value.start_mark.index), line_end(text, end_of(value))
        changed = text[:start] + _edited(text, value, rules) + text[end:]
    else:
        changed = with_key(text, at, "rules", [values_of_rule(rule) for rule in rules])
    if _read(changed, at) != list(rules):
        raise ValueError("the written rules differ when read back")
    return changed


def _read(text: str, at: tuple[str | int, ...]) -> list[RuleSettings]:
    values: Any = yaml.safe_load(text)
    for step in at:
        values = values[step]
    return _RULES.validate_python(values["rules"])


# ---- a list with an item in each line or several


def _edited(text: str, node: yaml.SequenceNode, rules: Sequence[RuleSettings]) -> str:
    """Return the lines of a list of rules with the new rules."""
    old = {rule.name: rule for rule in _RULES.validate_python(value_of(node))}
    indent = " " * (node.start_mark.index - line_start(text, node.start_mark.index))
    parts: dict[
        str, tuple[str, str, int, yaml.Node]
    ] = {}  # by name: lines above the item, its own lines, and their start
    last = line_start(text, node.start_mark.index)
    for name, item in zip(old, node.value, strict=True):
        start = dash_line(text, last)
        end = line_end(text, end_of(item))
        lines = text[start:end] if text[start:end].endswith("\n") else f"{text[start:end]}\n"
        parts[name] = text[last:start], lines, start, item
        last = end
    written = []
    for rule in rules:
        if rule.name not in old:
            written.append(item_lines(values_of_rule(rule), indent))
            continue
        above, lines, start, item = parts[rule.name]
        changed = lines if old[rule.name] == rule else _changed(lines, start, item, old[rule.name], rule)
        written.append(above + (item_lines(values_of_rule(rule), indent) if changed is None else changed))
    return "".join(written)


def _changed(lines: str, start: int, item: yaml.Node, old: RuleSettings, new: RuleSettings) -> str | None:
    """Return the lines of one rule with new values, or None if the rule must be rewritten."""
    if not isinstance(item, yaml.MappingNode) or item.flow_style:
        return None
    nodes = {key.value: (key, value) for key, value in item.value}
    pad = " " * (item.start_mark.index - start)
    wanted = values_of_rule(new)
    edits: list[tuple[int, int, str]] = []  # start, end and replacement
    for name in RuleSettings.model_fields:
        if getattr(old, name) == getattr(new, name):
            continue
        if name not in nodes:
            edits.append((len(lines), len(lines), f"{pad}{name}: {block_text(wanted[name])}\n"))
            continue
        key, value = nodes[name]
        if name not in wanted:
            if key.start_mark.index == item.start_mark.index:
                return None  # the key follows the dash
            begin, end = line_start(lines, key.start_mark.index - start), line_end(lines, end_of(value) - start)
            edits.append((begin, end, ""))
        elif isinstance(value, yaml.ScalarNode) and value.style not in ("|", ">"):
            edits.append((value.start_mark.index - start, value.end_mark.index - start, block_text(wanted[name])))
        else:
            return None
    for begin, end, inserted in sorted(edits, key=lambda edit: edit[:2])[::-1]:
        lines = lines[:begin] + inserted + lines[end:]
    return lines


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
