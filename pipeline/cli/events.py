"""The event commands: `saccade rules`, `saccade backtest` and `saccade search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.pipeline.cli.app import App
from saccade.pipeline.cli.options import Json, Settings, load_settings, with_settings

rules = App(help="Draft and check event rules.", no_args_is_help=True)


def add_event_commands(app: typer.Typer) -> None:
    """Add the commands `rules`, `backtest` and `search` to the command line."""
    app.add_typer(rules, name="rules")
    app.command()(backtest)
    app.command()(search)


@with_settings("model", "device", "dtype", "conf", "vid_stride", "start", "end", "gates", "began")
def backtest(
    given: Settings,
    config: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with rules, zones and lines.")],
    videos: Annotated[list[str], typer.Argument(metavar="VIDEO", help="Video files.")],
    stream: Annotated[
        str | None, typer.Option(metavar="NAME", help="Stream whose settings to use, if the file has several streams.")
    ] = None,
    forecast: Annotated[
        bool, typer.Option("--forecast", help="Estimate the events per day of each rule, with a 95 % interval.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Evaluate rules on recorded videos, faster than real time, and list the events.

    saccade backtest rules.yaml monday.mp4 tuesday.mp4
    """
    from saccade.pipeline.cli.commands.backtest import backtest as run_backtest

    tested = run_backtest(config, videos, given, stream)
    print(tested.as_json(forecast) if as_json else tested.as_text(forecast))


@rules.command("draft")
def draft_rule(
    sentence: Annotated[str, typer.Argument(metavar="SENTENCE", help="English sentence that describes the event.")],
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="YAML file with the zones and lines that the sentence may name."),
    ] = None,
    stream: Annotated[
        str | None, typer.Option(metavar="NAME", help="Stream whose zones to use, if the file has several streams.")
    ] = None,
) -> None:
    """Convert an English sentence to a rule and check the rule. The rule is printed, not applied.

    saccade rules draft "tell me when someone stands at the door for 10 s" cameras.yaml
    """
    from saccade.pipeline.cli.commands.rules import draft_for

    print(draft_for(sentence, path, stream))


@rules.command("check")
def check_rules(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with rules. It needs no source.")],
) -> None:
    """Check the rules of a configuration. An error is reported with line, column and the expected input.

    saccade rules check cameras.yaml
    """
    from saccade.pipeline.cli.commands.rules import check

    print(check(path))


@with_settings("store", "model", "device", "dtype")
def search(
    given: Settings,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text to search for, such as 'red truck'.")],
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Start of the search: a duration before now such as 1d or 2h, or a Unix time in seconds.",
        ),
    ] = None,
    stream: Annotated[str | None, typer.Option(metavar="NAME", help="Only events of this stream.")] = None,
    rule: Annotated[str | None, typer.Option(metavar="NAME", help="Only events of this rule.")] = None,
    zone: Annotated[str | None, typer.Option(metavar="NAME", help="Only events in this zone.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Maximum number of results.")] = 20,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Address of a running Saccade (--http), which searches its own events with its own model.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            envvar="SACCADE_TOKEN",
            help="Token of the Saccade that --url names. The environment variable SACCADE_TOKEN is safer.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search stored events for a text. The model compares the text with the events' snapshots. Best matches come first.

    saccade search "red truck" --store kept --since 1d

    saccade search "red truck" --url http://127.0.0.1:8080
    """
    settings = load_settings({"store": "kept", **given, "http": "127.0.0.1:0"})
    from saccade.pipeline.cli.commands.search import search as run_search
    from saccade.pipeline.cli.commands.search import search_at
    from saccade.pipeline.cli.formatting import counting
    from saccade.pipeline.errors import ConfigError
    from saccade.pipeline.events.storage.store_reader import EventQuery, time_of_text

    try:
        query = EventQuery(stream, rule, None, zone, None if since is None else time_of_text(since), limit=limit)
    except ValueError as error:
        raise ConfigError(f"--since: {error}") from None
    if url is not None and given:
        raise ConfigError(f"--url: the running Saccade already defines {', '.join(given)}; remove these options")
    with counting() as progress:
        if url is not None:
            found = search_at(url, token, text, query, progress)
        else:
            found = run_search(Path(settings.store or ""), text, query, settings, progress)
    print(found.as_json() if as_json else found.as_text())
