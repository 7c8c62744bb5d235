"""Reads a configuration or a list of rules from YAML. Command-line values override the values of a configuration.

An error message names the position in the file or the command-line flag. It never contains a secret.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from saccade.pipeline.analytics.settings import LineSettings, ZoneSettings
from saccade.pipeline.config import ListedStream, RunConfig, flags_of
from saccade.pipeline.errors import ConfigError, TextError
from saccade.pipeline.events.settings import Rules, RuleSettings
from saccade.pipeline.settings import NullIsUnset, PlacedError

MAX_DEPTH = 8
NOT_UNICODE = "a value contains bytes that are not UTF-8; only file names can contain these"

_NESTED: dict[int | str, type[BaseModel]] = {"rules": RuleSettings, "zones": ZoneSettings, "lines": LineSettings}
"""For each key with nested settings, the model that defines the nested keys."""

VALUE = "\0"
"""Last step of the path of a value that is a string on one line. An error in such a string has a character offset."""

KeyPath = tuple[int | str, ...]
Where = tuple[int, int]
"""Line and column in a YAML file, both from 1."""
Places = dict[KeyPath, Where]
"""The line and column of each key and list item, by path."""


class RuleList(NullIsUnset):
    """The rules of one stream."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: Rules


def load(path: Path | None, overrides: Mapping[str, Any], *, source: str | None = None) -> RunConfig:
    """Load a configuration file, and override its values with values from the command line.

    Args:
        path: path of the file, or None.
        overrides: values from the command line, by key.
        source: default source if the file has neither source nor streams.

    Raises:
        ConfigError: if the file cannot be read or is invalid YAML, or a value is invalid.
    """
    values, places = _read_yaml(path, read_config_text(path)) if path is not None else ({}, {})
    return _validated(values, places, path, overrides, source)


