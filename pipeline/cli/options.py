"""Generates command-line flags from the settings of a configuration, without importing slow modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.pipeline.config import RunConfig, flags_of, takes_commas

Command = Callable[..., Any]
Settings = dict[str, Any]
"""The settings given on the command line, by configuration key."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no summary.")]


def help_of(key: str) -> str:
    """Return the description of a setting, with its default value."""
    field = RunConfig.model_fields[key]
    shown = field.default not in (None, "", [], {}, False)
    return f"{field.description}{f' (default {field.default})' if shown else ''}"


def with_settings(*keys: str, panels: Mapping[str, str] | None = None) -> Callable[[Command], Command]:
    """Return a decorator that adds a command-line flag for each setting to a command.

    The first argument of the command is a mapping with the settings that the user has set by flags.

    Args:
        keys: keys of the settings, in the order of the help text.
        panels: heading of each key in the help text; None for the default heading.
    """

    def decorate(command: Command) -> Command:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @wraps(command)
        def call(**values: Any) -> Any:
            given = settings_in({key: values.pop(key) for key in keys})
            return command(given, **values)

        # Arguments come first on the command line, and the command's own flags last in the help.
        arguments = [one for one in own if isinstance(one.annotation.__metadata__[0], typer.models.ArgumentInfo)]
        others = [one for one in own if one not in arguments]
        parameters = [*arguments, *(_flag(key, (panels or {}).get(key)) for key in keys), *others]
        keyword = inspect.Parameter.KEYWORD_ONLY
        call.__signature__ = inspect.Signature([one.replace(kind=keyword) for one in parameters])  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        return call

    return decorate


def settings_in(values: Mapping[str, Any]) -> Settings:
    """Return the settings that the user has set by flags. A list becomes a comma-separated string."""
    given = {key: value for key, value in values.items() if value not in (None, [], ())}
    return {key: ",".join(value) if takes_commas(key) else value for key, value in given.items()}


def sources_in(sources: Sequence[str] | None) -> Settings:
    """Convert the sources on the command line to settings: `source` for one source, `streams` for several sources."""
    if not sources:
        return {}
    return {"source": sources[0]} if len(sources) == 1 else {"streams": [{"source": source} for source in sources]}


def load_settings(given: Settings, config: Path | None = None) -> RunConfig:
    """Load a configuration file, and override its values with the values of the command-line flags.

    Raises:
        ConfigError: if a value is invalid.
    """
    from saccade.pipeline.config.file import load

    return load(config, given)


def _flag(key: str, panel: str | None) -> inspect.Parameter:
    field = RunConfig.model_fields[key]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    text: dict[str, Any] = extra
    kind: Any = field.annotation if field.annotation in (int, float, bool) else str
    if isinstance(field.default, list | dict):
        kind = list[str]
    option = typer.Option(
        *([] if kind is bool else flags_of(key)),
        help=help_of(key),
        metavar=text["metavar"],
        envvar=text["env"],
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
