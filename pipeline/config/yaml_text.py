"""Edits keys and list items of a YAML text. All other text stays unchanged."""

from __future__ import annotations

from typing import Any

import yaml  # not ruamel.yaml, which loses the comments after a deleted list item

At = tuple[str | int, ...]
"""The path of a node, such as ("streams", 0)."""


def root_of(text: str) -> yaml.Node | None:
    """Return the root node of a YAML text, or None for an empty text.

    Raises:
        yaml.YAMLError: if the text is invalid YAML.
    """
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    return node


def with_key(text: str, at: At, key: str, value: Any) -> str:
    """Return the YAML text with a new value for a key in the mapping at a path.

    Args:
        text: text of the document.
        at: path of the mapping.
        key: the key to set. A missing key is added.
        value: new value: a mapping, list, string, number, boolean or None.

    Raises:
        yaml.YAMLError, KeyError, IndexError, TypeError: if the text has no mapping at this path.
    """
    place = _mapping_at(text, at)
    found = _entry(place, key)
    if found is None:
        return _added(text, place, key, value)
    name, old = found
    written = block_text(value)
    if isinstance(old, yaml.CollectionNode) and not old.flow_style:
        between = text[name.end_mark.index : old.start_mark.index]
        if "#" not in between:
            return f"{text[: name.end_mark.index]}: {written}{text[end_of(old) :]}"
        column = name.start_mark.index - line_start(text, name.start_mark.index)
        start = line_start(text, old.start_mark.index)
        return f"{text[:start]}{' ' * (column + 2)}{written}{text[end_of(old) :]}"
    if isinstance(old, yaml.ScalarNode) and old.style in ("|", ">"):
        return f"{text[: old.start_mark.index]}{written}\n{text[end_of(old) :]}"
    if place.flow_style:
        written = inline_text(value)
    before = text[: old.start_mark.index]
    return f"{before}{'' if before[-1:].isspace() else ' '}{written}{text[end_of(old) :]}"


def without_key(text: str, at: At, key: str) -> str:
    """Return the YAML text without a key of the mapping at a path. If the key does not exist, the text is unchanged.

    Raises:
        yaml.YAMLError, KeyError, IndexError, TypeError: if the text has no mapping at this path.
    """
    place = _mapping_at(text, at)
    found = _entry(place, key)
    if found is None:
        return text
    number = next(number for number, (name, _) in enumerate(place.value) if name is found[0])
    name, old = found
    following = place.value[number + 1][0].start_mark.index if number + 1 < len(place.value) else None
    if place.flow_style:
        if following is not None:
            return text[: name.start_mark.index] + text[following:]
        start = end_of(place.value[number - 1][1]) if number else name.start_mark.index
        return text[:start] + text[end_of(old) :]
    start = line_start(text, name.start_mark.index)
    if text[start : name.start_mark.index].strip():  # the key follows the dash of a list item
        if following is None:
            return f"{text[: name.start_mark.index]}{{}}{text[end_of(old) :]}"
        return text[: name.start_mark.index] + text[following:]
    if len(place.value) == 1 and at:
        return f"{text[:start].rstrip()} {{}}\n{text[line_end(text, end_of(old)) :]}"
    return text[:start] + text[line_end(text, end_of(old)) :]


def with_item(text: str, at: At, value: dict[str, Any], number: int | None = None) -> str:
    """Return the YAML text with a mapping added to the list at a path.

    Args:
        text: text of the document.
        at: path of the list.
        value: the new mapping.
        number: index of the item before which the mapping is inserted; None for the end of the list.

    Raises:
        yaml.YAMLError, KeyError, IndexError, TypeError: if the text has no list at this path.
    """
    *above, key = at
    if not above and root_of(text) is None:
        return f"{_ended(text)}{key}:\n{item_lines(value, '  ')}"
    found = _entry(_mapping_at(text, tuple(above)), str(key))
    node = None if found is None else found[1]
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        return with_key(without_key(text, tuple(above), str(key)), tuple(above), str(key), [value])
    if node.flow_style:
        end = node.end_mark.index - 1
        return f"{text[:end].rstrip().removesuffix(',')}, {inline_text(value)}{text[end:]}"
    place = _before(text, node, len(node.value) if number is None else number)
    indent = " " * (node.start_mark.index - line_start(text, node.start_mark.index))
    return _ended(text[:place]) + item_lines(value, indent) + text[place:]