def load_text(text: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Load a configuration from the text of a configuration file.

    Raises:
        ConfigError: if the text or a value is invalid.
    """
    path = Path("configuration")
    return _validated(*_read_yaml(path, text), path, overrides or {}, None)


def _validated(
    values: dict[str, Any], places: Places, path: Path | None, overrides: Mapping[str, Any], source: str | None
) -> RunConfig:
    if overrides.keys() & {"source", "streams"}:
        values = {key: value for key, value in values.items() if key not in ("source", "streams")}
    try:
        if source and not values.keys() & {"source", "streams"}:
            values = {"source": source, **values}
        return RunConfig.model_validate({**values, **overrides})
    except ValidationError as error:
        first = first_mistake(error)
        key = _key_of(first)
        known = ListedStream if key[:1] == ("streams",) and len(key) > 2 else RunConfig
        if path is None or (key[:1] and key[0] in overrides):
            raise ConfigError(explain(first, known, from_file=False)) from None
        where, reason = _placed(first, places, known)
        raise ConfigError(f"{_at(path, where)}: {reason}") from None
    except UnicodeEncodeError:  # raised by pydantic for a validator's message
        raise ConfigError(f"{path or 'the command line'}: {NOT_UNICODE}") from None


def read_rules(text: str, check: Callable[[list[RuleSettings]], None]) -> list[RuleSettings]:
    """Parse the rules of one stream from a YAML list.

    Args:
        text: YAML text from the user.
        check: function that raises PlacedError if the stream does not support the rules.

    Raises:
        TextError: if the text is invalid or `check` fails.
    """
    values, places = _parse(text, ("rules",))
    try:
        rules = RuleList(rules=[] if values is None else values).rules
        check(rules)
        return rules
    except ValidationError as error:
        where, reason = _placed(first_mistake(error), places, RuleList)
    except PlacedError as error:
        where, reason = _place_in(error, error.key or (), places), str(error)
    raise TextError(reason, *where)


def first_mistake(error: ValidationError) -> ErrorDetails:
    """Return the validation error to show to the user, usually the first error.

    If a mapping has an unknown key and lacks a required key, the unknown key is shown, because it is probably a typo.
    """
    first, *others = error.errors()
    if first["type"] == "missing":
        unknown = (one for one in others if one["type"] == "extra_forbidden" and one["loc"][:-1] == first["loc"][:-1])
        return next(unknown, first)
    return first


def _key_of(error: ErrorDetails) -> KeyPath:
    cause = error.get("ctx", {}).get("error")
    return cause.key if isinstance(cause, PlacedError) and cause.key else error["loc"]


def _placed(error: ErrorDetails, places: Places, known: type[BaseModel]) -> tuple[Where, str]:
    """Return the line and column of a validation error in the YAML text, and a short explanation."""
    cause, key = error.get("ctx", {}).get("error"), _key_of(error)
    if isinstance(cause, PlacedError) and (*key, VALUE) in places:
        return _place_in(cause, key, places), f"{_named(error, key)}{cause}"
    return _nearest(key, places), explain(error, known)


def _place_in(error: PlacedError, key: KeyPath, places: Places) -> Where:
    if (*key, VALUE) not in places:
        return _nearest(key, places)
    line, column = places[*key, VALUE]
    return line, column + error.offset


def _nearest(key: KeyPath, places: Places) -> Where:
    """Return the line and column of a setting, or of the innermost enclosing setting with a known position."""
    return next(places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in places)


def _named(error: ErrorDetails, key: KeyPath) -> str:
    return f"{_called(key).lstrip('.')}: " if error["loc"] else ""


def explain(error: ErrorDetails, known: type[BaseModel], *, from_file: bool = True) -> str:
    """Convert a pydantic error to a short message: the key or flag, and the problem.

    Args:
        error: the error of pydantic.
        known: the model that defines the valid keys.
        from_file: True to name the setting by its key, False to name it by its command-line flag.
    """
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] == "model_type":  # pydantic names a class
        reason = "should be a mapping of keys to values"
    if not error["loc"]:
        return reason
    key = next((step for step in reversed(error["loc"]) if isinstance(step, str)), str(error["loc"][0]))
    known = next((_NESTED[step] for step in error["loc"][:-1] if step in _NESTED), known)
    if error["type"] == "missing":
        what = known.model_fields[key].description or ""
        return f"{key} is missing; add it: {what[:1].lower()}{what[1:]}"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key.replace("-", "_"), known.model_fields, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known.model_fields)}"
        return f"unknown key '{key}'; {hint}"
    first, *inside = error["loc"]
    called = str(first)
    if not from_file:
        called, inside = ("SOURCE", []) if key == "source" else (flags_of(called)[0], inside)
    called += _called(inside)
    given = error["input"]
    # The address of a sink may contain secrets in its path, and a list or mapping may contain one anywhere.
    shown = isinstance(given, str | int | float) and key not in ("http", "http_token", "sinks")
    return f"{called}: {reason}" + (f", got {given!r}" if shown else "")


def _called(steps: Sequence[int | str]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def read_config_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError if the file cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid UTF-8; save the file as UTF-8 text") from None


def _read_yaml(path: Path, text: str) -> tuple[dict[str, Any], Places]:
    """Parse the text of a YAML file. Return its values, and the line and column of each key and list item."""
    try:
        values, places = _parse(text)
    except TextError as error:
        where = "" if error.line is None else f":{error.line}:{error.column}"
        raise ConfigError(f"{path}{where}: {error}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1:1: expected a mapping of keys to values, got a {type(values).__name__}")
    return values, places


def _parse(text: str, at: KeyPath = ()) -> tuple[Any, Places]:
    """Parse a YAML text. Return its values, and the line and column of each key and list item."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        places: Places = {(): (1, 1)}
        if root is not None:
            _note_places(root, at, places)
        return yaml.safe_load(text), places
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = (mark.line + 1, mark.column + 1) if mark else ()
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise TextError(f"invalid YAML: {problem}", *where) from None
    except RecursionError:
        raise TextError(f"the YAML is nested more than {MAX_DEPTH} levels deep") from None
    except yaml.YAMLError as error:
        raise TextError(f"invalid YAML: {' '.join(str(error).split())}") from None


def _note_places(node: yaml.Node, at: KeyPath, places: Places) -> None:
    """Record the line and column of each key and list item of a YAML node in `places`.

    Raises:
        TextError: if a key is defined twice, or the YAML is nested too deeply.
    """
    if len(at) > MAX_DEPTH:  # also stops at recursive aliases
        raise TextError(f"the YAML is nested more than {MAX_DEPTH} levels deep")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*at, str(key.value))
            where = _where(key)
            if inner in places:  # yaml.safe_load would silently use the last value
                raise TextError(f"the key '{key.value}' is defined twice, first in line {places[inner][0]}", *where)
            places[inner] = where
            _note_places(value, inner, places)
            if isinstance(value, yaml.ScalarNode) and value.start_mark.line == value.end_mark.line:
                line, column = _where(value)
                places[*inner, VALUE] = line, column + (value.style in ("'", '"'))
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            places[(*at, number)] = _where(item)
            _note_places(item, (*at, number), places)


def _where(node: yaml.Node) -> Where:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _at(path: Path, where: Where) -> str:
    return f"{path}:{where[0]}:{where[1]}"
