"""Writes zones, lines and rules into a configuration file, and leaves all else in it as it is: order, comments, quotes.

The file is replaced at once or not at all. Knows no running streams.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from yaml import YAMLError

from saccade.pipeline.analytics.settings import LineSettings, Regions, ZoneSettings
from saccade.pipeline.config.edit_rules import with_rules
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.settings import RuleSettings

_POINTS = {"zones": "polygon", "lines": "points"}
_KINDS: dict[str, type[BaseModel]] = {"zones": ZoneSettings, "lines": LineSettings}


def save_settings(
    path: Path,
    regions: Mapping[int | None, Regions],
    rules: Mapping[int | None, Sequence[RuleSettings]],
    check: Callable[[Path], object] = lambda path: None,
) -> None:
    """Write zones, lines and rules; order, comments and quotes of all else stay.

    Args:
        path: of a valid configuration file.
        regions: by the number of the stream in `streams`; None for the settings of a whole file with one source.
        rules: likewise.
        check: reads the new file before it replaces the old one; raises ConfigError to leave all as it was.

    Raises:
        ConfigError: if the file cannot be read or written, has another shape by now, or `check` refuses it.
    """
    from ruamel.yaml.error import YAMLError as EditorError

    try:
        before = path.read_text(encoding="utf-8")
        text = _with_regions(before, regions) if regions else before
        for number, wanted in rules.items():
            text = with_rules(text, () if number is None else ("streams", number), wanted)
        if text != before:
            _replace(path, text, check)
    except (EditorError, YAMLError, KeyError, IndexError, TypeError, ValueError):
        raise ConfigError(f"{path}: nothing can be written to it: it has been changed meanwhile") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _with_regions(before: str, wanted: Mapping[int | None, Regions]) -> str:
    """The text of a configuration with other zones and lines in it, by the number of the stream or None for all of it.

    Raises:
        KeyError, IndexError, TypeError: if it has another shape.
        ruamel.yaml.error.YAMLError: if it is not YAML.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 10_000  # no line is folded
    _, indent, offset = load_yaml_guess_indent(before)
    editor.indent(mapping=2, sequence=indent or 2, offset=offset or 0)
    root = editor.load(before)
    places = [(root if number is None else root["streams"][number], regions) for number, regions in wanted.items()]
    changed = [_write(place, kind, getattr(regions, kind)) for place, regions in places for kind in _POINTS]
    if not any(changed):
        return before
    text = io.StringIO()
    editor.dump(root, text)
    return text.getvalue()


def _write(place: Any, kind: str, regions: Mapping[str, BaseModel]) -> bool:
    """Make the zones, or the lines, at a place of the file those wanted; whether any were others."""
    old = place.get(kind)
    if not regions:
        place.pop(kind, None)
        return bool(old)
    changed = not isinstance(old, Mapping)
    if changed:  # NAME=POINTS texts in a list, or nothing
        place[kind] = {}
        old = place[kind]
    for name in [name for name in old if name not in regions]:
        del old[name]
        changed = True
    for name, region in regions.items():
        if name not in old or _read(kind, old[name]) != region:
            old[name] = _as_value(kind, region)
            changed = True
    return changed


def _read(kind: str, value: Any) -> BaseModel | None:
    """What a value in the file means; None if nothing."""
    given = value if isinstance(value, Mapping) else {_POINTS[kind]: value}
    try:
        return _KINDS[kind].model_validate(given)
    except ValueError:
        return None


def _as_value(kind: str, region: BaseModel) -> Any:
    """A region as it is written by hand: its points alone where nothing else of it is set."""
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
    except ConfigError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"nothing is saved: {str(error).replace(str(beside), path.name)}") from None
    except OSError:
        beside.unlink(missing_ok=True)
        raise
