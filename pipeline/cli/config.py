"""The command `saccade config`, which checks configuration files. Slow modules are imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.pipeline.cli.app import App
from saccade.pipeline.cli.options import load_settings

config_commands = App(help="Work with configuration files.", no_args_is_help=True)


@config_commands.command("check")
def check_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration.")],
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff",
            metavar="URL",
            help="Address of a running Saccade (--http), to show what the file would change there.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", envvar="SACCADE_TOKEN", help="Token of the Saccade that --diff names."),
    ] = None,
) -> None:
    """Check a configuration file and list its streams, without opening sources or outputs.

    saccade config check cameras.yaml
    """
    from saccade.pipeline.cli.commands.configs import changes_of, describe

    print(describe(load_settings({}, file)))
    if diff is not None:
        print("\n".join(changes_of(file, diff, token)) or "nothing would change")