def without_item(text: str, at: At, number: int) -> str:
    """Return the YAML text without an item of the list at a path. Comment lines above the item are also removed.

    Raises:
        yaml.YAMLError, KeyError, IndexError, TypeError: if the text has no list at this path.
    """
    node = node_at(root_of(text), at)
    if not isinstance(node, yaml.SequenceNode):
        raise TypeError(f"the YAML text has no list at path {list(at)}")
    items = node.value
    if len(items) == 1:
        return with_key(text, at[:-1], str(at[-1]), [])
    item = items[number]
    if node.flow_style:
        if number + 1 < len(items):
            return text[: item.start_mark.index] + text[items[number + 1].start_mark.index :]
        return text[: end_of(items[number - 1])] + text[end_of(item) :]
    return text[: _before(text, node, number)] + text[line_end(text, end_of(item)) :]


def _before(text: str, node: yaml.SequenceNode, number: int) -> int:
    """Return the character position at which a list item starts, including the comment lines above the item."""
    return line_end(text, end_of(node.value[number - 1])) if number else line_start(text, node.start_mark.index)


def _mapping_at(text: str, at: At) -> yaml.MappingNode:
    node = node_at(root_of(text), at)
    if not isinstance(node, yaml.MappingNode):
        raise TypeError(f"the YAML text has no mapping at path {list(at)}")
    return node


def _entry(place: yaml.MappingNode, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    return next(((name, value) for name, value in place.value if name.value == key), None)


def _added(text: str, place: yaml.MappingNode, key: str, value: Any) -> str:
    if place.flow_style:
        end = place.end_mark.index - 1
        comma = ", " if place.value else ""
        return f"{text[:end].rstrip()}{comma}{inline_text(key)}: {inline_text(value)}{text[end:]}"
    first, _ = place.value[0]
    pad = " " * (first.start_mark.index - line_start(text, first.start_mark.index))
    end = line_end(text, end_of(place))
    return _ended(text[:end]) + key_lines(key, value, pad) + text[end:]


def key_lines(key: str, value: Any, pad: str) -> str:
    """Format a key and its value as YAML lines."""
    key = inline_text(key)
    if isinstance(value, dict) and value and key in ("zones", "lines"):
        return f"{pad}{key}:\n" + "".join(
            f"{pad}  {inline_text(name)}: {block_text(one)}\n" for name, one in value.items()
        )
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return f"{pad}{key}:\n" + "".join(item_lines(one, f"{pad}  ") for one in value)
    return f"{pad}{key}: {block_text(value)}\n"


def item_lines(value: dict[str, Any], indent: str) -> str:
    """Format a mapping as the YAML lines of a list item."""
    lines = "".join(key_lines(key, one, f"{indent}  ") for key, one in value.items())
    return f"{indent}- {lines[len(indent) + 2 :]}"


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


# ---- values


def block_text(value: Any) -> str:
    """Format a value as one line of YAML that is valid after a key in block style."""
    if not isinstance(value, str):
        return inline_text(value)
    style = '"' if "\n" in value else None
    written = yaml.safe_dump(value, width=10**9, allow_unicode=True, default_style=style)
    return str(written).removesuffix("\n").removesuffix("\n...")


def inline_text(value: Any) -> str:
    """Format a value as one line of YAML that is valid in both block style and flow style."""
    # YAML parses these keys as booleans, and the settings accept them.
    if isinstance(value, dict) and value.keys() == {"on", "off"}:
        return f"{{on: {value['on']:g}, off: {value['off']:g}}}"
    listed = yaml.safe_dump([value], default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return listed.strip()[1:-1]


# ---- places in a text


def node_at(node: yaml.Node | None, at: At) -> yaml.Node | None:
    """Return the YAML node at a path that starts at `node`.

    Raises:
        KeyError, IndexError, TypeError: if the path does not exist.
    """
    for step in at:
        if isinstance(step, int) and isinstance(node, yaml.SequenceNode):
            node = node.value[step]
        elif isinstance(node, yaml.MappingNode):
            node = {key.value: value for key, value in node.value}[step]
        else:
            raise TypeError(f"the YAML text has no value at path {list(at)}")
    return node


def node_in(text: str, at: At) -> yaml.Node:
    """Return the YAML node at a path in a text.

    Raises:
        KeyError, IndexError, TypeError: if the path does not exist.
    """
    node = node_at(root_of(text), at)
    if node is None:
        raise TypeError(f"the YAML text has no value at path {list(at)}")
    return node


def value_of(node: yaml.Node) -> Any:
    """Convert a YAML node to plain Python values."""
    return yaml.constructor.SafeConstructor().construct_document(node)


def end_of(node: yaml.Node) -> int:
    """Return the character position after the last value in a YAML node. Comments after the value are not included."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return end_of(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def line_start(text: str, at: int) -> int:
    """Return the position of the first character of the line that contains the position `at`."""
    return text.rfind("\n", 0, at) + 1


def line_end(text: str, at: int) -> int:
    """Return the position of the first character after the line that contains the position `at`."""
    if at and text[at - 1] == "\n":  # after a multi-line text
        return at
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1
