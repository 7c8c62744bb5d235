"""Writes stream settings into a configuration file. The order, comments and quotes of all other text are preserved.

The new file replaces the old file atomically and is synced to disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from yaml import YAMLError

from saccade.pipeline.analytics.settings import LineSettings, ZoneSettings
from saccade.pipeline.config.edit_rules import values_of_rule, with_rules
from saccade.pipeline.config.run import RunConfig
from saccade.pipeline.config.stream import ListedStream, StreamConfig
from saccade.pipeline.config.yaml_text import (
    At,
    node_in,
    root_of,
    value_of,
    with_item,
    with_key,
    without_item,
    without_key,
)
from saccade.pipeline.errors import ConfigError

_POINTS = {"zones": "polygon", "lines": "points"}
_KINDS: dict[str, type[BaseModel]] = {"zones": ZoneSettings, "lines": LineSettings}


def save_streams(
    path: Path, given: RunConfig, wanted: RunConfig, check: Callable[[Path], object] = lambda path: None
) -> None:
    """Write stream settings into a configuration file. The order, comments and quotes of all other text are preserved.

    Args:
        path: path of a valid configuration file.
        given: the configuration in the file.
        wanted: the new configuration. Each stream has a name and all settings, see `RunConfig.resolved`.
        check: function that checks the new file before it replaces the old file. It raises ConfigError to cancel.

    Raises:
        ConfigError: if the file cannot be read or written, another program has changed it, or `check` rejects it.
    """
    try:
        before = path.read_text(encoding="utf-8")
        text = edited(before, given, wanted)
        if text != before:
            _replace(path, text, check)
    except (YAMLError, KeyError, IndexError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: not saved, because another program changed the file; reload the file and try again"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot save {path}: {error.strerror or error}") from None


def edited(text: str, given: RunConfig, wanted: RunConfig) -> str:
    """Return the YAML text of a configuration, edited to match a new configuration.

    Args:
        text: YAML text of the current configuration.
        given: current configuration.
        wanted: new configuration.

    Raises:
        yaml.YAMLError, KeyError, IndexError, TypeError, ValueError: if the text does not match `given`.
    """
    before, after = given.named(), wanted.named()
    added = [stream for name, stream in after.items() if name not in before]
    removed = [number for number, name in enumerate(before) if name not in after]
    single = bool(given.source)
    if single and added and not removed:
        text, single = _as_list(text, given), False
    for number, (name, stream) in enumerate(before.items()):
        if name in after:
            text = _with_stream(text, () if single else ("streams", number), stream, after[name], given)
    if single and removed:
        for key in ("source", "name"):
            text = without_key(text, (), key)
    else:
        for number in reversed(removed):
            text = without_item(text, ("streams",), number)
    for stream in added:
        text = with_item(text, ("streams",), _values(stream, given))
    return text


def _with_stream(text: str, at: At, old: ListedStream, new: ListedStream, given: RunConfig) -> str:
    for key in ListedStream.model_fields:
        value = getattr(new, key)
        if key == "name" or getattr(old, key) == value:
            continue
        if key == "rules":
            text = with_rules(text, at, value)
        elif value == _without_setting(key, given, in_list=bool(at)):
            text = without_key(text, at, key)
        elif key in _KINDS and value and _is_mapping(text, (*at, key)):
            text = _with_regions(text, (*at, key), getattr(old, key), value)
        else:
            text = with_key(text, at, key, plain_setting(new, key))
    return text


def _with_regions(text: str, at: At, old: dict[str, BaseModel], new: dict[str, BaseModel]) -> str:
    for name, region in new.items():
        if old.get(name) != region:
            text = with_key(text, at, name, _region(str(at[-1]), region))
    for name in old:
        if name not in new:
            text = without_key(text, at, name)
    return text


def _as_list(text: str, given: RunConfig) -> str:
    """Return the YAML text with the setting `source` moved into a list `streams`."""
    stream: dict[str, Any] = {"name": given.name} if given.name else {}
    text = without_key(text, (), "name")
    stream["source"] = value_of(node_in(text, ("source",)))
    root = root_of(text)
    key = next(key for key, _ in root.value if key.value == "source") if root is not None else None
    assert key is not None
    start = key.start_mark.index
    name = f"- name: {stream['name']}\n    " if "name" in stream else "- "
    return f"{text[:start]}streams:\n  {name}{text[start:]}"


def _is_mapping(text: str, at: At) -> bool:
    try:
        return isinstance(value_of(node_in(text, at)), dict)
    except KeyError:
        return False


def _values(stream: ListedStream, given: RunConfig) -> dict[str, Any]:
    """Return the settings of a stream that must be written into the list `streams`, including its name and source.

    Settings with the default value or the common value of all streams are omitted.
    """
    values: dict[str, Any] = {"name": stream.name, "source": stream.source}
    for key in ListedStream.model_fields:
        if key not in values and getattr(stream, key) != _without_setting(key, given, in_list=True):
            values[key] = plain_setting(stream, key)
    return values


def _without_setting(key: str, given: RunConfig, *, in_list: bool) -> Any:
    """Return the value of a setting that a stream does not set: the common value of all streams, or the default."""
    if in_list and key in StreamConfig.model_fields.keys() & given.model_fields_set - {"source"}:
        return getattr(given, key)
    return ListedStream.model_fields[key].get_default(call_default_factory=True)


def plain_setting(stream: ListedStream, key: str) -> Any:
    """Return the value of a stream setting in the form that is written to the configuration file."""
    if key == "rules":
        return [values_of_rule(rule) for rule in stream.rules]
    if key in _KINDS:
        return {name: _region(key, region) for name, region in getattr(stream, key).items()}
    return stream.model_dump(mode="json", include={key})[key]


def _region(kind: str, region: BaseModel) -> Any:
    """Format a zone or line for YAML: as a string of coordinates, or as a mapping if it has other settings."""
    points = ",".join(f"{value:g}" for point in getattr(region, _POINTS[kind]) for value in point)
    others = region.model_dump(mode="json", exclude_defaults=True, exclude={_POINTS[kind]})
    return {_POINTS[kind]: points, **others} if others else points


def _replace(path: Path, text: str, check: Callable[[Path], object]) -> None:
    real = path.resolve()
    beside = real.with_name(f".{real.name}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        check(beside)
        os.chmod(beside, real.stat().st_mode & 0o7777)
        os.replace(beside, real)
        sync_folder(real.parent)
    except ConfigError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"the configuration was not saved: {str(error).replace(str(beside), path.name)}") from None
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a new file in the folder survives a power failure."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
