"""Writes rules into the text of a configuration, and as a text of their own. Knows no files.

The text is cut where the YAML parser says that rules begin and end, and what does not change stays as it was written,
to the byte. An editor of whole documents (ruamel.yaml) loses the comments behind a list item that it deletes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import TypeAdapter

from saccade.pipeline.events.settings import Rules, RuleSettings

_RULES: TypeAdapter[list[RuleSettings]] = TypeAdapter(Rules)
_TIMES = ("cooldown", "again", "keep")
_UNITS = {"d": 86400, "h": 3600, "m": 60}


def text_of_rules(rules: Sequence[RuleSettings], indent: str = "") -> str:
    """Rules as a list in YAML, as a person would write it."""
    return "".join(_item(rule, indent) for rule in rules)


def with_rules(text: str, at: tuple[str | int, ...], rules: Sequence[RuleSettings]) -> str:
    """The text of a configuration with other rules in it.

    Args:
        text: of the configuration.
        at: the path of the mapping that has them, such as ("streams", 0).
        rules: in their order. Those that the text has are left as they are written, with their comments.

    Raises:
        yaml.YAMLError, KeyError, IndexError, TypeError, ValueError: if the text has another shape.
    """
    place = _node(yaml.compose(text, Loader=yaml.SafeLoader), at)
    if not isinstance(place, yaml.MappingNode):
        raise TypeError("no mapping")
    value = next((value for key, value in place.value if key.value == "rules"), None)
    if value is None:
        changed = _added(text, place, rules)
    elif isinstance(value, yaml.SequenceNode) and not value.flow_style and rules:
        start, end = _line_of(text, value.start_mark.index), _end_of_line(text, _end(value))
        changed = text[:start] + _edited(text, value, rules) + text[end:]
    else:
        before = text[: value.start_mark.index]
        changed = f"{before}{'' if before[-1:].isspace() else ' '}{_flow(rules)}{text[_end(value) :]}"
    if _read(changed, at) != list(rules):
        raise ValueError("the rules read back are others")
    return changed


def _read(text: str, at: tuple[str | int, ...]) -> list[RuleSettings]:
    values: Any = yaml.safe_load(text)
    for step in at:
        values = values[step]
    return _RULES.validate_python(values["rules"])


def _node(node: yaml.Node | None, at: tuple[str | int, ...]) -> yaml.Node | None:
    for step in at:
        if isinstance(step, int) and isinstance(node, yaml.SequenceNode):
            node = node.value[step]
        elif isinstance(node, yaml.MappingNode):
            node = {key.value: value for key, value in node.value}[step]
        else:
            raise TypeError("another shape")
    return node


# ---- a list with an item in each line or several


def _edited(text: str, node: yaml.SequenceNode, rules: Sequence[RuleSettings]) -> str:
    """The lines of a list of rules, changed."""
    old = {rule.name: rule for rule in _RULES.validate_python(_value(node))}
    indent = " " * (node.start_mark.index - _line_of(text, node.start_mark.index))
    parts: dict[
        str, tuple[str, str, int, yaml.Node]
    ] = {}  # by name: what is above an item, its lines, where they begin
    last = _line_of(text, node.start_mark.index)
    for name, item in zip(old, node.value, strict=True):
        start = _dash(text, last)
        end = _end_of_line(text, _end(item))
        lines = text[start:end] if text[start:end].endswith("\n") else f"{text[start:end]}\n"
        parts[name] = text[last:start], lines, start, item
        last = end
    written = []
    for rule in rules:
        if rule.name not in old:
            written.append(_item(rule, indent))
            continue
        above, lines, start, item = parts[rule.name]
        changed = lines if old[rule.name] == rule else _changed(lines, start, item, old[rule.name], rule)
        written.append(above + (_item(rule, indent) if changed is None else changed))
    return "".join(written)


def _changed(lines: str, start: int, item: yaml.Node, old: RuleSettings, new: RuleSettings) -> str | None:
    """The lines of one rule, which begin at `start` of the text, with other values; None if it must be written anew."""
    if not isinstance(item, yaml.MappingNode) or item.flow_style:
        return None
    nodes = {key.value: (key, value) for key, value in item.value}
    pad = " " * (item.start_mark.index - start)
    wanted = _values(new)
    edits: list[tuple[int, int, str]] = []  # from, to, and what comes there
    for name in RuleSettings.model_fields:
        if getattr(old, name) == getattr(new, name):
            continue
        if name not in nodes:
            edits.append((len(lines), len(lines), f"{pad}{name}: {_block(wanted[name])}\n"))
            continue
        key, value = nodes[name]
        if name not in wanted:
            if key.start_mark.index == item.start_mark.index:
                return None  # it stands behind the dash
            begin, end = _line_of(lines, key.start_mark.index - start), _end_of_line(lines, _end(value) - start)
            edits.append((begin, end, ""))
        elif isinstance(value, yaml.ScalarNode) and value.style not in ("|", ">"):
            edits.append((value.start_mark.index - start, value.end_mark.index - start, _block(wanted[name])))
        else:
            return None
    for begin, end, inserted in sorted(edits, key=lambda edit: edit[:2])[::-1]:
        lines = lines[:begin] + inserted + lines[end:]
    return lines


def _dash(text: str, after: int) -> int:
    """Where the line of the next item begins."""
    found = re.compile(r"^[ \t]*-(?=\s)", re.MULTILINE).search(text, after)
    if found is None:
        raise ValueError("no item")
    return found.start()


# ---- none, or a list in one line


def _added(text: str, place: yaml.MappingNode, rules: Sequence[RuleSettings]) -> str:
    """The text with rules in a mapping that has none."""
    if place.flow_style:
        end = place.end_mark.index - 1
        return f"{text[:end].rstrip()}, rules: {_flow(rules)}{text[end:]}"
    first, _ = place.value[0]
    pad = " " * (first.start_mark.index - _line_of(text, first.start_mark.index))
    end = _end_of_line(text, _end(place))
    before = text[:end] if text[:end].endswith("\n") else f"{text[:end]}\n"
    written = f"{pad}rules:\n{text_of_rules(rules, f'{pad}  ')}" if rules else f"{pad}rules: []\n"
    return before + written + text[end:]


def _flow(rules: Sequence[RuleSettings]) -> str:
    return f"[{', '.join(_inline(_values(rule)) for rule in rules)}]"


# ---- how a rule is written


def _item(rule: RuleSettings, indent: str) -> str:
    lines = [f"{name}: {_block(value)}" for name, value in _values(rule).items()]
    return "".join(f"{indent}{'  ' if number else '- '}{line}\n" for number, line in enumerate(lines))


def _values(rule: RuleSettings) -> dict[str, Any]:
    """What of a rule is not by default."""
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


def _block(value: Any) -> str:
    """A value in one line, behind the key of a mapping in lines of its own."""
    if not isinstance(value, str):
        return _inline(value)
    style = '"' if "\n" in value else None
    written = yaml.safe_dump(value, width=10**9, allow_unicode=True, default_style=style)
    return str(written).removesuffix("\n").removesuffix("\n...")


def _inline(value: Any) -> str:
    """A value in one line, which may stand in any place."""
    if isinstance(value, dict) and value.keys() == {"on", "off"}:  # which YAML takes for booleans, and so do we
        return f"{{on: {value['on']:g}, off: {value['off']:g}}}"
    listed = yaml.safe_dump([value], default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return listed.strip()[1:-1]


# ---- places in a text


def _value(node: yaml.Node) -> Any:
    return yaml.constructor.SafeConstructor().construct_document(node)


def _end(node: yaml.Node) -> int:
    """Where the last value in a node ends; the parser's own end is behind the comments that follow."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_of(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _end_of_line(text: str, at: int) -> int:
    if at and text[at - 1] == "\n":  # behind a text of several lines
        return at
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1
