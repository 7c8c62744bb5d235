"""Reads a configuration: a YAML file, and the command line's values over it, into one validated object.

Every complaint is one line that names the file, line and key, or the flag, and repeats nothing that may be secret.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from saccade.pipeline.analytics.settings import LineSettings, ZoneSettings
from saccade.pipeline.core.config import ListedStream, RunConfig, flags_of
from saccade.pipeline.core.errors import ConfigError
from saccade.pipeline.events.settings import RuleSettings
from saccade.pipeline.settings import PlacedError

MAX_DEPTH = 8

_NESTED: dict[int | str, type[BaseModel]] = {"rules": RuleSettings, "zones": ZoneSettings, "lines": LineSettings}
"""Whose keys there are below a key."""

VALUE = "\0"
"""Last step of the path of a value, such as that of a text on one line, in which there may be a mistake."""

KeyPath = tuple[int | str, ...]
Where = tuple[int, int]
"""Line and column in a YAML file, both from 1."""


def load(path: Path | None, overrides: Mapping[str, Any], *, source: str | None = None) -> RunConfig:
    """Read `path`, if given, and put `overrides` (the command line's values, by key) over it.

    Args:
        path: of the file.
        overrides: values by key.
        source: what stands for the source where the file names neither one nor streams.

    Raises:
        ConfigError: if the file cannot be read, is not YAML, or any value in it is invalid.
    """
    values, places = _read_yaml(path) if path is not None else ({}, {})
    if overrides.keys() & {"source", "streams"}:
        values = {key: value for key, value in values.items() if key not in ("source", "streams")}
    try:
        if source and not values.keys() & {"source", "streams"}:
            values = {"source": source, **values}
        return RunConfig.model_validate({**values, **overrides})
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        placed = cause if isinstance(cause, PlacedError) else None
        key = placed.key if placed and placed.key else first["loc"]
        known = ListedStream if key[:1] == ("streams",) and len(key) > 2 else RunConfig
        if path is None or (key[:1] and key[0] in overrides):
            raise ConfigError(explain(first, known, from_file=False)) from None
        if placed and (*key, VALUE) in places:
            line, column = places[*key, VALUE]
            raise ConfigError(f"{_at(path, (line, column + placed.offset))}: {_named(first, key)}{placed}") from None
        nearest = next(places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in places)
        raise ConfigError(f"{_at(path, nearest)}: {explain(first, known)}") from None


def _named(error: ErrorDetails, key: KeyPath) -> str:
    """The setting with the mistake, where the message does not name it."""
    return f"{_called(key).lstrip('.')}: " if error["loc"] else ""


def explain(error: ErrorDetails, known: type[BaseModel], *, from_file: bool = True) -> str:
    """Turn pydantic's error into half a line: which key or flag, and what is wrong with it.

    Args:
        error: as pydantic reports it.
        known: whose keys there are, at the place of the error.
        from_file: name it as a key; otherwise as a flag of the command line.
    """
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not error["loc"]:
        return reason
    key = next((step for step in reversed(error["loc"]) if isinstance(step, str)), str(error["loc"][0]))
    known = next((_NESTED[step] for step in error["loc"][:-1] if step in _NESTED), known)
    if error["type"] == "missing":
        return f"{key} is missing: {known.model_fields[key].description}"
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
    # The address of a sink may hold keys in its path, and a list or mapping may hold one anywhere.
    shown = isinstance(given, str | int | float) and key not in ("http", "http_token", "sinks")
    return f"{called}: {reason}" + (f", got {given!r}" if shown else "")


def _called(steps: Sequence[int | str]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, Where]]:
    """The file's mapping, and the place of every key and list item in it by its path."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        places: dict[KeyPath, Where] = {(): (1, 1)}
        if root is not None:
            _note_places(path, root, (), places)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}{place}: broken YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: broken YAML: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1:1: should be a mapping of keys to values, not a {type(values).__name__}")
    return values, places


def _note_places(path: Path, node: yaml.Node, at: KeyPath, places: dict[KeyPath, Where]) -> None:
    """Note where every key and item is; refuse a key given twice, of which YAML would silently keep the last."""
    if len(at) > MAX_DEPTH:  # also ends a document whose aliases lead back into itself
        raise ConfigError(f"{path}: nested more than {MAX_DEPTH} levels deep")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*at, str(key.value))
            where = _where(key)
            if inner in places:
                raise ConfigError(f"{_at(path, where)}: '{key.value}' is given twice, first in line {places[inner][0]}")
            places[inner] = where
            _note_places(path, value, inner, places)
            if isinstance(value, yaml.ScalarNode) and value.start_mark.line == value.end_mark.line:
                line, column = _where(value)
                places[*inner, VALUE] = line, column + (value.style in ("'", '"'))
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            places[(*at, number)] = _where(item)
            _note_places(path, item, (*at, number), places)


def _where(node: yaml.Node) -> Where:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _at(path: Path, where: Where) -> str:
    return f"{path}:{where[0]}:{where[1]}"
